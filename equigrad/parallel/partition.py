"""How the tokens of a row lie on the ranks of a group: whole tokens, as even as they go, none added.

Torch-free. One partition serves every stream of the row: ids, positions, labels, masks, advantages, log-probs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

Range = tuple[int, int]
"""First index and the one after the last."""


def even(total: int, parts: int) -> tuple[int, ...]:
    """``total`` in ``parts`` whole numbers, the larger ones first: 9 in 4 is 3, 2, 2, 2; 1 in 4 is 1, 0, 0, 0."""
    return tuple(total // parts + (part < total % parts) for part in range(parts))


def part_of(total: int, parts: int, part: int) -> Range:
    """The range of one part of ``even(total, parts)``."""
    start = part * (total // parts) + min(part, total % parts)
    return start, start + total // parts + (part < total % parts)


@dataclass(frozen=True)
class Partition:
    """``ranges[r]``: what rank ``r`` holds, in ascending order. Together the ranges hold every token once.

    >>> Partition.contiguous(9, 4).ranges
    (((0, 3),), ((3, 5),), ((5, 7),), ((7, 9),))
    """

    ranges: tuple[tuple[Range, ...], ...]

    @classmethod
    def contiguous(cls, total: int, ranks: int) -> "Partition":
        """One range a rank."""
        return cls(tuple((part_of(total, ranks, rank),) for rank in range(ranks)))

    @classmethod
    def zigzag(cls, total: int, ranks: int) -> "Partition":
        """Two ranges a rank, one from the front and its mirror image, so that under causal attention all ranks have
        about as many keys to see."""
        chunks = [part_of(total, 2 * ranks, chunk) for chunk in range(2 * ranks)]
        return cls(tuple((chunks[rank], chunks[-1 - rank]) for rank in range(ranks)))

    @classmethod
    def of_row(cls, total: int, ranks: int, zigzag: bool) -> "Partition":
        """How a row lies on its context ranks."""
        return cls.zigzag(total, ranks) if zigzag else cls.contiguous(total, ranks)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each rank."""
        return tuple(sum(stop - start for start, stop in ranges) for ranges in self.ranges)

    @cached_property
    def total(self) -> int:
        """Tokens of all ranks."""
        return sum(self.lengths)

    @cached_property
    def order(self) -> tuple[tuple[int, Range], ...]:
        """All ranges that hold a token, in the order of the tokens, each with its rank."""
        ranges = [(start, stop, rank) for rank, own in enumerate(self.ranges) for start, stop in own if start < stop]
        return tuple((rank, (start, stop)) for start, stop, rank in sorted(ranges))

    @cached_property
    def in_rank_order(self) -> bool:
        """Whether the ranks' tokens one after another are the row."""
        ranks = [rank for rank, _ in self.order]
        return ranks == sorted(ranks)


def segments_within(lengths: Sequence[int], start: int, stop: int) -> tuple[Range, ...]:
    """The parts of consecutive segments that lie in [start, stop), as ranges of the row."""
    found, first = [], 0
    for length in lengths:
        low, high = max(first, start), min(first + length, stop)
        if low < high:
            found.append((low, high))
        first += length
    return tuple(found)
