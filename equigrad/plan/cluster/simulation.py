"""The event loop: jobs arrive, wait, load, iterate and end. Knows when things happen; who starts, where, and how fast
the network is are told by ``scheduling``, ``placement`` and ``traffic`` or ``pace``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import Literal, TypeAlias

from equigrad.config.cluster import Server
from equigrad.plan.cluster.network import (
    MeanShare,
    Share,
    max_min,
    mean_max_min,
    mean_proportional,
    proportional,
    ring_demand,
)
from equigrad.plan.cluster.pace import Paces
from equigrad.plan.cluster.placement import PLACEMENTS, Placement
from equigrad.plan.cluster.scheduling import SCHEDULERS, Running
from equigrad.plan.cluster.trace import Job
from equigrad.plan.cluster.traffic import Traffic

Sharing: TypeAlias = Literal["maxmin", "proportional", "none", "fixed-penalty"]
SHARES: dict[str, tuple[Share, MeanShare]] = {
    "maxmin": (max_min, mean_max_min),
    "proportional": (proportional, mean_proportional),
}
"""The ways to share an interface. Beside them: ``none``, every job is as fast as alone, and ``fixed-penalty``, every
iteration of a job of several workers takes ``PENALTY`` times as long, wherever they are."""
PENALTY = 1.1
"""The baseline's: 10 %."""

Phases: TypeAlias = Literal["auto", "each", "mean"]
"""Whether every phase is gone through (``traffic``), or mean paces are taken (``pace``). ``auto``: every phase, unless
there are more than ``MOST_PHASES``."""
MOST_PHASES = 500_000
"""A phase takes from 3 microseconds, where few jobs share interfaces, to 70, where dozens do."""


@dataclass(frozen=True)
class Run:
    """A job that has run: its workers on which servers, and from when to when, in seconds of the trace's clock."""

    job: Job
    placement: Placement
    start_s: float
    end_s: float

    @property
    def completion_s(self) -> float:
        """From arrival to end."""
        return self.end_s - self.job.arrival_s


@dataclass(frozen=True)
class Outcome:
    """What became of a trace.

    runs:    by the number of the job
    waiting: jobs that never start, though nothing runs and nothing will arrive: a deadlock
    phases:  how many phases of jobs that share interfaces were gone through one by one
    mean:    whether mean paces were taken instead
    """

    runs: tuple[Run, ...]
    waiting: tuple[Job, ...]
    phases: int
    mean: bool


def simulate(
    jobs: Sequence[Job],
    servers: Sequence[Server],
    scheduler: str = "fcfs",
    placement: str = "colocate",
    sharing: Sharing = "maxmin",
    phases: Phases = "auto",
) -> Outcome:
    """Run a trace to its end. The result depends on nothing but the arguments, and not on the order of ``jobs``."""
    if phases == "auto":
        phases = "mean" if 2 * sum(job.iterations for job in jobs if job.workers > 1) > MOST_PHASES else "each"
    return _Loop(servers, scheduler, placement, sharing, phases == "mean").run(jobs)


class _Loop:
    def __init__(self, servers: Sequence[Server], scheduler: str, placement: str, sharing: Sharing, mean: bool) -> None:
        self.servers, self.sharing = servers, sharing
        self.devices = [server.devices for server in servers]
        self.free = list(self.devices)
        self.queue, self.place = SCHEDULERS[scheduler](), PLACEMENTS[placement]
        capacity = [server.interface_mb_s for server in servers]
        share, mean_share = SHARES.get(sharing, SHARES["maxmin"])
        self.mean = mean
        self.traffic = Paces(capacity, mean_share) if mean else Traffic(capacity, share)
        self.jobs: dict[int, Job] = {}
        self.running: dict[int, Running] = {}
        self.runs: dict[int, Run] = {}
        self.events: list[tuple[float, int, Callable[[float, Job], None], Job]] = []  # when, whose, and what happens

    def run(self, jobs: Sequence[Job]) -> Outcome:
        self.jobs = {job.number: job for job in jobs}
        for job in jobs:
            heappush(self.events, (job.arrival_s, job.number, self.arrive, job))
        while (now := self.happen(inf)) is not None:
            while self.happen(now) is not None:
                pass  # all that happens at one time has happened before the queue is looked at
            while found := self.queue.take(now, self.free, self.devices, self.place, self.running.values()):
                self.start(now, *found)
        runs = tuple(self.runs[number] for number in sorted(self.runs))
        return Outcome(runs, tuple(self.queue.waiting), self.traffic.phases, self.mean)

    def happen(self, until: float) -> float | None:
        """Let the next thing happen, unless that is after ``until``, and say when it did."""
        ahead = self.events[0][0] if self.events else inf
        if ended := self.traffic.run(min(ahead, until)):
            now, number = ended
            self.end(now, self.jobs[number])
            return now
        if ahead > until or not self.events:
            return None
        now, _, action, job = heappop(self.events)
        action(now, job)
        return now

    def arrive(self, now: float, job: Job) -> None:
        self.queue.add(job)

    def start(self, now: float, job: Job, placement: Placement) -> None:
        """The job has its devices, and loads."""
        for server, workers in placement:
            self.free[server] -= workers
        self.running[job.number] = Running(job, placement, now)
        loaded = now + job.phases.loading_s
        if self.sharing in SHARES and ring_demand(job.phases, placement, self.servers)[1]:
            heappush(self.events, (loaded, job.number, self.iterate, job))
        else:
            ended = loaded + job.iterations * self.iteration_s(job, placement)
            heappush(self.events, (ended, job.number, self.end, job))

    def iteration_s(self, job: Job, placement: Placement) -> float:
        """Of a job that shares nothing."""
        phases = job.phases
        if self.sharing in SHARES and phases.volume_mb:
            return phases.compute_s + phases.volume_mb / ring_demand(phases, placement, self.servers)[0]
        penalty = PENALTY if self.sharing == "fixed-penalty" and job.workers > 1 else 1.0
        return penalty * (phases.compute_s + phases.network_s)

    def iterate(self, now: float, job: Job) -> None:
        """The job has loaded."""
        self.traffic.add(job, *ring_demand(job.phases, self.running[job.number].placement, self.servers), now)

    def end(self, now: float, job: Job) -> None:
        """Its devices are free again."""
        run = self.running.pop(job.number)
        for server, workers in run.placement:
            self.free[server] += workers
        self.runs[job.number] = Run(job, run.placement, run.start_s, now)
