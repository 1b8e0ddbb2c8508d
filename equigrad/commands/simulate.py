"""``equigrad simulate``: runs a trace of jobs on a cluster that need not exist. In one process and without torch."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from equigrad.config.cluster import Server, load_cluster
from equigrad.errors import UserError
from equigrad.files import check_target, write_json
from equigrad.observe.text import duration
from equigrad.plan.cluster.figures import Figures, deadlock, figures, utilisation
from equigrad.plan.cluster.report import write_report
from equigrad.plan.cluster.simulation import Outcome, simulate
from equigrad.plan.cluster.trace import Job, read_measured, read_profiles, read_trace

BASELINES = ("none", "fixed-penalty")
COLUMNS = {"mean_s": "mean", "p99_s": "99th percentile", "makespan_s": "makespan"}


def main(arguments: argparse.Namespace) -> int:
    """Simulate, print what it amounts to, and write files where asked. ``UserError`` where jobs wait for ever."""
    targets = [Path(file) for file in (arguments.json, arguments.report) if file]
    for target in targets:
        check_target(target)
    servers = load_cluster(Path(arguments.cluster)).servers
    profiles = read_profiles(Path(arguments.profile), Path(arguments.network))
    jobs = read_trace(Path(arguments.trace), profiles, arguments.alone)
    measured = read_measured(Path(arguments.measured), jobs) if arguments.measured else None

    def run(sharing: Any) -> Outcome:
        return simulate(jobs, servers, arguments.scheduler, arguments.placement, sharing, arguments.phases)

    outcome = run(arguments.sharing)
    settings = " · ".join(
        [f"{len(jobs):,} jobs", f"{sum(server.devices for server in servers):,} devices on {len(servers):,} servers",
         arguments.scheduler, arguments.placement, arguments.sharing, *["mean paces"] * outcome.mean]
    )  # fmt: skip
    print(settings)
    stuck = deadlock(outcome, servers, arguments.placement)
    result = record(outcome, servers) | {"settings": _settings(arguments), "deadlock": stuck or None}
    notes = [stuck] if stuck else []
    if measured is not None and not stuck:
        rows = {
            "measured": _figures(jobs, [start + seconds for start, seconds in measured]),
            arguments.sharing: _of(outcome),
        }
        rows |= {name: _of(run(name)) for name in BASELINES if name not in rows}
        print(table(rows))
        result["comparison"] = {
            name: asdict(row) | {"errors": errors(row, rows["measured"])} for name, row in rows.items()
        }
        result["job_error"] = job_error(outcome, measured)
        print(f"running times job by job: off by {result['job_error']:.1%} on average")
    elif outcome.runs:
        print(table({"simulated": _of(outcome)}))
    if arguments.json:
        write_json(Path(arguments.json), result)
    if arguments.report:
        write_report(Path(arguments.report), Path(arguments.trace).name, settings, outcome, servers, notes)
    if stuck:
        raise UserError(stuck)
    return 0


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    keys = ("trace", "cluster", "profile", "network", "scheduler", "placement", "sharing", "alone", "phases")
    return {key: getattr(arguments, key) for key in keys}


def _figures(jobs: Sequence[Job], ends: Sequence[float]) -> Figures:
    return figures([(job.arrival_s, end) for job, end in zip(jobs, ends, strict=True)])


def _of(outcome: Outcome) -> Figures:
    return _figures([run.job for run in outcome.runs], [run.end_s for run in outcome.runs])


def errors(found: Figures, truth: Figures) -> dict[str, float]:
    """By figure, relative to the truth: 0.05 is 5 % too much."""
    return {key: value / getattr(truth, key) - 1 for key, value in asdict(found).items()}


def job_error(outcome: Outcome, measured: Sequence[tuple[float, float]]) -> float:
    """Mean over jobs of how far the time from start to end is off, either way, relative to the measured one.

    ``measured``: starts and such times, of all jobs.
    """
    return fmean(abs((run.end_s - run.start_s) / measured[run.job.number][1] - 1) for run in outcome.runs)


def table(rows: dict[str, Figures]) -> str:
    """Figures as lines, with errors where the first line is a measured run."""
    truth = rows.get("measured")
    lines = [f"{'seconds':<16}" + "".join(f"{name:>24}" for name in COLUMNS.values())]
    for name, row in rows.items():
        off = errors(row, truth) if truth and row is not truth else {}
        told = [f"{value:,.0f} " + (f"({off[key]:+.1%})" if off else f"({duration(value)})")
                for key, value in asdict(row).items()]  # fmt: skip
        lines.append(f"{name:<16}" + "".join(f"{text:>24}" for text in told))
    return "\n".join(lines)


def record(outcome: Outcome, servers: Sequence[Server]) -> dict[str, Any]:
    """The whole outcome as JSON values."""
    return {
        "figures": asdict(_of(outcome)) if outcome.runs else None,
        "phases": "mean" if outcome.mean else outcome.phases,
        "jobs": [
            {"job_id": run.job.name, "arrival_s": run.job.arrival_s, "start_s": run.start_s, "end_s": run.end_s,
             "alone_s": run.job.alone_s, "workers": {servers[n].name: workers for n, workers in run.placement}}
            for run in outcome.runs
        ],
        "waiting": [job.name for job in outcome.waiting],
        "servers": [
            {"name": server.name} | asdict(use)
            for server, use in zip(servers, utilisation(outcome, servers), strict=True)
        ],
    }  # fmt: skip
