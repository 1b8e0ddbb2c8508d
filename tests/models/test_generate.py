"""Decoding: equal to ``transformers`` and to decoding without a cache, whatever the neighbours."""

import pytest
import torch

from equigrad.errors import UserError
from equigrad.models.generate import generate
from tests.models.test_decoder import build, greedy_without_cache, make, reference

NEXT = ["qwen3-next", "qwen3-next-dense"]
PROMPTS = [[5, 6, 7], [1], [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 11, 12]]


@pytest.mark.parametrize("name", ["llama", "llama-yarn", "qwen2", "qwen3", "gpt-oss", "gpt-oss-other", *NEXT])
def test_greedy_equals_transformers(name: str) -> None:
    model = build(make(name))
    hf = reference(model.config, model)
    ours = generate(model, PROMPTS, 20, temperature=0)
    for prompt, output in zip(PROMPTS, ours, strict=True):
        theirs = hf.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=96,
        )
        assert output == theirs[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", ["qwen2-window", "qwen3", "gpt-oss", *NEXT])
def test_greedy_equals_decoding_without_a_cache(name: str) -> None:
    model = build(make(name))
    with torch.no_grad():
        assert generate(model, PROMPTS, 20, temperature=0) == [greedy_without_cache(model, p, 20) for p in PROMPTS]


def test_samples_do_not_depend_on_neighbours_and_do_on_the_seed() -> None:
    model = build(make("llama"))
    together = generate(model, PROMPTS, 30, 1.0, 0.9, seed=4)
    assert generate(model, PROMPTS[:1], 30, 1.0, 0.9, seed=4) == together[:1]
    assert generate(model, PROMPTS, 30, 1.0, 0.9, seed=4) == together
    assert generate(model, PROMPTS, 30, 1.0, 0.9, seed=5) != together
    assert generate(model, [PROMPTS[0]] * 2, 30, seed=1)[0] != generate(model, [PROMPTS[0]] * 2, 30, seed=1)[1]


def test_sampling_follows_the_probabilities_and_top_p() -> None:
    model = build(make("llama"))
    draws = [o[0] for o in generate(model, [[3, 1, 4]] * 4000, 1, temperature=0.5, seed=0)]
    from equigrad.numerics.row import Row

    with torch.no_grad():
        wanted = (model(torch.tensor([3, 1, 4]), Row.of([3]))[-1].double() / 0.5).softmax(0)
    seen = torch.bincount(torch.tensor(draws), minlength=97).double() / len(draws)
    assert (seen - wanted).abs().sum() < 0.15
    kept = set(wanted.argsort(descending=True)[:1].tolist())
    assert {o[0] for o in generate(model, [[3, 1, 4]] * 20, 1, temperature=0.5, top_p=1e-6)} == kept


def test_a_sequence_without_numbers_reaches_nobody_who_has_its_slot_later() -> None:
    model = build(make("gpt-oss"))
    with torch.no_grad():
        model.model.embed_tokens.weight[96] = torch.nan
    expected = generate(model, [[1], [5, 6]], 12, seed=4, stop=[96])[1]
    # Without numbers the last token is chosen: the first sequence ends at once, and the second has its slot.
    assert generate(model, [[96, *range(20)], [5, 6]], 12, seed=4, stop=[96]) == [[], expected]


def test_a_stop_token_ends_one_sequence_and_not_the_others() -> None:
    model = build(make("llama"))
    free = generate(model, PROMPTS, 20, temperature=0)
    stop = free[0][4]
    stopped = generate(model, PROMPTS, 20, temperature=0, stop=[stop])
    for before, after in zip(free, stopped, strict=True):
        assert after == (before[: before.index(stop)] if stop in before else before)


def test_no_new_tokens_no_prompts_and_impossible_lengths() -> None:
    model = build(make("llama"))
    assert generate(model, PROMPTS, 0) == [[], [], []]
    assert generate(model, [], 5) == []
    with pytest.raises(UserError, match="longer than the model"):
        generate(model, [[1] * 100], 29)
    with pytest.raises(UserError, match="empty"):
        generate(model, [[]], 3)


def test_a_tiny_temperature_is_greedy() -> None:
    model = build(make("llama"))
    assert generate(model, PROMPTS, 5, temperature=1e-307) == generate(model, PROMPTS, 5, temperature=0)
