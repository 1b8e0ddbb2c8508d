"""Which waiting job starts next. A scheduler knows the queue, what is free and what runs, not the network.

None of them stops a job that runs. Where a scheduler needs to know how long a job will take, that is its time alone.
"""

from bisect import insort
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from equigrad.plan.cluster.placement import Place, Placement
from equigrad.plan.cluster.trace import Job

DEPTH = 500
"""How many waiting jobs backfilling looks at, from the front of the queue: it bounds what one decision costs."""

Start: TypeAlias = tuple[Job, Placement]


@dataclass(frozen=True)
class Running:
    """A job on its servers, and when it would end if nothing slowed it."""

    job: Job
    placement: Placement
    start_s: float

    @property
    def expected_s(self) -> float:
        """The end, on the trace's clock."""
        return self.start_s + self.job.alone_s


class InOrder:
    """Jobs start strictly one after another: while the first one has to wait, so does every job behind it."""

    def __init__(self, key: Callable[[Job], Any]) -> None:
        self._key = key
        self.waiting: list[Job] = []

    def add(self, job: Job) -> None:
        """A job that has arrived."""
        insort(self.waiting, job, key=self._key)

    def take(
        self, now: float, free: Sequence[int], devices: Sequence[int], place: Place, running: Collection[Running]
    ) -> Start | None:
        """The job that starts now and where, taken out of the queue; None where all that wait go on waiting.

        free, devices: of each server
        running:       in any order
        """
        placement = place(free, devices, self.waiting[0].workers) if self.waiting else None
        return (self.waiting.pop(0), placement) if placement else None


class Backfill(InOrder):
    """EASY backfilling (Lifka 1995): first come, first served, but a job may start before those in front of it where
    that does not make the first of them wait any longer.

    The first job is promised the time at which it could start if all that run ended as expected. Another one may start
    if it will have ended by then, or leaves the first one room even so.
    """

    def take(
        self, now: float, free: Sequence[int], devices: Sequence[int], place: Place, running: Collection[Running]
    ) -> Start | None:
        found = super().take(now, free, devices, place, running)
        if found or not self.waiting or not any(free):
            return found
        head = self.waiting[0]
        promised, then = _reservation(now, free, devices, place, running, head)
        options: dict[int, tuple[Placement | None, bool]] = {}  # by workers: where, and whether the head has room too
        for at, job in enumerate(self.waiting[1:DEPTH], 1):
            if job.workers not in options:
                where = place(free, devices, job.workers)
                harmless = where is not None and place(_less(then, where), devices, head.workers) is not None
                options[job.workers] = where, harmless
            where, harmless = options[job.workers]
            if where and (harmless or now + job.alone_s <= promised):
                return self.waiting.pop(at), where
        return None


def _reservation(
    now: float, free: Sequence[int], devices: Sequence[int], place: Place, running: Collection[Running], head: Job
) -> tuple[float, list[int]]:
    """When the job can start at the latest, if jobs end as expected, and what is free then; never: infinity."""
    then = list(free)
    for run in sorted(running, key=lambda run: (run.expected_s, run.job.number)):
        for server, workers in run.placement:
            then[server] += workers
        if place(then, devices, head.workers):
            return max(run.expected_s, now), then
    return float("inf"), then


def _less(free: Sequence[int], placement: Placement) -> list[int]:
    taken = dict(placement)
    return [room - taken.get(server, 0) for server, room in enumerate(free)]


SCHEDULERS: dict[str, Callable[[], InOrder]] = {
    "fcfs": partial(InOrder, lambda job: job.number),
    "shortest": partial(InOrder, lambda job: (job.workers * job.alone_s, job.number)),
    "backfill": partial(Backfill, lambda job: job.number),
}
"""By name. ``fcfs``: first come, first served. ``shortest``: the least service first, devices times seconds; as nothing
that runs is stopped, that is the non-preemptive form of shortest remaining service first (Tiresias, NSDI 2019).
``backfill``: see ``Backfill``."""
