"""Which sample is computed where and when: what is known of samples in, a ``Schedule`` out. Torch-free.

Every rank computes the schedule alone and identically. Invariants, all tested: each sample appears in exactly one row;
no row exceeds the cap; every round has one row per lane (some may be empty, and only where no row of its modality could
be split any further); a round has one modality; a group is in several rows only where it does not fit one, or where
lanes had nothing to do otherwise; the result depends on nothing but the arguments.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain
from typing import Literal, NamedTuple, TypeAlias

from equigrad.data.samples import SampleRef
from equigrad.errors import UserError

Packing: TypeAlias = Literal["best_fit", "first_fit"]
RowSamples = tuple[int, ...]
"""The numbers of the samples of one row, in row order."""


@dataclass(frozen=True)
class Schedule:
    """
    rounds:     ``rounds[r][lane]`` holds the sample numbers of one row, in row order; () is an empty row
    modalities: of each round; lanes with an empty row learn here what the others compute
    costs:      of each round's costliest row

    Example: three samples on two lanes are two rounds, the last row empty, in
    ``Schedule((((0,), (2,)), ((1,), ())), ("text", "text"), (9.0, 4.0))``.
    """

    rounds: tuple[tuple[RowSamples, ...], ...]
    modalities: tuple[str, ...]
    costs: tuple[float, ...]

    def part(self, first: int, end: int) -> "Schedule":
        """Some of the rounds."""
        return Schedule(self.rounds[first:end], self.modalities[first:end], self.costs[first:end])

    def lane(self, lane: int) -> list[RowSamples]:
        """The rows of one data lane, round by round."""
        return [round_[lane] for round_ in self.rounds]


def plan(
    samples: Sequence[SampleRef], costs: Sequence[float], lanes: int, row_tokens: int, packing: Packing
) -> Schedule:
    """Pack samples into rows of at most ``row_tokens``, and deal the rows to ``lanes``; one modality after another, by
    name, so that lanes run the same modules at the same time. ``costs`` are the samples', in any unit, more than 0.

    With several lanes the samples are dealt out again, to a multiple of ``lanes`` rows of about equal cost; where a row
    then has no room, full rows are split instead, the costliest first: between groups while there is a row of several,
    then between samples. Rounds are made of rows of similar cost, because lanes wait for each other at the end of one.

    Raises ``UserError`` for a sample that fits no row, ``ValueError`` for other numbers of costs or lanes.
    """
    if len(costs) != len(samples) or lanes < 1:
        raise ValueError(f"{len(samples)} samples have {len(costs)} costs and {lanes} lanes")
    for number, sample in enumerate(samples):
        if sample.length > row_tokens:
            raise UserError(f"sample {number} has {sample.length} tokens, more than batch.row_tokens = {row_tokens}")
    of_modality: dict[str, list[_Bundle]] = {}
    for bundle in _bundles(samples, costs, row_tokens, packing):
        of_modality.setdefault(samples[bundle.samples[0]].modality, []).append(bundle)
    rounds: list[tuple[RowSamples, ...]] = []
    modalities, costliest = [], []
    for modality in sorted(of_modality):
        rows = _rows(of_modality[modality], costs, lanes, row_tokens, packing)
        cost = {row: sum(costs[i] for i in row) for row in rows}
        rows.sort(key=lambda row: (-cost[row], row))
        for start in range(0, len(rows), lanes):
            round_ = (*rows[start : start + lanes], *[()] * (start + lanes - len(rows)))
            # Every other round the other way round, so that no lane always gets the costliest row.
            rounds.append(round_[::-1] if len(rounds) % 2 else round_)
            modalities.append(modality)
            costliest.append(cost[rows[start]])
    return Schedule(tuple(rounds), tuple(modalities), tuple(costliest))


class _Bundle(NamedTuple):
    """Samples that stay together while they can: those of a group, in a row's order, or a single one."""

    samples: RowSamples
    length: int
    cost: float


def _bundles(samples: Sequence[SampleRef], costs: Sequence[float], cap: int, packing: Packing) -> list[_Bundle]:
    """Single samples first, then groups; one that no row holds is several."""
    bundles = []
    groups: dict[tuple[str, int], list[int]] = {}
    for number, sample in enumerate(samples):
        if sample.group is None:
            bundles.append(_Bundle((number,), sample.length, costs[number]))
        else:
            groups.setdefault((sample.modality, sample.group), []).append(number)
    for group in groups.values():
        for row in _fill([samples[i].length for i in group], cap, packing):
            numbers = tuple(group[i] for i in row)
            length, cost = sum(samples[i].length for i in numbers), sum(costs[i] for i in numbers)
            bundles.append(_Bundle(numbers, length, cost))
    return bundles


