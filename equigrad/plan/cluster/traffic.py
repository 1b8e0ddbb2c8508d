"""Jobs that iterate on several servers: when they compute, when they communicate and how fast, and when they end.

A job computes for a fixed time, then communicates a fixed volume, and so on. Rates change only when a job that shares
an interface, or shares one with one that does, begins or ends to communicate. Three things keep that fast:

- An interface matters only where the demands of all jobs on it are together more than it carries; jobs are *grouped* by
  such interfaces. A job without a group is never slowed, so its end is known at once.
- Rates depend on nothing but who communicates, so they are computed once for each set of jobs that ever does.
- When the jobs of a group have all gone through ``window`` iterations one by one, they go on *steadily*: at the mean
  pace of those, until a job of the group ends or another one joins. Phases then go on from where the pace has brought
  them. With ``window`` None every phase is gone through, and nothing here is approximate.
"""

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from math import ceil, inf

from equigrad.plan.cluster.network import ROUNDING, Share


class _Ring:
    """A job while it iterates. Times in seconds, volumes in MB, rates in MB/s.

    left:   iterations that have not ended
    pace:   seconds an iteration takes on average, while it goes on steadily; else 0, and what follows counts
    rest:   what it still has to send in this iteration, at the time ``since``; 0 while it computes
    rate:   how fast it sends since then
    ends:   in the window of its group: the first end of an iteration, the last one, and how many there were
    """

    __slots__ = ("compute_s", "demand", "ends", "group", "job", "left", "links", "pace", "rate", "rest", "since", "volume")

    def __init__(self, job: int, compute_s: float, volume: float, demand: float, links: Sequence[int], left: int) -> None:
        self.job, self.compute_s, self.volume, self.demand = job, compute_s, volume, demand
        self.links, self.left = links, left
        self.pace = self.rest = self.rate = self.since = 0.0
        self.ends = (0.0, 0.0, 0)
        self.group: _Group | None = None


class _Group:
    """Slots of jobs that may slow each other, which of them communicate, and how many are not through the window."""

    __slots__ = ("busy", "slots", "waiting_for")

    def __init__(self, slots: Sequence[int]) -> None:
        self.slots, self.busy, self.waiting_for = slots, 0, len(slots)


