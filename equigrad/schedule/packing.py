"""Which sample is computed where and when: lengths and costs in, a ``Schedule`` out. Pure Python over numbers.

Every rank computes the schedule alone and identically. Invariants, all tested: each sample appears in exactly one row;
no row exceeds the cap; every round has one row per lane (some may be empty, and only where no row could be split any
further); the result depends on nothing but the arguments.
"""

import hashlib
import json
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from typing import Literal

from equigrad.errors import UserError

RowSamples = tuple[int, ...]
"""The numbers of the samples of one row, in row order."""


@dataclass(frozen=True)
class Schedule:
    """``rounds[r][lane]`` holds the sample numbers of one row, in row order; () is an empty row.

    Example: three samples on two lanes, ``Schedule((((0,), (2,)), ((1,), ())))``: two rounds, the last row empty.
    """

    rounds: tuple[tuple[RowSamples, ...], ...]

    @cached_property
    def digest(self) -> str:
        """Equal on all ranks, or the ranks disagree about the work."""
        return hashlib.sha256(json.dumps(self.rounds).encode()).hexdigest()

    def lane(self, lane: int) -> list[RowSamples]:
        """The rows of one data lane, round by round."""
        return [round_[lane] for round_ in self.rounds]


def plan(
    lengths: Sequence[int],
    costs: Sequence[float],
    lanes: int,
    row_tokens: int,
    packing: Literal["best_fit", "first_fit"] = "best_fit",
) -> Schedule:
    """Pack samples of ``lengths`` tokens into rows of at most ``row_tokens``, and deal the rows to ``lanes``.

    With several lanes the samples are dealt out again, to a multiple of ``lanes`` rows of about equal cost; where a row
    then has no room, full rows are split at sample boundaries instead, the costliest first. Rounds are made of rows of
    similar cost, because lanes wait for each other at the end of a round.
    """
    for number, length in enumerate(lengths):
        if length > row_tokens:
            raise UserError(f"sample {number} has {length} tokens, more than batch.row_tokens = {row_tokens}")
    rows = _fill(lengths, row_tokens, packing)
    if lanes > 1:
        count = min(len(lengths), -(-len(rows) // lanes) * lanes)
        rows = _balance(lengths, costs, row_tokens, count) or _align(rows, costs, lanes)
    rows.sort(key=lambda row: (-sum(costs[i] for i in row), row))
    rows += [()] * (-len(rows) % lanes)
    rounds = [tuple(rows[i : i + lanes]) for i in range(0, len(rows), lanes)]
    # Every other round the other way round, so that no lane always gets the costliest row.
    return Schedule(tuple(round_[::-1] if number % 2 else round_ for number, round_ in enumerate(rounds)))


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))


def _fill(lengths: Sequence[int], cap: int, packing: str) -> list[RowSamples]:
    """First-fit or best-fit decreasing. Equal lengths end up side by side, which attention makes use of."""
    rows: list[list[int]] = []
    free: list[int] = []  # first fit: room left, by row
    by_room: list[tuple[int, int]] = []  # best fit: (room left, row), sorted
    for sample in _longest_first(lengths):
        need = lengths[sample]
        if packing == "best_fit":
            at = bisect_left(by_room, (need, -1))
            room, row = by_room.pop(at) if at < len(by_room) else (cap, len(rows))
            insort(by_room, (room - need, row))
        else:
            row = next((r for r, room in enumerate(free) if room >= need), len(rows))
            if row == len(rows):
                free.append(cap)
            free[row] -= need
        if row == len(rows):
            rows.append([])
        rows[row].append(sample)
    return [tuple(row) for row in rows]


def _balance(lengths: Sequence[int], costs: Sequence[float], cap: int, count: int) -> list[RowSamples] | None:
    """Longest processing time first: the costliest sample next goes to the cheapest of ``count`` rows that has room.
    None where no row has room for some sample."""
    rows: list[list[int]] = [[] for _ in range(count)]
    room = [cap] * count
    cheapest = [(0.0, row) for row in range(count)]
    for sample in sorted(range(len(lengths)), key=lambda i: (-costs[i], i)):
        full = []
        while cheapest and room[cheapest[0][1]] < lengths[sample]:
            full.append(heappop(cheapest))
        if not cheapest:
            return None
        cost, row = heappop(cheapest)
        rows[row].append(sample)
        room[row] -= lengths[sample]
        for entry in [*full, (cost + costs[sample], row)]:
            heappush(cheapest, entry)
    return [tuple(sorted(row, key=lambda i: (-lengths[i], i))) for row in rows]


def _align(rows: list[RowSamples], costs: Sequence[float], lanes: int) -> list[RowSamples]:
    """Split rows until their number divides by ``lanes`` or every row is one sample."""
    rows = list(rows)
    while len(rows) % lanes:
        splittable = [r for r, row in enumerate(rows) if len(row) > 1]
        if not splittable:
            break
        costliest = max(splittable, key=lambda r: (sum(costs[i] for i in rows[r]), -r))
        rows[costliest : costliest + 1] = _halves(rows[costliest], costs)
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
