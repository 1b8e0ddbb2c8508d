"""Tiles cover what may be seen, once, on one rank and on a ring."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equigrad.numerics.tiles import Tile, ring_tiles, segment_tiles
from equigrad.parallel.partition import Partition

LENGTHS, WINDOWS = st.lists(st.integers(1, 12), max_size=6), st.one_of(st.none(), st.integers(1, 14))


def seen(lengths: list[int], window: int | None) -> Tensor:
    """[T, T]: 1 where the query (row) sees the key (column)."""
    segment = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    at = torch.arange(len(segment))
    mask = (segment[:, None] == segment) & (at[:, None] >= at)
    return (mask if window is None else mask & (at[:, None] - at < window)).int()


def add(tile: Tile, counts: Tensor) -> None:
    """Counts what a tile's kernel would see, as the kernel is told."""
    block = torch.ones(tile.queries, tile.keys, dtype=torch.int32)
    if tile.causal:
        block = block.tril()
    elif tile.masked:
        mask = tile.mask(torch.zeros(()))
        assert mask is not None
        block = (mask == 0).int()
    assert block.any(1).all(), "a query that sees nothing"
    for index in range(tile.count):
        q, k = tile.q0 + index * tile.queries, tile.k0 + index * tile.keys
        counts[q : q + tile.queries, k : k + tile.keys] += block


@given(LENGTHS, WINDOWS)
def test_tiles_of_segments_cover_each_pair_once(lengths: list[int], window: int | None) -> None:
    tiles, counts = segment_tiles(tuple(lengths), window), torch.zeros(sum(lengths), sum(lengths), dtype=torch.int32)
    for tile in tiles.first:
        add(tile, counts)
    assert not tiles.rest
    assert torch.equal(counts, seen(lengths, window))


@pytest.mark.parametrize("window", [100, 128, 200])
def test_windows_shorter_than_a_segment_take_more_than_one_tile(window: int) -> None:
    tiles, counts = segment_tiles((300, 300, 40), window), torch.zeros(640, 640, dtype=torch.int32)
    for tile in tiles.first:
        add(tile, counts)
    assert len(tiles.first) >= 5
    assert torch.equal(counts, seen([300, 300, 40], window))


def test_equal_segments_are_one_tile_without_a_mask() -> None:
    (tile,) = segment_tiles((7,) * 5, 7).first
    assert (tile.count, tile.queries, tile.causal) == (5, 7, True)
    assert segment_tiles((7,) * 5, 7).keys_once


@settings(max_examples=200)
@given(LENGTHS, WINDOWS, st.integers(1, 5), st.sampled_from([Partition.contiguous, Partition.zigzag]))
def test_a_ring_covers_each_pair_once_and_stops_in_time(
    lengths: list[int], window: int | None, ranks: int, make: object
) -> None:
    partition = make(sum(lengths), ranks)  # type: ignore[operator]
    tokens = [torch.tensor([t for s, e in own for t in range(s, e)], dtype=torch.int64) for own in partition.ranges]
    expected = seen(lengths, window)
    visits = [0] * ranks
    for rank in range(ranks):
        plan = ring_tiles(tuple(lengths), partition, rank, window)
        for step, tiles in enumerate(plan.steps):
            owner = (rank - step) % ranks
            counts = torch.zeros(len(tokens[rank]), len(tokens[owner]), dtype=torch.int32)
            for tile in (*tiles.first, *tiles.rest):
                add(tile, counts)
            assert torch.equal(counts, expected[tokens[rank]][:, tokens[owner]])
            if counts.any():
                visits[owner] = max(visits[owner], step)
            if step:
                assert not tiles.first
    assert list(plan.last) == visits
