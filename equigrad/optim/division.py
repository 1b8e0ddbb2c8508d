"""What every rank has of the parameters that some ranks divide among them. Parameters that are cut alike are told once
and kept once: of such kinds there are few, however many parameters and ranks there are.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from equigrad.parallel.collectives import Axis
from equigrad.parallel.placement import Placement
from equigrad.parallel.ranks import gather


class Outline(NamedTuple):
    """What one rank has, as it tells it to the others.

    boxes:   each once, as if it had no name and were no copy
    numbers: of each parameter, in name order, which of the boxes it is

    Example: the rows of two [4, 3] weights and of a [4] norm, on the first of two ranks
    ``Outline((Placement("", (4, 3), (0, 0), (2, 3)), Placement("", (4,), (0,), (2,))), (0, 0, 1))``.
    """

    boxes: tuple[Placement, ...]
    numbers: tuple[int, ...]

    @classmethod
    def of(cls, places: Mapping[str, Placement]) -> "Outline":
        known: dict[Placement, int] = {}
        boxes = (replace(places[name], name="", replica=0) for name in sorted(places))
        numbers = tuple(known.setdefault(box, len(known)) for box in boxes)
        return cls(tuple(known), numbers)


class Division:
    """kinds: of each kind of parameters the ranks' boxes, in rank order
    of:    the kind of each parameter, in name order
    """

    def __init__(self, names: Iterable[str], everyone: Sequence[Outline]) -> None:
        """``names``: of parameters that each rank has told its part of. Raises ``ValueError`` where one told of others:
        as far as numbers and shapes show it."""
        alike: dict[tuple[int, ...], int] = {}
        columns = zip(*(outline.numbers for outline in everyone), strict=True)
        self.of = {n: alike.setdefault(c, len(alike)) for n, c in zip(sorted(names), columns, strict=True)}
        self.kinds = [[told.boxes[number] for told, number in zip(everyone, c, strict=True)] for c in alike]
        if odd := [shapes for boxes in self.kinds if len(shapes := {box.shape for box in boxes}) > 1]:
            raise ValueError(f"ranks have not told of the same parameters: one has several shapes, {sorted(odd[0])}")

    @classmethod
    def among(cls, axis: Axis, places: Mapping[str, Placement]) -> "Division":
        """``places``: of this rank, the same names on every rank; boxes may be empty. A collective."""
        own = Outline.of(places)
        return cls(places, [own] if axis.group is None else gather(own, axis.group))

    def copies_before(self, rank: int) -> dict[str, int]:
        """Of each parameter, how many earlier ranks have the same box as this one."""
        before = [boxes[:rank].count(boxes[rank]) for boxes in self.kinds]
        return {name: before[kind] for name, kind in self.of.items()}


class Held(NamedTuple):
    """What a rank has of a matrix, or of a stack of them: these rows and columns of these members."""

    rank: int
    members: range
    rows: slice
    columns: slice

    @property
    def of_each(self) -> int:
        """Entries of each member."""
        return (self.rows.stop - self.rows.start) * (self.columns.stop - self.columns.start)

    @property
    def box(self) -> tuple[int, ...]:
        """The same where ranks have copies."""
        ends = ((cut.start, cut.stop) for cut in (self.members, self.rows, self.columns))
        return tuple(end for both in ends for end in both)


@dataclass(eq=False)
class Span:
    """Neighbouring members of a stack that the same ranks have, and what these have, in rank order."""

    members: range
    held: list[Held] = field(default_factory=list)


class Kind:
    """How matrices, or stacks of so many ``members``, lie on the ranks.

    held:  what each rank that has any entry has, in rank order
    spans: all members, one after another; of: the span of each
    """

    def __init__(self, example: str, boxes: Sequence[Placement]) -> None:
        """``example``: a parameter of this kind; ``boxes``: of every rank. Raises ``ValueError`` where they do not hold
        every entry once, but for copies."""
        *stack, self.rows, self.columns = boxes[0].shape
        self.members = stack[0] if stack else 1
        self.held = {held.rank: held for held in _held(boxes)}
        self._copies: dict[tuple[int, ...], list[int]] = {}
        edges = {0, self.members}
        for rank, held in self.held.items():
            self._copies.setdefault(held.box, []).append(rank)
            edges |= {held.members.start, held.members.stop}
        self.spans = [Span(range(*ends)) for ends in pairwise(sorted(edges))]
        number = {edge: i for i, edge in enumerate(sorted(edges))}
        for held in self.held.values():
            for span in self.spans[number[held.members.start] : number[held.members.stop]]:
                span.held.append(held)
        self.of = [span for span in self.spans for _ in span.members]
        for span in self.spans:
            if sum({held.box: held.of_each for held in span.held}.values()) != self.rows * self.columns:
                raise ValueError(f"the boxes of {example} overlap or leave a gap")

    def nearest(self, held: Held, owner: int) -> int:
        """Of the ranks that have the same, the owner itself, or its nearest neighbour."""
        ranks = self._copies[held.box]
        place = bisect_left(ranks, owner)
        return min(ranks[max(0, place - 1) : place + 1], key=lambda rank: abs(rank - owner))

    def has_all(self, rank: int, members: range) -> bool:
        """Whether a rank has all entries of members."""
        held = self.held.get(rank)
        if held is None or held.of_each < self.rows * self.columns:
            return False
        return held.members.start <= members.start and members.stop <= held.members.stop

    def alone(self, rank: int, members: range) -> bool:
        """Whether nobody else has any entry of members."""
        return all(held.rank == rank for member in members for held in self.of[member].held[:2])


def _held(boxes: Iterable[Placement]) -> Iterator[Held]:
    for rank, at in enumerate(boxes):
        if not at.numel:
            continue
        members = range(at.offset[0], at.offset[0] + at.local_shape[0]) if len(at.shape) == 3 else range(1)
        rows, columns = (slice(a, a + n) for a, n in zip(at.offset[-2:], at.local_shape[-2:], strict=True))
        yield Held(rank, members, rows, columns)
