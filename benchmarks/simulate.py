"""The cluster simulator: errors against a measured run of 60 jobs on 32 GPUs, beside two baselines, and the time that
10,000 jobs take.

Nothing is fitted to the measured run. It was placed by colocation, first come first served; other placements are
simulated too, to show what they would change. The 10,000 jobs are drawn from the 60, in random order, and arrive at
random so that nine tenths of the devices would be asked for.

    python benchmarks/simulate.py
"""

import random
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

from common import arguments, show, spread, write

from equigrad.commands.simulate import errors, job_error, table
from equigrad.config.cluster import Server, load_cluster
from equigrad.plan.cluster.figures import figures
from equigrad.plan.cluster.placement import PLACEMENTS
from equigrad.plan.cluster.scheduling import SCHEDULERS
from equigrad.plan.cluster.simulation import Outcome, Sharing, simulate
from equigrad.plan.cluster.trace import Job, Timing, read_measured, read_profiles, read_trace

REPOSITORY = Path(__file__).parents[1]
OPTIONS = arguments("simulate", __doc__ or "", rounds=1, jobs=10_000,
                    data=str(REPOSITORY / "benchmarks" / "data" / "cluster_jobs"))  # fmt: skip
DATA = Path(OPTIONS.data)
SERVERS = load_cluster(REPOSITORY / "docs" / "cluster.toml").servers


def jobs_of(timing: Timing) -> list[Job]:
    profiles = read_profiles(DATA / "profile_v100.csv", DATA / "network_v100.csv")
    return read_trace(DATA / "trace_32gpu.csv", profiles, timing)


def of(outcome: Outcome) -> Any:
    return figures([(run.job.arrival_s, run.end_s) for run in outcome.runs])


def validation(timing: Timing) -> dict[str, Any]:
    """By placement and way of sharing: figures, their errors, and how far running times are off."""
    jobs = jobs_of(timing)
    measured = read_measured(DATA / "measured_32gpu_colocate.csv", jobs)
    ends = [start + seconds for start, seconds in measured]
    truth = figures([(job.arrival_s, end) for job, end in zip(jobs, ends, strict=True)])
    found: dict[str, Any] = {"measured": asdict(truth)}
    for placement in PLACEMENTS:
        outcomes = {sharing: simulate(jobs, SERVERS, "fcfs", placement, sharing) for sharing in get_args(Sharing)}
        rows = {sharing: of(outcome) for sharing, outcome in outcomes.items()}
        print(f"\nalone as the {timing} tells, fcfs, {placement}")
        print(table({"measured": truth} | rows))
        found[placement] = {
            sharing: asdict(rows[sharing])
            | {"errors": errors(rows[sharing], truth), "job_error": job_error(outcome, measured)}
            for sharing, outcome in outcomes.items()
        }
        print(f"running times job by job: off by {found[placement]['maxmin']['job_error']:.1%} on average")
    return found


def approximation(scale: int, count: int) -> dict[str, Any]:
    """What mean paces differ in from every phase gone through, with everything spread: figures, and running times."""
    servers = SERVERS * scale
    jobs = many(count, sum(server.devices for server in servers))
    each, mean = (simulate(jobs, servers, "fcfs", "spread", "maxmin", phases) for phases in ("each", "mean"))
    name = f"{count} jobs, {len(servers)} servers"
    found = errors(of(mean), of(each)) | {
        "job_error": job_error(mean, [(run.start_s, run.end_s - run.start_s) for run in each.runs])
    }
    print(f"{name}, spread: mean paces off every phase by", {key: f"{value:+.1%}" for key, value in found.items()})
    return {name: found}


def many(count: int, devices: int) -> list[Job]:
    """Jobs drawn from the trace."""
    draw, kinds = random.Random(0), jobs_of("trace")
    chosen = [draw.choice(kinds) for _ in range(count)]
    gap = sum(job.workers * job.alone_s for job in chosen) / (0.9 * devices * count)
    arrivals = sorted(draw.uniform(0, gap * count) for _ in chosen)
    return [
        replace(job, number=number, name=str(number), arrival_s=arrival)
        for number, (job, arrival) in enumerate(zip(chosen, arrivals, strict=True))
    ]


def speed(scale: int, schedulers: Sequence[str]) -> dict[str, Any]:
    """CPU seconds (there is one thread) for many jobs on ``scale`` times the servers, by placement and scheduler."""
    servers: list[Server] = SERVERS * scale
    jobs = many(OPTIONS.jobs, sum(server.devices for server in servers))
    found: dict[str, Any] = {}
    for placement in PLACEMENTS:
        for scheduler in schedulers:
            seconds = []
            for _ in range(OPTIONS.rounds):
                began = time.process_time()
                simulate(jobs, servers, scheduler, placement)
                seconds.append(time.process_time() - began)
            name = f"{len(jobs):,} jobs, {len(servers)} servers, {placement}, {scheduler}"
            found[name] = spread(seconds)
            show(f"{name}: CPU seconds", found[name], 1)
    return found


def main() -> None:
    result = {
        "validation": {timing: validation(timing) for timing in get_args(Timing)},
        "mean_paces": approximation(1, 60) | approximation(1, 400) | approximation(4, 60),
        "cpu_seconds": speed(1, list(SCHEDULERS)) | speed(8, ["fcfs"]),
    }
    write(OPTIONS.json, result)


if __name__ == "__main__":
    main()
