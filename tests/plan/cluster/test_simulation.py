"""The event loop against closed forms and against slow simulators; what holds for any trace."""

import random
from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equigrad.config.cluster import Server
from equigrad.plan.cluster import traffic
from equigrad.plan.cluster.figures import deadlock
from equigrad.plan.cluster.placement import PLACEMENTS
from equigrad.plan.cluster.scheduling import SCHEDULERS
from equigrad.plan.cluster.simulation import Outcome, Phases, simulate
from equigrad.plan.cluster.trace import Job
from tests.plan.cluster.cases import ends, job, overlapping, servers

TWO = servers(2, 2)
"""Each job of two workers, spread, uses both interfaces; alone it just fills them."""


def end_times(jobs: Sequence[Job], cluster: Sequence[Server] = TWO, **how: object) -> list[float]:
    outcome = simulate(jobs, cluster, **{"placement": "spread", "phases": "each"} | how)  # type: ignore[arg-type]
    return [run.end_s for run in outcome.runs]


# ---- closed forms


def test_two_equal_jobs_that_start_together_communicate_together() -> None:
    """A second of computing, and two of sending at half the rate."""
    assert end_times([job(0), job(1)]) == pytest.approx([30.0, 30.0])


def test_two_equal_jobs_half_an_iteration_apart_do_not_meet() -> None:
    assert end_times([job(0), job(1, arrival=1.0)]) == pytest.approx([20.0, 21.0])


def test_jobs_that_meet_in_part_are_slowed_in_part() -> None:
    """Job 0 sends from 1; job 1 from 1.5. Half of job 0's volume is left then, both at half the rate: over at 2.5, when
    job 1 has half left and is alone: over at 3. The gap of half a second stays."""
    assert end_times([job(0, iterations=1), job(1, iterations=1, arrival=0.5)]) == pytest.approx([2.5, 3.0])
    assert end_times([job(0), job(1, arrival=0.5)]) == pytest.approx([25.0, 25.5])


def test_a_job_speeds_up_when_the_other_one_has_ended() -> None:
    assert end_times([job(0, iterations=4), job(1, iterations=10)]) == pytest.approx([12.0, 24.0])


def test_a_job_that_loads_disturbs_nobody() -> None:
    assert end_times([job(0), job(1, loading_s=20.0)]) == pytest.approx([20.0, 40.0])


def test_an_interface_that_carries_both_slows_neither() -> None:
    assert end_times([job(0), job(1)], servers(2, 2, interface=200.0)) == pytest.approx([20.0, 20.0])


def test_a_job_alone_sends_no_faster_than_its_slowest_interface() -> None:
    slow = [*servers(1), *servers(1, interface=25.0)]
    assert end_times([job(0)], slow) == pytest.approx([50.0])


def test_a_ring_inside_a_server_uses_no_interface() -> None:
    assert end_times([job(0), job(1)], servers(2, 2, interface=1.0), placement="pack") == pytest.approx([20.0, 20.0])
    assert end_times([job(0)], servers(2, interface=1.0, inside=50.0)) == pytest.approx([30.0])


def test_the_baselines_know_no_sharing() -> None:
    jobs = [job(0), job(1), job(2, workers=1, iterations=20)]
    cluster = servers(3, 2)
    assert end_times(jobs, cluster, sharing="none") == pytest.approx([20.0, 20.0, 20.0])
    assert end_times(jobs, cluster, sharing="fixed-penalty") == pytest.approx([22.0, 22.0, 20.0])


def test_proportional_shares_leave_the_small_demand_less() -> None:
    """Demands of 100 and 300 over 100: shares are 50 and 50, or 25 and 75."""
    jobs = [job(0, iterations=1), job(1, iterations=1, network_s=1.0, volume_mb=300.0)]
    assert end_times(jobs) == pytest.approx([3.0, 5.0])
    assert end_times(jobs, sharing="proportional") == pytest.approx([1 + 4.0, 1 + 4.0])


def test_jobs_queue_for_devices() -> None:
    assert end_times([job(n, workers=4) for n in range(3)], servers(2, 2)) == pytest.approx([20.0, 40.0, 60.0])


# ---- slow simulators


