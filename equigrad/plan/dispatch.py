"""Expert dispatch in two hops against one, at the level of communication calls.

Group-limited routing picks M groups of ranks for a token and q = k / M experts in each. *Flat*: one all-to-all over
all ranks moves k copies of a token over the slow tier. *Two hops*: a first all-to-all, between ranks of equal place in
their groups, moves one copy for each chosen group over the slow tier; a second one, inside the group, moves q copies
from there over the fast tier; behind it a chain of kernels handles every row that arrived, and split sizes are
exchanged once more.

An all-to-all over n ranks of S bytes a rank takes ``latency(n) + S (n - 1) / n / rate(S / n)``, for a rank keeps its
own part, with ``rate(x) = b x / (x + half)`` for messages of x bytes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from equigrad.errors import UserError
from equigrad.plan import gates


@dataclass(frozen=True)
class Routing:
    """
    groups, ranks: groups of ranks, and ranks in each
    chosen:        groups that a token goes to (M)
    quota:         experts in each of them (q)
    tokens:        of a rank
    row:           bytes of a token: hidden size times bytes of an entry
    """

    groups: int
    ranks: int
    chosen: int
    quota: int
    tokens: int
    row: int

    @property
    def experts(self) -> int:
        """Of each token (k)."""
        return self.chosen * self.quota


@dataclass(frozen=True)
class Fabric:
    """
    fast:    bytes a second of a rank inside its group
    latency: seconds of an all-to-all with nothing to move, by number of ranks
    half:    bytes of a message that gets half of the bandwidth
    """

    fast: float
    latency: Mapping[int, float]
    half: float

    def latency_of(self, ranks: int) -> float:
        """Between known numbers, along the logarithm of ranks. ``UserError`` beyond them."""
        known = sorted(self.latency)
        for low, high in pairwise(known):
            if low <= ranks <= high:
                share = math.log(ranks / low) / math.log(high / low)
                return self.latency[low] + share * (self.latency[high] - self.latency[low])
        raise UserError(f"latencies are known from {known[0]} to {known[-1]} ranks, not for {ranks}")

    def moved(self, size: float, ranks: int) -> float:
        """Bytes that an all-to-all of so many bytes a rank takes the time of, at full bandwidth."""
        return size * (ranks - 1) / ranks * (1 + self.half * ranks / size)


@dataclass(frozen=True)
class Arrival:
    """What two hops add where rows arrive: seconds for each row, and seconds of the second exchange of split sizes."""

    row: float
    split: float


def flat_seconds(routing: Routing, fabric: Fabric, slow: float) -> float:
    """One hop; ``slow``: bytes a second of a rank between groups."""
    world = routing.groups * routing.ranks
    size = routing.tokens * routing.experts * routing.row
    return fabric.latency_of(world) + fabric.moved(size, world) / slow


def two_hop_seconds(routing: Routing, fabric: Fabric, slow: float, arrival: Arrival) -> float:
    """Both hops and what follows the second."""
    return _fixed(routing, fabric, arrival) + _first_hop(routing, fabric) / slow


def break_even(routing: Routing, fabric: Fabric, arrival: Arrival) -> float:
    """How many times faster the fast tier must be for two hops to take as long as one; with more they win. Infinite
    where they never do."""
    world, size = routing.groups * routing.ranks, routing.tokens * routing.experts * routing.row
    saved = fabric.moved(size, world) - _first_hop(routing, fabric)
    if saved <= 0:
        return math.inf
    return max(0.0, (_fixed(routing, fabric, arrival) - fabric.latency_of(world)) * fabric.fast / saved)


def byte_break_even(routing: Routing) -> float:
    """The same where only bytes count, and all of the first hop's and of flat dispatch's are taken to leave the group:
    (1 - 1/R) q / (q - 1) for R ranks in a group. Infinite where a group gives one expert: no copy is saved."""
    if routing.quota == 1:
        return math.inf
    return (1 - 1 / routing.ranks) * routing.quota / (routing.quota - 1)


def step_gain(routing: Routing, fabric: Fabric, slow: float, arrival: Arrival) -> float:
    """Seconds that two hops save a step. Withdrawn: raises, as long as nothing validates it."""
    gates.permit_untested("step time with two-hop expert dispatch")
    return flat_seconds(routing, fabric, slow) - two_hop_seconds(routing, fabric, slow, arrival)


def _first_hop(routing: Routing, fabric: Fabric) -> float:
    """Bytes between groups, as ``Fabric.moved`` counts them."""
    return fabric.moved(routing.tokens * routing.chosen * routing.row, routing.groups)


def _fixed(routing: Routing, fabric: Fabric, arrival: Arrival) -> float:
    """All of two hops that does not depend on the slow tier. With even loads as many rows arrive as leave."""
    rows = routing.tokens * routing.experts
    latencies = fabric.latency_of(routing.groups) + fabric.latency_of(routing.ranks)
    second = fabric.moved(rows * routing.row, routing.ranks) / fabric.fast
    return latencies + second + rows * arrival.row + arrival.split
