"""What a run of a trace amounts to, simulated or measured, and why it did not end."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from equigrad.config.cluster import Server
from equigrad.plan.cluster.placement import PLACEMENTS
from equigrad.plan.cluster.simulation import Outcome
from equigrad.plan.cluster.trace import Job

NAMED = 10
"""Most jobs that a message names."""


@dataclass(frozen=True)
class Figures:
    """Seconds. mean_s, p99_s: of completion times, from arrival to end; makespan_s: from first arrival to last end."""

    mean_s: float
    p99_s: float
    makespan_s: float


def figures(spans: Sequence[tuple[float, float]]) -> Figures:
    """Of jobs' arrivals and ends; at least one. Percentiles lie on straight lines between order statistics."""
    times = [end - arrival for arrival, end in spans]
    p99 = statistics.quantiles(times, n=100, method="inclusive")[98] if len(times) > 1 else times[0]
    return Figures(statistics.fmean(times), p99, max(end for _, end in spans) - min(arrival for arrival, _ in spans))


@dataclass(frozen=True)
class Use:
    """Of a server between first arrival and last end, as shares of 1: its devices, and what its interface carries."""

    devices: float
    interface: float


def utilisation(outcome: Outcome, servers: Sequence[Server]) -> list[Use]:
    """Of each server. A device is used from a job's start to its end."""
    makespan = figures([(run.job.arrival_s, run.end_s) for run in outcome.runs]).makespan_s if outcome.runs else 0.0
    if not makespan:
        return [Use(0.0, 0.0) for _ in servers]
    seconds, volume = [0.0] * len(servers), [0.0] * len(servers)
    for run in outcome.runs:
        for server, workers in run.placement:
            seconds[server] += workers * (run.end_s - run.start_s)
            if len(run.placement) > 1:
                volume[server] += run.job.iterations * run.job.phases.volume_mb
    return [
        Use(seconds[n] / (server.devices * makespan), volume[n] / (server.interface_mb_s * makespan))
        for n, server in enumerate(servers)
    ]


def deadlock(outcome: Outcome, servers: Sequence[Server], placement: str) -> str:
    """Which jobs wait for ever, and why; "" if none does."""
    if not outcome.waiting:
        return ""
    devices = [server.devices for server in servers]
    never = [job for job in outcome.waiting if PLACEMENTS[placement](devices, devices, job.workers) is None]
    behind = [job for job in outcome.waiting if job not in never]
    when = max((run.end_s for run in outcome.runs), default=0.0)
    lines = [
        f"deadlock at {when:,.1f} s: nothing runs, nothing will arrive, and {len(outcome.waiting)} of"
        f" {len(outcome.waiting) + len(outcome.runs)} jobs wait for ever"
    ]
    lines += [
        f"{job.where}: gpu_workers: job {job.name} needs {job.workers} devices at once; the cluster has {sum(devices)}"
        for job in never[:NAMED]
    ]
    if len(never) > NAMED:
        lines.append(f"and {len(never) - NAMED} more that need too many")
    if behind:
        lines.append(f"behind them in the queue: {_names(behind)}")
    return "\n".join(lines)


def _names(jobs: Sequence[Job]) -> str:
    more = f" and {len(jobs) - NAMED} more" if len(jobs) > NAMED else ""
    return f"job{'s' * (len(jobs) > 1)} {', '.join(job.name for job in jobs[:NAMED])}{more}"