class Traffic:
    """All jobs that iterate on several servers. A job has a *slot* while it does: a small number, used again later."""

    def __init__(self, capacity: Sequence[float], share: Share, window: int | None) -> None:
        """``capacity``: of each interface, MB/s."""
        self._capacity, self._share, self._window = capacity, share, window
        self._rings: list[_Ring | None] = []
        self._when: list[float] = []  # of each slot: the end of a phase, or of the job where it goes on steadily
        self._vacant: list[int] = []
        self._on: list[set[int]] = [set() for _ in capacity]  # slots on each interface
        self._rates: dict[int, list[tuple[_Ring, int, float]]] = {}  # by a bit for each slot that communicates
        self.phases = 0
        """How many phases have been gone through one by one."""

    def add(
        self, job: int, compute_s: float, volume: float, demand: float, links: Sequence[int], iterations: int, now: float
    ) -> None:
        """A job begins its first iteration, which is computing. ``links``: the interfaces that it uses."""
        if self._vacant:
            slot = heappop(self._vacant)
            self._rates = {busy: rates for busy, rates in self._rates.items() if not busy >> slot & 1}
        else:
            slot = len(self._rings)
            self._rings.append(None)
            self._when.append(inf)
        self._rings[slot] = _Ring(job, compute_s, volume, demand, links, iterations)
        self._when[slot] = now + compute_s
        for link in links:
            self._on[link].add(slot)
        self._regroup({slot}.union(*(self._on[link] for link in links)), now)

    def run(self, until: float) -> tuple[float, int] | None:
        """Go on until a job ends, and say when and which; or until the time given, and say None."""
        when = self._when
        while when and (now := min(when)) <= until and now < inf:
            slot = when.index(now)
            ring = self._ring(slot)
            if ring.pace:
                return now, self._remove(slot, now)
            self.phases += 1
            group = ring.group
            assert group is not None, "a job without a group goes on steadily"
            group.busy ^= 1 << slot
            if not ring.rest:
                ring.rest, ring.rate, ring.since = ring.volume, 0.0, now
                self._set_rates(group, now)
                continue
            ring.rest = 0.0
            ring.left -= 1
            if not ring.left:
                return now, self._remove(slot, now)
            when[slot] = now + ring.compute_s
            self._set_rates(group, now)
            first, _, count = ring.ends
            ring.ends = (first if count else now), now, count + 1
            if count == self._window:
                group.waiting_for -= 1
                if not group.waiting_for:
                    for member in group.slots:
                        first, last, count = self._ring(member).ends
                        self._go_steadily(member, (last - first) / (count - 1), now)
        return None

    def _ring(self, slot: int) -> _Ring:
        ring = self._rings[slot]
        assert ring is not None
        return ring

    def _remove(self, slot: int, now: float) -> int:
        ring = self._ring(slot)
        self._rings[slot], self._when[slot] = None, inf
        heappush(self._vacant, slot)
        for link in ring.links:
            self._on[link].discard(slot)
        peers = ring.group.slots if ring.group else ()
        self._regroup({peer for peer in peers if peer != slot}, now)
        return ring.job

    def _set_rates(self, group: _Group, now: float) -> None:
        rates = self._rates.get(group.busy)
        if rates is None:
            busy = {slot: self._ring(slot) for slot in group.slots if group.busy >> slot & 1}
            demands, links = ({s: r.demand for s, r in busy.items()}, {s: r.links for s, r in busy.items()})
            found = self._share(demands, links, self._capacity)
            rates = self._rates[group.busy] = [(ring, slot, found[slot]) for slot, ring in busy.items()]
        for ring, slot, rate in rates:
            if rate != ring.rate:
                ring.rest = max(ring.rest - ring.rate * (now - ring.since), 1e-12 * ring.volume)  # 0 is: it computes
                ring.rate, ring.since = rate, now
                self._when[slot] = now + ring.rest / rate

    def _regroup(self, touched: Iterable[int], now: float) -> None:
        """Group anew the jobs in these slots and in their groups. Who shares a group does so by interfaces that are
        asked for more than they carry."""
        pending = set(touched)
        for slot in tuple(pending):
            if group := self._ring(slot).group:
                pending.update(peer for peer in group.slots if self._rings[peer] is not None)
        full = {link for slot in pending for link in self._ring(slot).links if self._is_full(link)}
        while pending:
            slots = [pending.pop()]
            for slot in slots:
                near = set().union(*(self._on[link] for link in self._ring(slot).links if link in full)) & pending
                slots += sorted(near)
                pending -= near
            if len(slots) == 1:
                ring = self._ring(slots[0])
                rate = min([ring.demand, *(self._capacity[link] for link in ring.links)])
                self._go_steadily(slots[0], ring.compute_s + ring.volume / rate, now)
                ring.group = None
                continue
            group = _Group(sorted(slots))
            for slot in group.slots:
                ring = self._ring(slot)
                self._go_by_phases(slot, now)
                ring.group, ring.ends = group, (0.0, 0.0, 0)
                group.busy |= (ring.rest > 0) << slot
            self._set_rates(group, now)

    def _is_full(self, link: int) -> bool:
        return sum(self._ring(slot).demand for slot in self._on[link]) > self._capacity[link] * (1 + ROUNDING)

    def _go_steadily(self, slot: int, pace: float, now: float) -> None:
        """From the phase that it is in, at that many seconds an iteration to the end."""
        ring = self._ring(slot)
        if ring.pace == pace:
            return
        self._go_by_phases(slot, now)
        sending = pace - ring.compute_s
        if ring.rest:
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
