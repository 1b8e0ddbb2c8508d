"""Who starts next, by hand; and what backfilling promises."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equigrad.plan.cluster.scheduling import InOrder
from equigrad.plan.cluster.simulation import simulate
from equigrad.plan.cluster.trace import Job
from tests.plan.cluster.cases import job, servers


def local(number: int, workers: int, seconds: int, arrival: float = 0.0) -> Job:
    """A job that only computes."""
    return job(number, workers, seconds, arrival, network_s=0.0, volume_mb=0.0)


def starts(jobs: Sequence[Job], scheduler: str, devices: int = 4) -> list[float]:
    return [run.start_s for run in simulate(jobs, servers(devices), scheduler, "pack").runs]


JOBS = [local(0, 3, 10), local(1, 4, 5), local(2, 1, 10), local(3, 1, 11), local(4, 2, 1)]


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        ("fcfs", [0, 10, 15, 15, 15]),  # 1 holds back all behind it
        ("shortest", [16, 11, 0, 0, 0]),  # services: 30, 20, 10, 11, 2
        ("backfill", [0, 10, 0, 15, 15]),  # 3 would be a second too long
    ],
)
def test_starts_by_hand(scheduler: str, expected: list[float]) -> None:
    assert starts(JOBS, scheduler) == expected


def test_a_job_may_pass_where_the_first_has_room_beside_it() -> None:
    jobs = [local(0, 3, 10), local(1, 4, 5), local(2, 1, 100), local(3, 1, 100)]
    assert starts(jobs, "backfill", 5) == [0, 10, 0, 15]  # with both of them, job 1 would wait for a hundred seconds


KNOWN = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 20), st.integers(0, 30)), min_size=1, max_size=12)


@given(KNOWN)
def test_no_job_in_front_waits_longer_than_it_was_promised(known: list[tuple[int, int, int]]) -> None:
    """As the first job of the queue under first come, first served, from the moment that it was first."""
    jobs = sorted((local(0, *one) for one in known), key=lambda one: one.arrival_s)
    jobs = [
        Job(n, str(n), one.where, one.arrival_s, one.workers, one.iterations, one.phases) for n, one in enumerate(jobs)
    ]
    runs = simulate(jobs, servers(4), "backfill", "pack").runs
    for run in runs:
        front = max([run.job.arrival_s, *(other.start_s for other in runs[: run.job.number])])
        there = [other for other in runs if other.start_s < front or other.job.number < run.job.number]
        assert run.start_s <= max([front, *(other.end_s for other in there)])


def test_a_queue_keeps_its_order_whatever_order_jobs_arrive_in() -> None:
    queue = InOrder(lambda one: one.number)
    for number in (3, 1, 2):
        queue.add(local(number, 1, 1))
    assert [one.number for one in queue.waiting] == [1, 2, 3]
