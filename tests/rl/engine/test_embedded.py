"""The embedded engine in native numerics: what it computes, when it stops, and that requests do not meet."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from equigrad.errors import UserError
from equigrad.rl.engine.embedded import EmbeddedEngine, Limits
from equigrad.rl.engine.protocol import Request, Tokens
from tests.models.test_decoder import build, make, reference
from tests.rl.engine.given import PROMPTS, Counted, engine, float32, interrupted, losses, requests, served

NAMES = ["qwen2", "qwen2-window", "qwen3-moe", "gpt-oss", "qwen3-next"]


def test_greedy_equals_transformers() -> None:
    model = build(make("qwen2"))
    hf = reference(model.config, model)
    given = requests(20, temperature=0.0)
    found = served(engine(model), given)
    for request in given:
        theirs = hf.generate(
            torch.tensor([request.prompt]), attention_mask=torch.ones(1, len(request.prompt), dtype=torch.int64),
            max_new_tokens=request.most, do_sample=False, eos_token_id=None, pad_token_id=96,
        )  # fmt: skip
        assert found[request.id].tokens.ids == tuple(theirs[0, len(request.prompt) :].tolist())
        assert found[request.id].finish == "length"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_log_probabilities_are_those_of_a_training_forward(name: str, temperature: float) -> None:
    model, given = build(make(name)), requests(temperature=temperature, top_k=20, top_p=0.8)
    found = served(engine(model), given)
    for request, loss in zip(given, losses(model, given, found), strict=True):
        torch.testing.assert_close(float32(found[request.id].tokens.log_probs), -loss, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("slots", [1, 2, 5])
@pytest.mark.parametrize("prefill_tokens", [1, 8192])
def test_slots_and_order_of_arrival_change_no_token(slots: int, prefill_tokens: int) -> None:
    model, given = build(make("gpt-oss")), requests()
    expected = served(engine(model), given)
    found = served(engine(model, slots, prefill_tokens=prefill_tokens), given[::-1])
    assert {i: c.tokens.ids for i, c in found.items()} == {i: c.tokens.ids for i, c in expected.items()}


def test_weights_that_give_no_numbers_end_the_call_with_the_name_of_the_request() -> None:
    model = build(make("llama"))
    with torch.no_grad():
        model.model.embed_tokens.weight[96] = torch.nan
    given = [Request("good", (1, 2), 3, 1), Request("bad", (96, 3), 3, 1)]
    with pytest.raises(FloatingPointError, match="request bad: the weights of version 1 give no finite"):
        list(engine(model).generate(given))


@pytest.mark.parametrize("name", ["qwen2", "gpt-oss", "qwen3-next"])
@pytest.mark.parametrize("slots", [2, 3, 9])
def test_the_prompt_of_a_group_is_computed_once_wherever_its_members_find_room(name: str, slots: int) -> None:
    model = Counted(build(make(name)))
    groups = [
        Request(f"{g}/{n}", prompt, 5, 1, seed=10 * g + n, group=str(g))
        for g, prompt in enumerate(PROMPTS[:3])
        for n in range(4)
    ]
    expected = served(engine(build(make(name)), slots), [replace(r, group=None) for r in groups])
    assert served(engine(model, slots), groups[::2] + groups[1::2]).keys() == expected.keys()
    prompts, decoded = sum(len(prompt) for prompt in PROMPTS[:3]), len(groups) * 4  # the first token is a prompt's
    assert sum(model.rows) == prompts + decoded
    found = served(engine(model, slots), groups)
    assert {i: c.tokens.ids for i, c in found.items()} == {i: c.tokens.ids for i, c in expected.items()}
    assert len({c.tokens.ids for c in found.values()}) > 6  # the members of a group draw numbers of their own


def test_a_group_that_was_stopped_before_all_of_it_had_room_is_continued() -> None:
    model = build(make("qwen2"))
    group = [Request(str(n), PROMPTS[2], 6, 1, seed=n, group="g") for n in range(5)]
    expected = served(engine(model), group)
    found = interrupted(engine(model, 2), group, 2)
    assert {i: c.tokens.ids for i, c in found.items()} == {i: c.tokens.ids for i, c in expected.items()}


def test_stop_ids_and_sequences_end_a_completion_of_which_they_are_the_end() -> None:
    model = build(make("llama"))
    free = served(engine(model), requests())["0"].tokens
    token, pair = free.ids[3], free.ids[4:6]
    first = free.ids.index(token)
    for changes, length in (({"stop_ids": frozenset({token})}, first + 1), ({"stop_sequences": (pair,)}, 6)):
        found = served(engine(model), requests(**changes))["0"]
        assert (found.finish, found.tokens) == ("stop", replace(free, **_cut(free, length)))


def _cut(tokens: Tokens, length: int) -> dict[str, Any]:
    return {name: stream[:length] for name, stream in vars(tokens).items()}


@pytest.mark.parametrize("every", [1, 3])
def test_what_was_stopped_and_continued_is_what_would_have_come_and_tells_its_versions(every: int) -> None:
    model, given = build(make("qwen3")), requests()
    expected = served(engine(model), given)
    found = interrupted(engine(model), given, every)
    assert {i: c.tokens.ids for i, c in found.items()} == {i: c.tokens.ids for i, c in expected.items()}
    assert all(c.finish == "length" for c in found.values())


def test_a_continued_completion_tells_which_weights_drew_which_token() -> None:
    model = build(make("llama"))
    one, given = engine(model), requests(6, PROMPTS[:1])
    calls = iter([False, False, True])
    partial = served(one, given, lambda: next(calls))["0"]
    assert partial.finish is None
    assert len(partial.tokens) == 3  # two steps, and the token that follows the prompt
    one.load(((name, p.detach() * 1.1) for name, p in model.named_parameters()), 2)
    whole = served(one, [partial.continued(given[0], 2)])["0"].tokens
    assert whole.versions == (1, 1, 1, 2, 2, 2)
    assert whole.ids[:3] == partial.tokens.ids
    assert whole.log_probs[:3] == partial.tokens.log_probs


def test_an_engine_serves_a_request_only_with_the_weights_it_was_told_to() -> None:
    model = build(make("llama"))
    one, weights = engine(model), {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(UserError, match="wants the weights of version 2; the engine has version 1"):
        next(one.generate([replace(requests()[0], version=2)]))
    call = one.generate(requests())
    next(call)
    with pytest.raises(UserError, match="version 2 came while those of version 1 are in use"):
        one.load(weights.items(), 2)
    with pytest.raises(UserError, match="one call at a time"):
        next(one.generate(requests()))
    call.close()
    one.load(weights.items(), 2)
    assert one.version == 2
    with pytest.raises(UserError, match="wants the weights of version 1; the engine has version 2"):
        next(one.generate(requests()))
    assert next(one.generate([replace(requests()[0], version=2)])).finish == "length"


def test_weights_that_do_not_fit_are_refused_and_those_that_broke_off_are_not_used() -> None:
    model = build(make("llama"))
    one, weights = engine(model), {name: p.detach().clone() for name, p in model.named_parameters()}
    name = next(iter(weights))

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(weights.items())[:3]
        raise ConnectionError("gone")

    arriving: list[tuple[Any, str]] = [
        ([item for item in weights.items() if item[0] != name], f"version 2: {name} did not come"),
        ((weights | {name: weights[name][:1]}).items(), f"version 2: {name} has shape"),
        ([*weights.items(), (name, weights[name])], f"{name} is not in the model, or came twice"),
        ((weights | {"other": weights[name]}).items(), "other is not in the model"),
        (broken(), "gone"),
    ]
    for given, why in arriving:
        with pytest.raises((UserError, ConnectionError), match=why):
            one.load(given, 2)
        with pytest.raises(UserError, match="the engine has none yet"):
            next(one.generate(requests()))
        one.load(weights.items(), 1)
        assert next(one.generate(requests())).finish == "length"


def test_no_requests_and_impossible_limits() -> None:
    model = build(make("llama"))
    assert list(engine(model).generate([])) == []
    with pytest.raises(UserError, match="capacity of 129 tokens is more than the model's 128"):
        engine(model, capacity=129)
    with pytest.raises(UserError, match="at least one slot"):
        Limits(0, 10)


@pytest.mark.parametrize("name", ["qwen2", "qwen3-next"])
def test_the_cache_takes_what_was_said_and_no_more_than_is_allowed(name: str) -> None:
    model, limits = build(make(name)), Limits(3, 40)
    one = EmbeddedEngine(model, limits, {}, 1)
    served(one, requests())
    assert one._cache is not None
    kept = [*one._cache._stores.values(), *(t for pair in one._cache._recurrent.values() for t in pair)]
    needed = sum(t.nbytes for t in kept)
    assert EmbeddedEngine(model, replace(limits, cache_bytes=needed), {}, 1)
    with pytest.raises(
        UserError, match=f"needs a cache of {needed} bytes, and may have {needed - 1}: enough for 2 slots"
    ):
        EmbeddedEngine(model, replace(limits, cache_bytes=needed - 1), {}, 1)
