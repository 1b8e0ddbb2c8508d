"""Jobs that iterate on several servers, by mean paces: for traces of so many iterations that they cannot be gone
through one by one, as ``traffic`` does. Knows how often a job communicates, and not when.

A job that communicates shares an interface with each other job there for the part of the time in which that one
communicates, its *presence*: as if phases were independent. That is the approximation of Bard and of Schweitzer for
closed queueing networks (1979). Presences are brought into agreement when a job begins or ends, from its interfaces
outwards, as far as anything changes by more than ``TOLERANCE``.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from equigrad.plan.cluster.network import MeanShare
from equigrad.plan.cluster.trace import Job

TOLERANCE = 2e-3
"""Of a presence, between 0 and 1."""
MOST_ROUNDS = 50
"""How often one interface is shared out at a time. Nothing is known to need so many; nothing proves that none does."""


@dataclass
class _Ring:
    """A job while it iterates. Times in seconds, volumes in MB, rates in MB/s.

    end:      when its last iteration will have ended
    pace:     seconds an iteration takes
    presence: the part of them in which it communicates, as the others know it
    shares:   what it gets of each interface while it does, MB/s
    rate:     the smallest of them, of the interface ``tightest``; or its demand, and -1
    second:   the second smallest: how fast it would be but for that interface
    """

    job: int
    compute_s: float
    volume: float
    demand: float
    shares: dict[int, float]
    end: float
    pace: float
    presence: float
    rate: float
    second: float
    tightest: int = -1


class Paces:
    """All jobs that iterate on several servers, as of ``traffic.Traffic``."""

    phases = 0

    def __init__(self, capacity: Sequence[float], share: MeanShare) -> None:
        """``capacity``: of each interface, MB/s."""
        self._capacity, self._share = capacity, share
        self._rings: dict[int, _Ring] = {}
        self._on: list[dict[int, _Ring]] = [{} for _ in capacity]

    def add(self, job: Job, demand: float, links: Sequence[int], now: float) -> None:
        """A job begins its first iteration. ``demand`` and ``links``: as of ``network.ring_demand``."""
        compute_s, volume = job.phases.compute_s, job.phases.volume_mb
        pace = compute_s + volume / demand
        end, shares = now + job.iterations * pace, dict.fromkeys(links, demand)
        presence = 1 - compute_s / pace
        ring = _Ring(job.number, compute_s, volume, demand, shares, end, pace, presence, demand, demand)
        self._rings[job.number] = ring
        for link in links:
            self._on[link][job.number] = ring
        self._agree(links, now)

    def run(self, until: float) -> tuple[float, int] | None:
        """Go on until a job ends, and say when and which; or until the time given, and say None."""
        end, job = min(((ring.end, ring.job) for ring in self._rings.values()), default=(inf, -1))
        if end > until or job < 0:
            return None
        links = self._rings.pop(job).shares
        for link in links:
            del self._on[link][job]
        self._agree(links, end)
        return end, job

    def _agree(self, links: Iterable[int], now: float) -> None:
        """Shares of these interfaces, and of those on which a presence changes by that."""
        pending, rounds = dict.fromkeys(links), Counter[int]()
        while pending:
            link = next(iter(pending))
            del pending[link]
            rounds[link] += 1
            here = list(self._on[link].values())
            known = [(r.second if r.tightest == link else r.rate, r.demand, r.presence) for r in here]
            for ring, share in zip(here, self._share(known, self._capacity[link]), strict=True):
                ring.shares[link] = share
                if self._moves(ring, now) and rounds[link] < MOST_ROUNDS:
                    pending |= dict.fromkeys(ring.shares)

    def _moves(self, ring: _Ring, now: float) -> bool:
        """Let a job go as fast as its shares allow, and say whether that changes its presence."""
        shares = sorted([(ring.demand, -1), *((share, link) for link, share in ring.shares.items())])
        (ring.rate, ring.tightest), (ring.second, _) = shares[:2]
        pace = ring.compute_s + ring.volume / ring.rate
        ring.end = now + max(ring.end - now, 0.0) * pace / ring.pace
        ring.pace, presence = pace, 1 - ring.compute_s / pace
        if abs(presence - ring.presence) <= TOLERANCE:
            return False
        ring.presence = presence
        return True
