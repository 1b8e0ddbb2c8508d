"""Records survive JSON; whatever a verifier gives becomes a verdict; what is no question is refused."""

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equigrad.rl.tasks.protocol import (
    MOST_PARTS,
    MOST_TEXT,
    Conversation,
    Problem,
    Question,
    Task,
    Verdict,
    as_verdict,
    check_question,
    judge,
)
from tests.rl.tasks.given import talk

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.text() | st.lists(st.fixed_dictionaries({"role": st.text(), "content": st.text()}), max_size=2),
    st.dictionaries(st.text(), JSON, max_size=3),
    st.lists(st.tuples(st.sampled_from(["model", "environment"]), st.text()), max_size=4),
    st.booleans(),
    st.none() | st.text(),
)
def test_a_conversation_survives_json(prompt: Any, facts: Any, turns: Any, ended: bool, fault: str | None) -> None:
    conversation = Conversation(Problem("id", "task", "train", 3, 1, prompt, facts))
    for author, text in turns:
        conversation = conversation.said(author, text)
    conversation = Conversation(conversation.problem, conversation.turns, ended, fault)
    assert Conversation.from_json(json.loads(json.dumps(conversation.to_json()))) == conversation


def test_the_completion_is_what_the_model_said_last() -> None:
    conversation = talk(Question("1+1=", {}))
    assert conversation.completion == ""
    assert conversation.said("model", "a").said("model", "b").said("environment", "c").completion == "b"


class Raising:
    def __repr__(self) -> str:
        raise ValueError("no")


@pytest.mark.parametrize("given", [0.5, (0.5, "because"), Verdict(0.5, "because", parts={"a": 1.0}), np.float32(0.5)])
def test_numbers_pairs_and_verdicts_are_verdicts(given: Any) -> None:
    found = as_verdict(given)
    assert (found.reward, found.failed) == (0.5, False)
    assert type(found.reward) is float


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (None, "no finite number for a reward: None"),
        ("1.0", "no finite number for a reward"),
        (math.nan, "no finite number for a reward: nan"),
        (-math.inf, "no finite number"),
        (10**400, "no finite number"),
        (1j, "no finite number"),
        ([1.0], "no finite number"),
        ((1.0, "a", "b"), "no finite number"),
        ((1.0, 2.0), "a reason that is no text: 2.0"),
        ((1.0, None), "a reason that is no text"),
        (Verdict(1.0, parts={"a": math.nan}), "no finite number for the part 'a': nan"),
        (Verdict(1.0, parts={3: 1.0}), "the part 3"),  # type: ignore[dict-item]
        (Verdict(1.0, parts=[1.0]), "parts that are no table"),  # type: ignore[arg-type]
        (Verdict(1.0, parts={str(n): 0.0 for n in range(MOST_PARTS + 1)}), "parts that are no table of at most"),
        (Raising(), "a Raising whose repr raises ValueError"),
    ],
)
def test_garbage_is_a_failure_and_no_zero(given: Any, reason: str) -> None:
    found = as_verdict(given)
    assert found.failed
    assert reason in found.reason
    assert len(found.reason) < 300


def test_long_reasons_are_cut_and_a_failed_verdict_has_no_reward() -> None:
    assert len(as_verdict((1.0, "x" * 10**6)).reason) == MOST_TEXT
    assert as_verdict(Verdict(7.0, "gave up", failed=True)) == Verdict(0.0, "gave up", failed=True)


def test_what_a_verifier_raises_is_in_the_reason_with_its_place() -> None:
    class Broken(Task):
        def draw(self, draw: Any, level: int) -> Question:
            raise NotImplementedError

        def verify(self, conversation: Conversation) -> float:
            return float(conversation.problem.facts["no such"])

    found = judge(Broken(), talk(Question("1+1=", {}), "2"))
    assert found.failed
    assert "KeyError: 'no such'" in found.reason
    assert "test_protocol.py, line" in found.reason


CHAT = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("given", [Question("Hi", {}), ("Hi", {"a": [1, None]}), Question(CHAT, {}, "key")])
def test_a_question_is_a_prompt_and_facts(given: Any) -> None:
    assert check_question(given) == Question(*given)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("Hi", "a question is made of"), (None, "a question is made of"), (("Hi",), "a question is made of"),
        (("", {}), "the prompt is empty"), (([], {}), "a prompt is text, or a list"), ((7, {}), "a prompt is text"),
        (([{"role": "user"}], {}), "a prompt is text, or a list"), ((["Hi"], {}), "a prompt is text, or a list"),
        (("Hi", 7), "facts are a table"), (("Hi", {}, 7), "a key is text"),
        (("Hi", {"a": {1, 2}}), "not all JSON data"),
        (("Hi", {"a": math.nan}), "not all JSON data"),
    ],
)  # fmt: skip
def test_what_is_no_question_is_refused(given: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_question(given)
