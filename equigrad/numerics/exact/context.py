"""Where exact attention has its queries and keys: on this rank alone, or divided over context ranks.

Queries are taken in blocks of one segment, each with all keys that it sees.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from equigrad.numerics.exact.grids import largest_across
from equigrad.numerics.row import Row
from equigrad.numerics.tiles import Tile
from equigrad.parallel.collectives import (
    Heads,
    Split,
    exchanged_to_heads,
    exchanged_to_tokens,
    gathered,
    reduce_scattered,
)
from equigrad.parallel.partition import Range, part_of, segments_within

_BLOCK = 128
"""Queries of a block: with fewer, products are small; with more, more of them is masked."""


@lru_cache(maxsize=256)
def query_blocks(lengths: tuple[int, ...], ranges: tuple[Range, ...], window: int | None) -> tuple[Tile, ...]:
    """Tiles that together hold each query of some ``ranges`` of a row once, with all keys of the row that it sees.

    Short segments of equal length that follow each other are one tile.
    """
    tiles, starts, place = list[Tile](), [0], 0
    for length in lengths:
        starts.append(starts[-1] + length)
    for start, stop in ranges:
        for low, high in segments_within(lengths, start, stop):
            segment = max(at for at in starts if at <= low)
            for first in range(low, high, _BLOCK):
                last = min(first + _BLOCK, high)
                begin = segment if window is None else max(segment, first - window + 1)
                tile = Tile(place + first - start, begin, 1, last - first, last - begin, first - begin, window)
                if not tiles or not (joined := _joined(tiles[-1], tile)):
                    tiles.append(tile)
                else:
                    tiles[-1] = joined
        place += stop - start
    return tuple(tiles)


def _joined(a: Tile, b: Tile) -> Tile | None:
    """Both as one, where they are of one shape and follow each other."""
    same = (a.queries, a.keys, a.offset) == (b.queries, b.keys, b.offset)
    follows = b.q0 == a.q0 + a.count * a.queries and b.k0 == a.k0 + a.count * a.keys
    return Tile(a.q0, a.k0, a.count + 1, a.queries, a.keys, a.offset, a.window) if same and follows else None


@dataclass(frozen=True)
class Place:
    """Where the queries and keys are that this rank computes with: here, all of them."""

    tiles: tuple[Tile, ...]

    def enter(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From own tokens to queries, and the keys and values that they see."""
        return q, k, v

    def enter_queries(self, x: Tensor) -> Tensor:
        """From own tokens to queries."""
        return x

    def leave(self, x: Tensor) -> Tensor:
        """From queries to own tokens."""
        return x

    def largest(self, sizes: Tensor) -> Tensor:
        """Of each key [2, keys, kv_heads], on all ranks."""
        return sizes

    def home(self, total: Tensor) -> Tensor:
        """From parts of an exact sum for each key to the sums of own tokens, float64."""
        return total

    def sinks(self, x: Tensor) -> Tensor:
        """Of the sinks of all heads [heads], those of the queries."""
        return x

    def sink_terms(self, x: Tensor, heads: int) -> Tensor:
        """[queries, own heads] -> [queries, heads], zero for heads that are elsewhere."""
        return x


@dataclass(frozen=True)
class Gathered(Place):
    """Own queries, and the keys of all context ranks, gathered: a sum needs the largest score of all its keys first, so
    nothing is gained by letting them travel round a ring."""

    split: Split

    def enter(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        both = gathered(torch.cat([k, v], -1), self.split)
        k, v = both.split([k.shape[-1], v.shape[-1]], -1)
        return q, k, v

    def largest(self, sizes: Tensor) -> Tensor:
        return largest_across(sizes, self.split.group)

    def home(self, total: Tensor) -> Tensor:
        return reduce_scattered(total, self.split)


@dataclass(frozen=True)
class Exchanged(Place):
    """All tokens of some heads."""

    split: Split
    queries: Heads
    kv_heads: int

    @property
    def _group(self) -> int:
        return sum(map(len, self.queries)) // self.kv_heads

    @property
    def _keys(self) -> Heads:
        """The key head of each query head: it is repeated where several share one, so that all groups are equal."""
        return tuple(tuple(head // self._group for head in own) for own in self.queries)

    def enter(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads = q.shape[1]
        wanted = tuple(
            (*own, *(heads + key for key in keys), *(heads + self.kv_heads + key for key in keys))
            for own, keys in zip(self.queries, self._unique, strict=True)
        )
        whole = exchanged_to_heads(torch.cat([q, k, v], 1), self.split, wanted)
        own, keys = self.queries[self.split.rank], self._unique[self.split.rank]
        q, k, v = whole.split([len(own), len(keys), len(keys)], 1)
        each = [keys.index(key) for key in self._keys[self.split.rank]]
        return q, k[:, each], v[:, each]

    @property
    def _unique(self) -> Heads:
        return tuple(tuple(sorted(set(keys))) for keys in self._keys)

    def enter_queries(self, x: Tensor) -> Tensor:
        return exchanged_to_heads(x, self.split, self.queries)

    def leave(self, x: Tensor) -> Tensor:
        return torch.cat(exchanged_to_tokens(x, self.split, self.queries), 1)

    def largest(self, sizes: Tensor) -> Tensor:
        keys = list(self._keys[self.split.rank])
        whole = sizes.new_zeros(*sizes.shape[:2], self.kv_heads)
        index = torch.tensor(keys, dtype=torch.int64, device=sizes.device).expand_as(sizes)
        whole.scatter_reduce_(2, index, sizes, "amax")
        return largest_across(whole, self.split.group)[:, :, keys]

    def home(self, total: Tensor) -> Tensor:
        keys, unique = self._keys[self.split.rank], self._unique[self.split.rank]
        merged = total.new_zeros(len(total), len(unique), total.shape[-1])
        merged.index_add_(
            1, torch.tensor([unique.index(k) for k in keys], dtype=torch.int64, device=total.device), total
        )
        own = total.new_zeros(self.split.length, self.kv_heads, total.shape[-1])
        for heads, part in zip(self._unique, exchanged_to_tokens(merged, self.split, self._unique), strict=True):
            own[:, list(heads)] += part
        return own

    def sinks(self, x: Tensor) -> Tensor:
        return x[list(self.queries[self.split.rank])]

    def sink_terms(self, x: Tensor, heads: int) -> Tensor:
        whole = x.new_zeros(len(x), heads)
        whole[:, list(self.queries[self.split.rank])] = x
        return whole


def place_of(row: Row, window: int | None, heads: int, kv_heads: int) -> Place:
    split = row.context
    if split is None:
        return Place(query_blocks(row.lengths, ((0, row.tokens),), window))
    if row.strategy == "ring":
        return Gathered(query_blocks(row.lengths, split.partition.ranges[split.rank], window), split)
    ranks = len(split.partition.ranges)
    queries = tuple(tuple(range(*part_of(heads, ranks, rank))) for rank in range(ranks))
    return Exchanged(query_blocks(row.lengths, ((0, row.tokens),), window), split, queries, kv_heads)
