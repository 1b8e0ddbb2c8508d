"""Jobs that iterate on several servers: when they compute, when they communicate and how fast, and when they end.

A job computes for a fixed time, then communicates a fixed volume, and so on. Rates change only when a job that shares
an interface, or shares one with one that does, begins or ends to communicate; nothing here is approximate (``pace``
is). Two things keep that fast:

- An interface matters only where the demands of all jobs on it are together more than it carries; jobs are *grouped* by
  such interfaces. A job without a group is never slowed: it goes on *steadily*, and its end is known at once.
- Rates depend on nothing but who communicates, so they are computed once for each set of jobs that ever does.
"""

from collections.abc import Iterator, Sequence
from functools import reduce
from heapq import heappop, heappush
from math import ceil, inf
from operator import or_

from equigrad.plan.cluster.network import ROUNDING, Share
from equigrad.plan.cluster.trace import Job

SMALL = 10
"""Jobs of a group for which it is not worth while to find out who of it shares anything at a time."""


class _Ring:
    """A job while it iterates. Times in seconds, volumes in MB, rates in MB/s.

    left:   iterations that have not ended
    pace:   seconds an iteration takes, while it goes on steadily; else 0, and what follows counts
    rest:   what it still has to send in this iteration, at the time ``since``; 0 while it computes
    rate:   how fast it sends since then
    group:  the set of jobs that it is grouped with, 0 for none
    """

    __slots__ = ("compute_s", "demand", "group", "job", "left", "links", "pace", "rate", "rest", "since", "volume")

    def __init__(self, job: Job, demand: float, links: Sequence[int]) -> None:
        self.job, self.demand, self.links, self.left = job.number, demand, links, job.iterations
        self.compute_s, self.volume = job.phases.compute_s, job.phases.volume_mb
        self.pace = self.rest = self.rate = self.since = 0.0
        self.group = 0