def _rows(
    bundles: Sequence[_Bundle], costs: Sequence[float], lanes: int, cap: int, packing: Packing
) -> list[RowSamples]:
    """Rows of the samples of one modality, as many as divide by ``lanes`` where that can be."""
    lengths, bundle_costs = [bundle.length for bundle in bundles], [bundle.cost for bundle in bundles]
    rows = _fill(lengths, cap, packing)
    if lanes > 1:
        count = min(len(bundles), -(-len(rows) // lanes) * lanes)
        rows = _balance(lengths, bundle_costs, cap, count) or _align(rows, bundle_costs, lanes)
    rows = [tuple(chain.from_iterable(bundles[i].samples for i in row)) for row in rows]
    return _align(rows, costs, lanes)  # between samples, where splitting between groups was not enough


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


def _fill(lengths: Sequence[int], cap: int, packing: Packing) -> list[RowSamples]:
    """First-fit or best-fit decreasing. Equal lengths end up side by side, which attention makes use of."""
    rows: list[list[int]] = []
    first = _FirstFit(len(lengths), cap)
    by_room: list[tuple[int, int]] = []  # best fit: (room left, row), sorted
    for sample in _longest_first(lengths):
        need = lengths[sample]
        if packing == "best_fit":
            at = bisect_left(by_room, (need, -1))
            room, row = by_room.pop(at) if at < len(by_room) else (cap, len(rows))
            insort(by_room, (room - need, row))
        else:
            row = first.take(need)
        if row == len(rows):
            rows.append([])
        rows[row].append(sample)
    return [tuple(row) for row in rows]


class _FirstFit:
    """The room of rows that are as many as samples, all empty: a tree whose nodes hold the most room below them."""

    def __init__(self, rows: int, cap: int) -> None:
        self._leaves = 1 << max(rows - 1, 0).bit_length()
        self._most = [cap] * (2 * self._leaves)

    def take(self, need: int) -> int:
        """The first row that has room for so many tokens, and has them now."""
        at = 1
        while at < self._leaves:
            at = 2 * at + (self._most[2 * at] < need)
        row = at - self._leaves
        self._most[at] -= need
        while at := at // 2:
            self._most[at] = max(self._most[2 * at : 2 * at + 2])
        return row


def _balance(lengths: Sequence[int], costs: Sequence[float], cap: int, count: int) -> list[RowSamples] | None:
    """Longest processing time first: the costliest sample next goes to the cheapest of ``count`` rows that has room.
    None where no row has room for some sample."""
    rows: list[list[int]] = [[] for _ in range(count)]
    room = [cap] * count
    cheapest = [(0.0, 0, row) for row in range(count)]  # cost, samples, row
    full: list[tuple[int, tuple[float, int, int]]] = []  # those that had no room for a sample, the emptiest first
    for sample in sorted(range(len(lengths)), key=lambda i: (-costs[i], i)):
        need = lengths[sample]
        while full and -full[0][0] >= need:
            heappush(cheapest, heappop(full)[1])
        while cheapest and room[cheapest[0][-1]] < need:
            entry = heappop(cheapest)
            heappush(full, (-room[entry[-1]], entry))
        if not cheapest:
            return None
        cost, number, row = heappop(cheapest)
        rows[row].append(sample)
        room[row] -= need
        heappush(cheapest, (cost + costs[sample], number + 1, row))
    return [tuple(sorted(row, key=lambda i: (-lengths[i], i))) for row in rows]


def _align(rows: list[RowSamples], costs: Sequence[float], lanes: int) -> list[RowSamples]:
    """Split rows until their number divides by ``lanes`` or every row is one sample."""
    rows = list(rows)
    cost = [sum(costs[i] for i in row) for row in rows]
    while len(rows) % lanes:
        splittable = [r for r, row in enumerate(rows) if len(row) > 1]
        if not splittable:
            break
        at = max(splittable, key=lambda r: (cost[r], -r))
        rows[at : at + 1] = halves = _halves(rows[at], costs)
        cost[at : at + 1] = [sum(costs[i] for i in row) for row in halves]
    return rows


def _halves(row: RowSamples, costs: Sequence[float]) -> list[RowSamples]:
    """Two rows of about equal cost: the costliest sample next always goes to the cheaper half."""
    halves: tuple[list[int], list[int]] = ([], [])
    totals = [0.0, 0.0]
    for sample in sorted(row, key=lambda i: (-costs[i], i)):
        half = int(totals[1] < totals[0])
        halves[half].append(sample)
        totals[half] += costs[sample]
    return [tuple(half) for half in halves]
