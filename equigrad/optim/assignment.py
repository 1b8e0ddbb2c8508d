"""Which rank works on which matrix, in which wave, and what has to travel for that: all of it from placements alone, so
that every rank finds the same without a word. Knows no tensors.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from itertools import groupby
from math import ceil
from typing import NamedTuple

from equigrad.numerics.budget import WAVE_ENTRIES
from equigrad.optim.division import Division, Held, Kind, Span

_WAVES = 4
"""At least so many where several ranks have as many matrices. More overlap better, and send smaller messages."""


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
        """What travels from one rank to another, of which ``rank`` is one."""
        if source == target:
            self.stay.append(part)
        elif source == rank:
            self.sent[target].append(part)
        else:
            self.taken[source].append(part)


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
    """matrices: in name order; owners: of each, the rank that works on it; waves: their numbers, wave by wave.

    Takes time for the matrices, for the ranks of each kind, and for what ``of`` tells of one rank; but not for every
    matrix on every rank.
    """

    def __init__(self, division: Division) -> None:
        """Of matrices, and of stacks of them."""
        examples = {kind: name for name, kind in division.of.items()}
        kinds = [Kind(examples[number], boxes) for number, boxes in enumerate(division.kinds)]
        self._ranks = len(division.kinds[0]) if kinds else 1
        self._kinds = {name: kinds[kind] for name, kind in division.of.items()}
        self.matrices = [
            Matrix(name, member, kind.rows, kind.columns)
            for name, kind in self._kinds.items()
            for member in range(kind.members)
        ]
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
        total, loads = sum(matrix.cost for matrix in self.matrices), [0] * self._ranks
        everyone, owners = _Least(range(self._ranks), loads), dict[int, int]()
        spans = {span: _by_size(span, loads) for kind in set(self._kinds.values()) for span in kind.spans}
        for at_home in (True, False):
            for number in self._costliest:
                if number in owners:
                    continue
                matrix = self.matrices[number]
                groups = spans[self._kinds[matrix.name].of[matrix.member]]
                if at_home:
                    groups = [(size, least) for size, least in groups if size == matrix.numel]
                # Of each group the one that comes first; of all ranks, if none has room that has something.
                found = [(size, *least.find()) for size, least in (groups if at_home else [*groups, (0, everyone)])]
                owner = next((r for _, load, r in found if (load + matrix.cost) * self._ranks <= total), None)
                if owner is None and at_home:
                    continue
                if owner is None:
                    *_, owner = min((load, -size, rank) for size, load, rank in found)
                owners[number] = owner
                loads[owner] += matrix.cost
        return [owners[number] for number in range(len(self.matrices))]

    def _waves(self) -> Iterator[list[int]]:
        """Of what each rank works on about as much in each, and no more than memory has room for, of what a rank has
        and sends either: as many entries as it has, where there are copies. Matrices of one shape together."""
        own: list[list[int]] = [[] for _ in range(self._ranks)]
        for number in self._costliest:
            own[self.owners[number]].append(number)
        entries = [sum(self.matrices[number].numel for number in some) for some in own]
        here = [0] * self._ranks
        for kind, parameters in Counter(self._kinds.values()).items():
            for held in kind.held.values():
                here[held.rank] += parameters * held.of_each * len(held.members)
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
            kind, members = self._kinds[matrix.name], range(matrix.member, matrix.member + len(run))
            there.busy |= not kind.has_all(owner, members)
            back.busy |= not kind.alone(owner, members)
            for other in kind.held if owner == rank else kind.held.keys() & {rank}:
                part = _part(matrix.name, kind.held[other], members, *place.get(run[0], (0, 0)))
                if part is None:
                    continue
                back.add(part, owner, other, rank)
                if kind.nearest(kind.held[other], owner) == other:
                    there.add(part, other, owner, rank)
        return Wave(there, back, [(len(some), *shape) for shape, some in alike.items()], first, last)

    def _runs(self, numbers: Iterable[int]) -> Iterator[list[int]]:
        """Those of one parameter that follow each other and go to one rank."""

        def key(at: tuple[int, int]) -> tuple[str, int, int]:
            position, number = at
            return self.matrices[number].name, self.owners[number], number - position

        for _, run in groupby(enumerate(numbers), key):
            yield [number for _, number in run]


class _Least:
    """Which of some ranks has the least to do. Loads only grow: what was noted of one is never too much."""

    def __init__(self, ranks: Iterable[int], loads: Sequence[int]) -> None:
        self._loads, self._noted = loads, [(loads[rank], rank) for rank in ranks]
        heapify(self._noted)

    def find(self) -> tuple[int, int]:
        """Its load, and which it is: the first of several."""
        while (load := self._loads[self._noted[0][1]]) > self._noted[0][0]:
            heapreplace(self._noted, (load, self._noted[0][1]))
        return self._noted[0]


def _by_size(span: Span, loads: Sequence[int]) -> list[tuple[int, _Least]]:
    """The ranks that have so many entries of each member, the largest number first."""
    ranks: dict[int, list[int]] = {}
    for held in span.held:
        ranks.setdefault(held.of_each, []).append(held.rank)
    return [(size, _Least(ranks[size], loads)) for size in sorted(ranks, reverse=True)]


def _part(name: str, held: Held, members: range, stack: int, at: int) -> Part | None:
    """Of members whose first is there in a stack, those that are held."""
    start, stop = max(members.start, held.members.start), min(members.stop, held.members.stop)
    if start >= stop:
        return None
    own, there = held.members.start, members.start - at
    there_at = slice(start - there, stop - there)
    return Part(name, slice(start - own, stop - own), held.rows, held.columns, stack, there_at)
