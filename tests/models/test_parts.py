"""Stages of a pipeline: every block and parameter in one of them, and none with much more to do than need be."""

import time
from itertools import combinations, pairwise

import pytest

from equigrad.config.model import LinearAttention, Model
from equigrad.models.parts import Part, cut_into_parts
from equigrad.models.specs import layer_flops, parameter_specs, token_flops


def model(layers: int, vocabulary: int, tied: bool = True) -> Model:
    return Model(vocab_size=vocabulary, num_hidden_layers=layers, tie_word_embeddings=tied)


def most(config: Model, bounds: list[int]) -> float:
    """The operations of the part that has most of them."""
    head = 6.0 * config.vocabulary * config.hidden_size
    block = (token_flops(config)(64) - head) / config.num_hidden_layers
    sizes = [b - a for a, b in pairwise(bounds)]
    return max(n * block + (head if i == len(sizes) - 1 else 0) for i, n in enumerate(sizes))


@pytest.mark.parametrize("vocabulary", [100, 5_000, 50_000])
@pytest.mark.parametrize("layers", [1, 2, 5, 8])
def test_no_other_cut_is_better(layers: int, vocabulary: int) -> None:
    config = model(layers, vocabulary)
    for count in range(1, layers + 1):
        parts = cut_into_parts(config, count, 128)
        bounds = [0, *(part.stop for part in parts)]
        assert [part.start for part in parts] == bounds[:-1]
        assert bounds[-1] == layers
        assert all(part.stop > part.start for part in parts)
        others = ([0, *middle, layers] for middle in combinations(range(1, layers), count - 1))
        assert most(config, bounds) == pytest.approx(min(most(config, other) for other in others))


@pytest.mark.parametrize("count", [2, 3, 5])
def test_blocks_are_cut_by_what_each_computes(count: int) -> None:
    """Two blocks with attention are much dearer than the other six."""
    linear = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "full_attention_interval": 4}
    config = model(8, 100).model_copy(update={"linear_attention": LinearAttention(**linear), "intermediate_size": 8})
    work, head = layer_flops(config)
    costs = [block(64) for block in work]
    assert sum(costs) + head == pytest.approx(token_flops(config)(64))
    assert costs[3] > 3 * costs[2]

    def dearest(bounds: list[int]) -> float:
        return max(sum(costs[a:b]) + (head if b == 8 else 0) for a, b in pairwise(bounds))

    found = dearest([0, *(part.stop for part in cut_into_parts(config, count, 128))])
    assert found == pytest.approx(min(dearest([0, *middle, 8]) for middle in combinations(range(1, 8), count - 1)))


@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_belongs_to_one_part_and_a_tied_embedding_to_two(tied: bool) -> None:
    config = model(5, 500, tied)
    parts = cut_into_parts(config, 3, 128)
    for name in parameter_specs(config):
        holders = [part for part in parts if part.holds(name, tied)]
        assert len(holders) == (2 if tied and "embed" in name else 1), name
    assert parts[0].holds("model.embed_tokens.weight", tied)
    assert parts[-1].holds("model.norm.weight", tied)


def test_a_whole_model_is_one_part() -> None:
    assert cut_into_parts(model(4, 100), 1, 64) == (Part(0, 4, 4),)


@pytest.mark.parametrize("count", [0, 5])
def test_more_parts_than_blocks_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match="4 blocks cannot be cut"):
        cut_into_parts(model(4, 100), count, 64)


def test_hundreds_of_stages_are_cut_at_once() -> None:
    began = time.monotonic()
    parts = cut_into_parts(model(600, 5_000), 300, 1000)
    assert len(parts) == 300
    assert {part.stop - part.start for part in parts} <= {1, 2, 3}
    assert time.monotonic() - began < 5
