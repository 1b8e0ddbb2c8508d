"""Records of rollout engines: streams of one length, stops, and requests that cannot be served."""

from dataclasses import replace
from typing import Any

import pytest

from equigrad.errors import UserError
from equigrad.rl.engine.protocol import Completion, Request, Tokens, check

REQUEST = Request("a", (1, 2, 3), 4, version=7)


def begun(*ids: int, version: int = 6) -> Tokens:
    numbers = (-1.0,) * len(ids)
    return Tokens(ids, numbers, numbers, numbers, (version,) * len(ids))


def test_streams_of_unequal_length_are_refused() -> None:
    with pytest.raises(ValueError, match="unequal"):
        Tokens((1, 2), (0.0, 0.0), (0.0, 0.0), (0.0,), (1, 1))


def test_a_completion_stops_at_an_id_or_with_a_sequence_of_its_own_tokens() -> None:
    request = replace(REQUEST, stop_ids=frozenset({9}), stop_sequences=((3, 4), (5, 5, 5)))
    ends = [(9,), (1, 9), (3, 4), (1, 3, 4), (5, 5, 5)]
    goes_on = [(), (9, 1), (4,), (4, 3), (5, 5), (3, 4, 1)]
    assert [request.stops(ids) for ids in (*ends, *goes_on)] == [True] * len(ends) + [False] * len(goes_on)


def test_a_partial_completion_is_continued_and_a_finished_one_is_not() -> None:
    partial = Completion("a", begun(8, 9), None)
    assert partial.continued(REQUEST, 8) == replace(REQUEST, begun=partial.tokens, version=8)
    with pytest.raises(ValueError, match="finished"):
        Completion("a", begun(8), "length").continued(REQUEST, 8)
    assert [Completion("a", begun(), finish).truncated for finish in ("stop", "length", None)] == [False, True, False]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 6}, "request a: it wants the weights of version 6; the engine has version 7 .*newer"),
        ({"version": 8}, "request a: it wants the weights of version 8; the engine has version 7 .*older"),
        ({"prompt": ()}, "request a: its prompt is empty"),
        ({"prompt": (1, 20)}, "request a: token 20 is not in the vocabulary of 20"),
        ({"begun": begun(-1)}, "request a: token -1 is not in the vocabulary"),
        ({"most": 0}, "request a: most = 0"),
        ({"most": 8}, "request a: its prompt of 3 tokens and 8 new ones do not fit: .* 10 together"),
        ({"begun": begun(1, 2, 3, 4)}, "request a: it is finished: it begins with 4 tokens, of at most 4"),
        ({"begun": begun(5), "stop_ids": frozenset({5})}, "request a: it is finished"),
        ({"temperature": -0.1}, "temperature = -0.1"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"top_p": 0.0}, "top_p = 0.0"),
        ({"top_k": -1}, "top_k = -1"),
        ({"stop_sequences": ((),)}, "stop sequence is empty"),
    ],
)
def test_a_request_that_cannot_be_served_is_named(changes: dict[str, Any], message: str) -> None:
    check([REQUEST], 7, 10, 20)
    with pytest.raises(UserError, match=message):
        check([replace(REQUEST, id="b"), replace(REQUEST, **changes)], 7, 10, 20)


def test_an_engine_without_weights_serves_nothing() -> None:
    with pytest.raises(UserError, match="version 7; the engine has none yet"):
        check([REQUEST], None, 10, 20)


def test_ids_are_unique_and_a_group_has_one_prompt() -> None:
    with pytest.raises(UserError, match="request a: two requests have this id"):
        check([REQUEST, REQUEST], 7, 10, 20)
    grouped = replace(REQUEST, group="g")
    check([grouped, replace(grouped, id="b")], 7, 10, 20)
    with pytest.raises(UserError, match="request b: its prompt is not that of request a, though both are of group g"):
        check([grouped, replace(grouped, id="b", prompt=(1,))], 7, 10, 20)
