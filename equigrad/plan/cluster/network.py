"""What a job asks of the network, and what it gets while others ask too. Pure functions; they know no time.

A job's ring all-reduce goes through all workers of a server before it goes on to the next server. So over every
interface of its servers it sends the volume of one edge, and receives as much; directions are alike, and one number
stands for both. A ring inside one server uses no interface.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import TypeAlias

from equigrad.config.cluster import Server
from equigrad.plan.cluster.placement import Placement
from equigrad.plan.cluster.trace import Profile

Share: TypeAlias = Callable[[Mapping[int, float], Mapping[int, Sequence[int]], Sequence[float]], dict[int, float]]
"""From demands (MB/s, of each job that communicates), the interfaces that each job uses and the capacity of every
interface (MB/s), to the rate of each job (MB/s)."""

Presence: TypeAlias = tuple[float, float, float]
"""Of a job on an interface: the rate that all else allows it (MB/s), its demand (MB/s), and the part of the time in
which it communicates."""
MeanShare: TypeAlias = Callable[[Sequence[Presence], float], list[float]]
"""From the jobs on an interface and its capacity (MB/s), to what it leaves each of them while that one communicates and
the others do for their part of the time (MB/s)."""

ROUNDING = 1e-9
"""Relative: sums of demands differ by less in any order."""


def ring_demand(phases: Profile, placement: Placement, servers: Sequence[Server]) -> tuple[float, tuple[int, ...]]:
    """How fast a job's ring would go if it had the interfaces for itself (MB/s), and whose interfaces it uses.

    It goes as fast as it was profiled, but no faster than devices of one server talk to each other where it has several
    workers on one.
    """
    inside = [servers[server].inside_mb_s for server, workers in placement if workers > 1]
    rate = min([phases.volume_mb / phases.network_s, *inside]) if phases.volume_mb else 0.0
    return rate, tuple(server for server, _ in placement) if rate and len(placement) > 1 else ()


def max_min(
    demands: Mapping[int, float], links: Mapping[int, Sequence[int]], capacity: Sequence[float]
) -> dict[int, float]:
    """Max-min fairness: no job can get more without taking from one that has no more than it.

    Progressive filling (Bertsekas and Gallager, Data Networks, section 6.5.2): all rates grow together; a job stops at
    its demand, or when an interface of it is full.
    """
    rates: dict[int, float] = {}
    growing = sorted(demands, key=lambda job: (-demands[job], job))  # the smallest demand last
    users = Counter(link for job in growing for link in links[job])
    left = {link: capacity[link] for link in users}
    while growing:
        level, bottleneck = min(((left[link] / n, link) for link, n in users.items() if n), default=(inf, -1))
        if demands[growing[-1]] <= level:
            stopped = [growing.pop()]
        else:
            stopped = [job for job in growing if bottleneck in links[job]]
            growing = [job for job in growing if bottleneck not in links[job]]
        for job in stopped:
            rates[job] = min(demands[job], level)
            for link in links[job]:
                users[link] -= 1
                left[link] = max(left[link] - rates[job], 0.0)
    return rates


def proportional(
    demands: Mapping[int, float], links: Mapping[int, Sequence[int]], capacity: Sequence[float]
) -> dict[int, float]:
    """A full interface is divided in proportion to demands; a job goes at the smallest of its shares. For comparison:
    what a job does not use of its share of one interface because of another one is lost."""
    asked: dict[int, float] = {}
    for job, demand in sorted(demands.items()):
        for link in links[job]:
            asked[link] = asked.get(link, 0.0) + demand
    return {
        job: demand * min([1.0, *(capacity[link] / asked[link] for link in links[job])])
        for job, demand in demands.items()
    }


def mean_max_min(jobs: Sequence[Presence], capacity: float) -> list[float]:
    """For each job the level at which the interface is full; up to it the others take what they can."""
    ordered, all_there = sorted(enumerate(jobs), key=lambda entry: entry[1]), sum(presence for _, _, presence in jobs)
    levels = []
    for job, (_, _, own) in enumerate(jobs):
        left, weight = capacity, 1 + max(all_there - own, 0.0)
        for other, (rate, _, presence) in ordered:
            if other != job:
                if rate * weight > left:
                    break
                left -= presence * rate
                weight -= presence
        levels.append(left / max(weight, 1.0))
    return levels


def mean_proportional(jobs: Sequence[Presence], capacity: float) -> list[float]:
    """Parts of the interface in proportion to demands."""
    asked = sum(presence * demand for _, demand, presence in jobs)
    return [demand * capacity / (asked + (1 - presence) * demand) for _, demand, presence in jobs]