class Traffic:
    """All jobs that iterate on several servers. A job has a *slot* while it does: a small number, used again later. A
    set of jobs is a number with a bit for each slot."""

    def __init__(self, capacity: Sequence[float], share: Share) -> None:
        """``capacity``: of each interface, MB/s."""
        self._capacity, self._share = capacity, share
        self._most = [rate * (1 + ROUNDING) for rate in capacity]
        self._rings: list[_Ring | None] = []
        self._when: list[float] = []  # of each slot: the end of a phase, or of the job where it goes on steadily
        self._vacant: list[int] = []
        self._on = [0] * len(capacity)  # jobs on each interface
        self._asked = [0.0] * len(capacity)  # MB/s of those on it that communicate
        self._busy = 0  # jobs that communicate
        self._rates: dict[int, list[tuple[_Ring, int, float]]] = {}  # by those who share
        self.phases = 0
        """How many phases have been gone through one by one."""

    def add(self, job: Job, demand: float, links: Sequence[int], now: float) -> None:
        """A job begins its first iteration. ``demand`` and ``links``: as of ``network.ring_demand``."""
        if self._vacant:
            slot = heappop(self._vacant)
            self._rates = {jobs: rates for jobs, rates in self._rates.items() if not jobs >> slot & 1}
        else:
            slot = len(self._rings)
            self._rings.append(None)
            self._when.append(inf)
        self._rings[slot] = _Ring(job, demand, links)
        self._when[slot] = now + job.phases.compute_s
        touched = 1 << slot
        for link in links:
            self._on[link] |= 1 << slot
            touched |= self._on[link]
        self._regroup(touched, now)

    def run(self, until: float) -> tuple[float, int] | None:
        """Go on until a job ends, and say when and which; or until the time given, and say None."""
        when = self._when
        while when and (now := min(when)) <= until and now < inf:
            slot = when.index(now)
            ring = self._ring(slot)
            if ring.pace:
                return now, self._remove(slot, now)
            self.phases += 1
            if not ring.rest:
                ring.rest, ring.rate, ring.since = ring.volume, 0.0, now
                self._begin(slot)
                self._set_rates(self._sharing(slot), now)
                continue
            sharing = self._sharing(slot) ^ 1 << slot
            self._cease(slot)
            ring.rest = 0.0
            ring.left -= 1
            if not ring.left:
                return now, self._remove(slot, now)
            when[slot] = now + ring.compute_s
            if sharing:
                self._set_rates(sharing, now)
        return None

    def _ring(self, slot: int) -> _Ring:
        ring = self._rings[slot]
        assert ring is not None
        return ring

    def _begin(self, slot: int) -> None:
        self._busy |= 1 << slot
        ring = self._ring(slot)
        for link in ring.links:
            self._asked[link] += ring.demand

    def _cease(self, slot: int) -> None:
        self._busy &= ~(1 << slot)
        ring = self._ring(slot)
        for link in ring.links:
            self._asked[link] = self._asked[link] - ring.demand if self._on[link] & self._busy else 0.0

    def _sharing(self, slot: int) -> int:
        """This job, which communicates, and all others that do and whose rates may depend on it: those with which it
        shares an interface that is asked for more than it carries now, and so on. In a small group: all that do."""
        group = self._ring(slot).group
        if group.bit_count() <= SMALL:
            return group & self._busy
        found, new = 0, 1 << slot
        while new:
            found |= new
            reached = 0
            while new:
                low = new & -new
                new ^= low
                for link in self._ring(low.bit_length() - 1).links:
                    if self._asked[link] > self._most[link]:
                        reached |= self._on[link]
            new = reached & self._busy & ~found
        return found

    def _remove(self, slot: int, now: float) -> int:
        ring = self._ring(slot)
        peers = ring.group & ~(1 << slot)
        self._rings[slot], self._when[slot] = None, inf
        heappush(self._vacant, slot)
        for link in ring.links:
            self._on[link] &= ~(1 << slot)
        self._regroup(peers, now)
        return ring.job

    def _set_rates(self, jobs: int, now: float) -> None:
        """Of all jobs that share something now."""
        rates = self._rates.get(jobs)
        if rates is None:
            rings = {slot: self._ring(slot) for slot in _slots(jobs)}
            demands, links = {s: r.demand for s, r in rings.items()}, {s: r.links for s, r in rings.items()}
            found = self._share(demands, links, self._capacity)
            rates = self._rates[jobs] = [(ring, slot, found[slot]) for slot, ring in rings.items()]
        for ring, slot, rate in rates:
            if rate != ring.rate:
                ring.rest = max(ring.rest - ring.rate * (now - ring.since), 1e-12 * ring.volume)  # 0 is: it computes
                ring.rate, ring.since = rate, now
                self._when[slot] = now + ring.rest / rate

    def _regroup(self, touched: int, now: float) -> None:
        """Group these jobs and their groups anew. Who is grouped is so by interfaces that are asked for more than they
        carry when all communicate."""
        for slot in _slots(touched):
            touched |= self._ring(slot).group
        touched &= sum(1 << slot for slot, ring in enumerate(self._rings) if ring)
        links = {link for slot in _slots(touched) for link in self._ring(slot).links}
        full = {n for n in links if sum(self._ring(s).demand for s in _slots(self._on[n])) > self._most[n]}
        begun, pending = 0, touched
        while pending:
            group, new = 0, pending & -pending
            while new:
                group |= new
                near = {link for slot in _slots(new) for link in self._ring(slot).links} & full
                new = reduce(or_, (self._on[link] for link in near), 0) & ~group
            pending &= ~group
            for slot in _slots(group):
                ring = self._ring(slot)
                if group == 1 << slot:
                    ring.group = 0
                    rate = min([ring.demand, *(self._capacity[link] for link in ring.links)])
                    self._go_steadily(slot, ring.compute_s + ring.volume / rate, now)
                else:
                    ring.group = group
                    self._go_by_phases(slot, now)
                    begun |= (ring.rest > 0) << slot
        while begun:
            sharing = self._sharing(begun.bit_length() - 1)
            self._set_rates(sharing, now)
            begun &= ~sharing

    def _go_steadily(self, slot: int, pace: float, now: float) -> None:
        """From the phase that it is in, at that many seconds an iteration to the end."""
        ring = self._ring(slot)
        if ring.pace == pace:
            return
        self._go_by_phases(slot, now)
        sending = pace - ring.compute_s
        if ring.rest:
            self._cease(slot)
            rest = sending * (ring.rest - ring.rate * (now - ring.since)) / ring.volume
        else:
            rest = self._when[slot] - now + sending
        ring.pace, ring.rate, ring.rest = pace, 0.0, 0.0
        self._when[slot] = now + max(rest, 0.0) + (ring.left - 1) * pace

    def _go_by_phases(self, slot: int, now: float) -> None:
        """The phase that a job is in after it has gone on steadily."""
        ring = self._ring(slot)
        if not ring.pace:
            return
        rest = max(self._when[slot] - now, 0.0)
        ring.left = max(ceil(rest / ring.pace - ROUNDING), 1)
        rest -= (ring.left - 1) * ring.pace
        sending = ring.pace - ring.compute_s
        ring.pace, ring.since, ring.rate = 0.0, now, 0.0
        if rest > sending:
            ring.rest, self._when[slot] = 0.0, now + rest - sending
        else:
            ring.rest = max(ring.volume * rest / sending, 1e-12 * ring.volume)
            self._begin(slot)


def _slots(jobs: int) -> Iterator[int]:
    """Of a set of jobs, in order."""
    while jobs:
        low = jobs & -jobs
        yield low.bit_length() - 1
        jobs ^= low