@st.composite
def traces(draw: st.DrawFn, most: int = 6) -> list[Job]:
    """Jobs of one to five workers, with phases in quarters of seconds."""
    quarters = st.integers(1, 12).map(lambda n: n / 4)
    return [
        job(
            number,
            workers=draw(st.integers(1, 5)),
            iterations=draw(st.integers(1, 12)),
            arrival=draw(st.integers(0, 40)) / 4,
            compute_s=draw(quarters),
            network_s=draw(quarters),
            loading_s=draw(st.integers(0, 8)) / 4,
            volume_mb=draw(st.sampled_from([0.0, 10.0, 60.0, 100.0, 250.0])),
        )
        for number in range(draw(st.integers(1, most)))
    ]


CLUSTERS = st.lists(st.tuples(st.integers(1, 5), st.sampled_from([30.0, 100.0, 333.0])), min_size=2, max_size=5).filter(
    lambda kinds: sum(n for n, _ in kinds) >= 5
)
SHARED = {"scheduler": st.sampled_from(sorted(SCHEDULERS)), "placement": st.sampled_from(sorted(PLACEMENTS))}


def cluster_of(kinds: list[tuple[int, float]]) -> list[Server]:
    return [Server(f"s-{n}", devices, interface, 1e6) for n, (devices, interface) in enumerate(kinds)]


