"""Attention as tiles: rectangles of queries and keys, each one call of a kernel, with no query that sees nothing.

Pure geometry of segments, windows and ranges; no kernel, no process group.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, groupby

import torch
from torch import Tensor

from equigrad.parallel.partition import Partition, Range, segments_within


@dataclass(frozen=True)
class Tile:
    """Queries [q0, q0 + count*queries) against keys [k0, k0 + count*keys), as ``count`` independent blocks.

    offset: how far the first query of a block stands behind its first key, in the segment
    window: a query sees this many latest tokens, itself included; None: all

    Example: the second half of a segment of 6 tokens against all of it is ``Tile(3, 0, 1, 3, 6, offset=3)``.
    """

    q0: int
    k0: int
    count: int
    queries: int
    keys: int
    offset: int = 0
    window: int | None = None

    @cached_property
    def _within_window(self) -> bool:
        return self.window is None or self.offset + self.queries <= self.window

    @cached_property
    def full(self) -> bool:
        """Every query sees every key."""
        return self._within_window and self.keys - 1 <= self.offset

    @cached_property
    def causal(self) -> bool:
        """The i-th query sees the keys up to the i-th, as kernels understand causal."""
        return self._within_window and not self.full and self.offset == 0

    @property
    def masked(self) -> bool:
        """The kernel has to be told which query sees which key."""
        return not (self.full or self.causal)

    def split(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views [count, heads, length, D] of the tokens of this tile."""
        return self.q_view(q), self.k_view(k), self.k_view(v)

    def q_view(self, x: Tensor) -> Tensor:
        """The queries' part of ``x`` [T, heads, ...] as [count, heads, queries, ...]."""
        return x[self.q0 : self.q0 + self.count * self.queries].unflatten(0, (self.count, -1)).transpose(1, 2)

    def k_view(self, x: Tensor) -> Tensor:
        """The keys' part of ``x`` [T, heads, ...] as [count, heads, keys, ...]."""
        return x[self.k0 : self.k0 + self.count * self.keys].unflatten(0, (self.count, -1)).transpose(1, 2)

    def mask(self, like: Tensor) -> Tensor | None:
        """Additive mask [queries, keys], or None where none is needed."""
        if not self.masked:
            return None
        key = torch.arange(self.keys, device=like.device)
        query = torch.arange(self.queries, device=like.device)[:, None] + self.offset
        seen = key <= query
        if self.window is not None:
            seen &= key > query - self.window
        return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(~seen, -torch.inf)


@dataclass(frozen=True)
class Tiles:
    """The tiles of some queries and some keys.

    first: together they hold every query once, in order; or there are none
    rest:  more for some of those queries
    """

    first: tuple[Tile, ...] = ()
    rest: tuple[Tile, ...] = ()

    @cached_property
    def keys_once(self) -> bool:
        """Whether the tiles hold every key once, in order."""
        ends = [tile.k0 + tile.count * tile.keys for tile in self.first]
        return not self.rest and [tile.k0 for tile in self.first] == [0, *ends][:-1]


def block_tiles(queries: Range, keys: Range, window: int | None, q0: int, k0: int) -> Iterator[Tile]:
    """Tiles of a range of queries and a range of keys, both given as places in one segment; ``q0`` and ``k0`` say where
    they start in memory. Ranges are trimmed to what is seen, and nothing comes of ranges that do not see each other.
    """
    (low, high), (start, stop) = queries, keys
    low, high = max(low, start), high if window is None else min(high, stop + window - 1)
    block = max(1, high - low) if window is None or high - start <= window else max(window, 128)
    for first in range(low, high, block):
        last = min(first + block, high)
        begin = start if window is None else max(start, first - window + 1)
        end = min(stop, last)
        if begin < end:
            place = (q0 + first - queries[0], k0 + begin - start)
            yield Tile(*place, 1, last - first, end - begin, first - begin, window)


@lru_cache(maxsize=256)
def segment_tiles(lengths: tuple[int, ...], window: int | None) -> Tiles:
    """Whole segments, one after another. Runs of equal length are one tile where the window does not divide them."""
    tiles, start = [], 0
    for length, run in groupby(lengths):
        count = len(list(run))
        if window is None or length <= window:
            tiles.append(Tile(start, start, count, length, length))
        else:
            for at in range(start, start + count * length, length):
                tiles += block_tiles((0, length), (0, length), window, at, at)
        start += count * length
    return Tiles(tuple(tiles))


@dataclass(frozen=True)
class RingTiles:
    """What one rank computes while the keys and values of all ranks travel round a ring.

    steps: at step s, the tiles of own queries and the keys of the rank s places before this one
    last:  for the keys of each rank, the last step at which some rank sees them; afterwards they travel no further
    """

    steps: tuple[Tiles, ...]
    last: tuple[int, ...]

    @cached_property
    def merges(self) -> bool:
        """Whether some query is in several tiles."""
        return any(tiles.rest for tiles in self.steps)


@lru_cache(maxsize=256)
def ring_tiles(lengths: tuple[int, ...], partition: Partition, rank: int, window: int | None) -> RingTiles:
    """The plan of one rank. Every query is in one tile of step 0 that ends with it; what it sees beyond is merged."""
    starts = [0, *accumulate(lengths)]
    ranks = len(partition.ranges)
    pieces = [stop - start for own in partition.ranges[rank] for start, stop in segments_within(lengths, *own)]
    own = segment_tiles(tuple(pieces), window).first
    steps = [Tiles(own, _between(starts, partition, rank, rank, window))]
    steps += [Tiles((), _between(starts, partition, rank, (rank - step) % ranks, window)) for step in range(1, ranks)]
    last = [
        max(step for step in range(ranks) if not step or _between(starts, partition, (of + step) % ranks, of, window))
        for of in range(ranks)
    ]
    return RingTiles(tuple(steps), tuple(last))


def _between(
    starts: Sequence[int], partition: Partition, queries: int, keys: int, window: int | None
) -> tuple[Tile, ...]:
    """Tiles of one rank's queries and one rank's keys, of different ranges.

    A range sees of another one only what belongs to the segment that its own first token belongs to.
    """
    tiles: list[Tile] = []
    for q0, (low, high) in _placed(partition.ranges[queries]):
        segment = bisect_right(starts, low) - 1
        high = min(high, starts[segment + 1])
        for k0, (start, stop) in _placed(partition.ranges[keys]):
            begin, stop = max(start, starts[segment]), min(stop, low)
            if begin < stop:
                tiles += block_tiles((low, high), (begin, stop), window, q0, k0 + begin - start)
    return tuple(tiles)


def _placed(ranges: Sequence[Range]) -> Iterator[tuple[int, Range]]:
    """The ranges that hold a token, each with its place in the memory of its rank."""
    place = 0
    for start, stop in ranges:
        if start < stop:
            yield place, (start, stop)
        place += stop - start
