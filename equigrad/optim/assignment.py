"""Which rank works on which matrix, in which wave, and what has to travel for that: all of it from placements alone, so
that every rank finds the same without a word. Knows no tensors.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import ceil
from typing import NamedTuple

from equigrad.numerics.budget import WAVE_ENTRIES
from equigrad.parallel.placement import Placement

_WAVES = 4
"""At least so many where there are several ranks. More overlap better, and send smaller messages."""


class Matrix(NamedTuple):
    """A parameter [rows, columns], or a member of a stack of them. ``member``: its number there; else 0."""

    name: str
    member: int
    rows: int
    columns: int

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    @property
    def cost(self) -> int:
        """Operations of a product with itself, on the smaller side, halved."""
        return self.numel * min(self.rows, self.columns)


class Held(NamedTuple):
    """What a rank has of a parameter: these rows and columns of these members; ``whole``: of each all."""

    rank: int
    members: range
    rows: slice
    columns: slice
    whole: bool

    @property
    def of_each(self) -> int:
        """Entries of each member."""
        return (self.rows.stop - self.rows.start) * (self.columns.stop - self.columns.start)


class Part(NamedTuple):
    """Consecutive members of a parameter that travel together between a rank that has them and the one that works on
    them.

    held:      which they are of those that the first has
    stack, at: where they are in the stacks of the second; there alone does this mean anything
    """

    name: str
    held: slice
    rows: slice
    columns: slice
    stack: int
    at: slice


@dataclass
class Traffic:
    """One way of a wave, seen from one rank.

    stay:        parts that are on this rank already
    sent, taken: parts to and from each rank, in the order in which they lie in a message
    busy:        whether any rank sends anything, which all have to know
    """

    sent: list[list[Part]]
    taken: list[list[Part]]
    stay: list[Part] = field(default_factory=list)
    busy: bool = False

    def add(self, part: Part, source: int, target: int, rank: int) -> None:
        """Of what travels from one rank to another, ``rank`` notes what concerns it."""
        if source == target == rank:
            self.stay.append(part)
        elif source == rank:
            self.sent[target].append(part)
        elif target == rank:
            self.taken[source].append(part)
        self.busy |= source != target


@dataclass
class Wave:
    """``stacks``: shapes [k, m, n] of what is worked on here; ``first`` and ``last``: parameters of which no earlier
    wave, and no later one, has any matrix."""

    there: Traffic
    back: Traffic
    stacks: list[tuple[int, int, int]]
    first: list[str]
    last: list[str]


class Assignment:
    """matrices: in name order; owners: of each, the rank that works on it; waves: their numbers, wave by wave."""

    def __init__(self, everyone: Sequence[Mapping[str, Placement]]) -> None:
        """``everyone``: what each rank has of the same parameters."""
        self._ranks = len(everyone)
        self._held = {name: list(_held(name, everyone)) for name in sorted(everyone[0])}
        self.matrices = [matrix for name in self._held for matrix in _matrices(everyone[0][name])]
        self._costliest = sorted(range(len(self.matrices)), key=lambda i: (-self.matrices[i].cost, i))
        self.owners = self._owners()
        self.waves = list(self._waves())

    def of(self, rank: int) -> list[Wave]:
        """What a rank does in each wave."""
        names = [{self.matrices[number].name for number in wave} for wave in self.waves]
        last = {name: i for i, some in enumerate(names) for name in some}
        first = {name: len(names) - 1 - i for i, some in enumerate(reversed(names)) for name in some}
        waves = []
        for i, numbers in enumerate(self.waves):
            begin, end = (sorted(name for name in names[i] if of[name] == i) for of in (first, last))
            waves.append(self._wave(numbers, rank, begin, end))
        return waves

    def _owners(self) -> list[int]:
        """First matrices that ranks have whole, to one of these, so that experts stay at home; then the others, to the
        rank that has most of it. Each time the costliest first, and to ranks whose fair share is not used up; what is
        left over goes to the one with the least to do."""
        total, load = sum(matrix.cost for matrix in self.matrices), [0] * self._ranks
        owners: dict[int, int] = {}
        for at_home in (True, False):
            for number in self._costliest:
                matrix = self.matrices[number]
                if number in owners:
                    continue
                has = {h.rank: h.of_each for h in self._held[matrix.name] if matrix.member in h.members}
                ranks = [h.rank for h in self._held[matrix.name] if h.whole and h.rank in has]
                ranks = ranks if at_home else list(range(self._ranks))
                room = [rank for rank in ranks if (load[rank] + matrix.cost) * self._ranks <= total]
                if room:
                    owner = min(room, key=lambda r: (-has.get(r, 0), load[r], r))
                elif at_home:
                    continue
                else:
                    owner = min(ranks, key=lambda r: (load[r], -has.get(r, 0), r))
                owners[number] = owner
                load[owner] += matrix.cost
        return [owners[number] for number in range(len(self.matrices))]

    def _waves(self) -> Iterator[list[int]]:
        """Of what each rank works on about as much in each, and no more than memory has room for, of what a rank has
        and sends either: as many entries as it has, where there are copies. Matrices of one shape together."""
        own: list[list[int]] = [[] for _ in range(self._ranks)]
        for number in self._costliest:
            own[self.owners[number]].append(number)
        entries = [sum(self.matrices[number].numel for number in some) for some in own]
        here = [0] * self._ranks
        for holders in self._held.values():
            for held in holders:
                here[held.rank] += held.of_each * len(held.members)
        count = max(_WAVES if self._ranks > 1 else 1, ceil(max(*entries, *here) / WAVE_ENTRIES))
        waves: list[list[int]] = [[] for _ in range(count)]
        for some, total in zip(own, entries, strict=True):
            done = 0
            for number in some:
                waves[done * count // total].append(number)
                done += self.matrices[number].numel
        yield from (sorted(wave) for wave in waves if wave)

    def _wave(self, numbers: Sequence[int], rank: int, first: list[str], last: list[str]) -> Wave:
        there, back = (Traffic([[] for _ in range(self._ranks)], [[] for _ in range(self._ranks)]) for _ in range(2))
        alike: dict[tuple[int, int], list[int]] = {}
        for number in numbers:
            if self.owners[number] == rank:
                alike.setdefault(self.matrices[number][2:], []).append(number)
        place = {number: (stack, at) for stack, some in enumerate(alike.values()) for at, number in enumerate(some)}
        for run in self._runs(numbers):
            owner, matrix = self.owners[run[0]], self.matrices[run[0]]
            nearest: dict[tuple[int, ...], tuple[int, Part]] = {}
            for held in self._held[matrix.name]:
                part = _part(held, matrix, len(run), *place.get(run[0], (0, 0)))
                if part is None:
                    continue
                back.add(part, owner, held.rank, rank)
                # Of the ranks that have the same, the owner itself, or its nearest neighbour.
                box = held.members.start, held.rows.start, held.columns.start
                if box not in nearest or abs(held.rank - owner) < abs(nearest[box][0] - owner):
                    nearest[box] = held.rank, part
            found = sum((p.at.stop - p.at.start) * _each(p) for _, p in nearest.values())
            if found != len(run) * matrix.numel:
                raise ValueError(f"the boxes of {matrix.name} overlap or leave a gap")
            for source, part in nearest.values():
                there.add(part, source, owner, rank)
        return Wave(there, back, [(len(some), *shape) for shape, some in alike.items()], first, last)

    def _runs(self, numbers: Iterable[int]) -> Iterator[list[int]]:
        """Those of one parameter that follow each other and go to one rank."""

        def key(at: tuple[int, int]) -> tuple[str, int, int]:
            position, number = at
            return self.matrices[number].name, self.owners[number], number - position

        for _, run in groupby(enumerate(numbers), key):
            yield [number for _, number in run]


def _each(part: Part) -> int:
    """Entries of each member."""
    return (part.rows.stop - part.rows.start) * (part.columns.stop - part.columns.start)


def _matrices(at: Placement) -> Iterator[Matrix]:
    *stack, rows, columns = at.shape
    for member in range(*stack) if stack else (0,):
        yield Matrix(at.name, member, rows, columns)


def _held(name: str, everyone: Sequence[Mapping[str, Placement]]) -> Iterator[Held]:
    for rank, parameters in enumerate(everyone):
        at = parameters[name]
        if not at.numel:
            continue
        members = range(at.offset[0], at.offset[0] + at.local_shape[0]) if len(at.shape) == 3 else range(1)
        rows, columns = (slice(a, a + n) for a, n in zip(at.offset[-2:], at.local_shape[-2:], strict=True))
        yield Held(rank, members, rows, columns, at.local_shape[-2:] == at.shape[-2:])


def _part(held: Held, first: Matrix, count: int, stack: int, at: int) -> Part | None:
    """Of so many members from the first on, whose first is there in a stack, those that are held."""
    start = max(first.member, held.members.start)
    number = min(first.member + count, held.members.stop) - start
    if number <= 0:
        return None
    own, there = start - held.members.start, at + start - first.member
    return Part(first.name, slice(own, own + number), held.rows, held.columns, stack, slice(there, there + number))