@settings(deadline=None, max_examples=60)
@given(traces(), CLUSTERS, SHARED["scheduler"], SHARED["placement"], st.sampled_from([0, traffic.SMALL]))
def test_every_end_is_that_of_a_simulator_that_looks_at_all_jobs_at_every_change(
    jobs: list[Job], kinds: list[tuple[int, float]], scheduler: str, placement: str, small: int
) -> None:
    cluster = cluster_of(kinds)
    with mock.patch.object(traffic, "SMALL", small):
        outcome = simulate(jobs, cluster, scheduler, placement, "maxmin", "each")
    assert [run.end_s for run in outcome.runs] == pytest.approx(ends(outcome, cluster), rel=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_every_end_is_that_of_a_simulator_in_small_steps(seed: int) -> None:
    step, draw = 0.005, random.Random(seed)
    jobs = [
        job(n, workers=draw.choice([2, 3]), iterations=8, arrival=n / 4, compute_s=draw.choice([0.25, 0.5]),
            network_s=draw.choice([0.25, 0.5]), volume_mb=draw.choice([25.0, 50.0]))
        for n in range(4)
    ]  # fmt: skip
    cluster = servers(4, 4, 4)
    outcome = simulate(jobs, cluster, "fcfs", "spread", "maxmin", "each")
    assert overlapping(outcome)
    # Of each phase a step may be lost at its end.
    assert [run.end_s for run in outcome.runs] == pytest.approx(ends(outcome, cluster, step), abs=step * (2 * 8 + 2))


def crowded(seed: int, count: int = 30) -> tuple[list[Job], list[Server]]:
    """Jobs of thousands of iterations that share four interfaces."""
    draw = random.Random(seed)
    jobs = [
        job(n, workers=draw.choice([1, 2, 4, 8]), iterations=draw.randint(200, 2000), arrival=draw.uniform(0, 3000),
            compute_s=draw.uniform(0.05, 1), network_s=draw.uniform(0.1, 1), volume_mb=draw.uniform(10, 500),
            loading_s=30.0)
        for n in range(count)
    ]  # fmt: skip
    return jobs, servers(8, 8, 8, 8, interface=463.0)


@pytest.mark.parametrize("seed", range(3))
def test_mean_paces_end_jobs_about_when_phases_do(seed: int) -> None:
    """The same jobs start together in both, so that queues cannot make much of little."""
    jobs, cluster = crowded(seed)
    jobs = [replace(one, arrival_s=one.number * 10.0) for one in jobs[:12]]
    cluster = [replace(server, devices=99) for server in cluster]
    exact, mean, none = (
        simulate(jobs, cluster, "fcfs", "spread", *how) for how in (("maxmin", "each"), ("maxmin", "mean"), ("none",))
    )
    assert mean.mean
    ratios = [a.end_s / b.end_s for a, b in zip(mean.runs, exact.runs, strict=True)]
    assert max(abs(ratio - 1) for ratio in ratios) < 0.15
    assert sum(ratios) / len(ratios) == pytest.approx(1, abs=0.04)
    assert sum(run.completion_s for run in none.runs) < 0.7 * sum(run.completion_s for run in exact.runs)


def test_jobs_that_never_wait_for_each_other_have_the_same_ends_either_way() -> None:
    jobs = [job(n, iterations=5, arrival=n / 3, network_s=4.0) for n in range(4)]
    cluster = servers(8, 8)
    each, mean = (simulate(jobs, cluster, placement="spread", phases=phases) for phases in ("each", "mean"))
    assert [run.end_s for run in each.runs] == pytest.approx([run.end_s for run in mean.runs])


def test_traces_of_very_many_iterations_are_run_by_mean_paces() -> None:
    assert not simulate([job(0, iterations=200_000)], TWO).mean
    assert simulate([job(0, iterations=300_000)], TWO).mean
    assert not simulate([job(0, workers=1, iterations=300_000)], TWO).mean


# ---- for any trace


def check_devices(outcome: Outcome, cluster: Sequence[Server]) -> None:
    """No server ever has more workers than devices."""
    for at in {run.start_s for run in outcome.runs}:
        used = [0] * len(cluster)
        for run in outcome.runs:
            if run.start_s <= at < run.end_s:
                for server, workers in run.placement:
                    used[server] += workers
        assert all(n <= server.devices for n, server in zip(used, cluster, strict=True))


@settings(deadline=None)
@given(traces(12), CLUSTERS, SHARED["scheduler"], SHARED["placement"], st.sampled_from(["each", "mean"]))
def test_every_job_runs_once_on_its_own_devices_and_no_faster_than_alone(
    jobs: list[Job], kinds: list[tuple[int, float]], scheduler: str, placement: str, phases: Phases
) -> None:
    cluster = cluster_of(kinds)
    outcome = simulate(jobs, cluster, scheduler, placement, "maxmin", phases)
    assert [run.job for run in outcome.runs] == jobs
    assert outcome.waiting == ()
    check_devices(outcome, cluster)
    for run in outcome.runs:
        assert sum(workers for _, workers in run.placement) == run.job.workers
        assert run.start_s >= run.job.arrival_s
        assert run.end_s - run.start_s >= run.job.alone_s * (1 - 1e-6)


@given(
    traces(), st.randoms(use_true_random=False), SHARED["scheduler"], SHARED["placement"],
    st.sampled_from(["each", "mean"]),
)  # fmt: skip
def test_the_order_of_jobs_means_nothing_and_a_second_run_is_the_same(
    jobs: list[Job], order: random.Random, scheduler: str, placement: str, phases: Phases
) -> None:
    shuffled = order.sample(jobs, len(jobs))
    first, second = (simulate(it, servers(4, 3, 2), scheduler, placement, "maxmin", phases) for it in (jobs, shuffled))
    assert first == second


@given(traces(), st.sampled_from([4.0, 0.5]))
def test_time_has_no_unit(jobs: list[Job], factor: float) -> None:
    """All times longer and all rates smaller: everything happens later by the same factor."""
    slower = [
        replace(one, arrival_s=one.arrival_s * factor, phases=replace(one.phases, **{
            key: getattr(one.phases, key) * factor for key in ("compute_s", "network_s", "loading_s")}))
        for one in jobs
    ]  # fmt: skip
    runs = simulate(jobs, servers(3, 3), "fcfs", "spread").runs
    later = simulate(slower, servers(3, 3, interface=100.0 / factor, inside=1e6 / factor), "fcfs", "spread").runs
    assert [run.end_s for run in later] == [run.end_s * factor for run in runs]


# ---- deadlock


@pytest.mark.parametrize(("scheduler", "others"), [("fcfs", ["2", "3"]), ("shortest", []), ("backfill", [])])
def test_jobs_that_can_never_start_are_told_with_those_behind_them(scheduler: str, others: list[str]) -> None:
    jobs = [job(0), job(1, workers=9, iterations=10_000), job(2, arrival=3.0), job(3, arrival=99.0)]
    cluster = servers(4, 4)
    outcome = simulate(jobs, cluster, scheduler, "pack")
    assert [one.name for one in outcome.waiting] == ["1", *others]
    told = deadlock(outcome, cluster, "pack")
    assert "trace.csv:3: gpu_workers: job 1 needs 9 devices at once; the cluster has 8" in told
    assert ("behind them in the queue: jobs 2, 3" in told) == bool(others)
    assert f"{len(outcome.waiting)} of 4 jobs" in told


def test_without_jobs_in_wait_there_is_no_deadlock() -> None:
    assert deadlock(simulate([job(0)], TWO), TWO, "colocate") == ""
