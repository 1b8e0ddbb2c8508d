"""One page of a simulated run: when each job waited and ran, and what was in use. It opens from a file, loads nothing
and needs no script."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import accumulate, pairwise
from math import ceil
from pathlib import Path
from typing import Any

from equigrad.config.cluster import Server
from equigrad.files import write_text
from equigrad.observe.charts import HEIGHT, WIDTH, Axis, line_path, linear_axis, thin
from equigrad.observe.text import duration
from equigrad.plan.cluster.figures import figures, utilisation
from equigrad.plan.cluster.simulation import Outcome, Run

MOST_ROWS = 800
"""Jobs on the timeline; of more, every n-th is drawn."""
BUCKETS = 500
"""Stretches of time for each of which a line keeps its smallest and largest value."""


@dataclass(frozen=True)
class Row:
    """A job on the timeline: its number, what is told on hover, and SVG paths of its phases."""

    told: str
    kind: str
    waiting: str
    loading: str
    iterating: str


@dataclass(frozen=True)
class Plot:
    """A line over time."""

    title: str
    unit: str
    axis: Axis
    line: str


def write_report(
    path: Path, title: str, settings: str, outcome: Outcome, servers: Sequence[Server], notes: Sequence[str] = ()
) -> None:
    """Write the page. ``settings``: what was simulated, in words; ``notes``: what a reader must know first."""
    from jinja2 import Environment

    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = files("equigrad.plan.cluster").joinpath("report_template.html").read_text(encoding="utf-8")
    shown = {"title": title, "settings": settings, "notes": notes, "height": HEIGHT, "width": WIDTH}
    write_text(path, page.from_string(template).render(shown | _contents(outcome, servers)))


def _contents(outcome: Outcome, servers: Sequence[Server]) -> dict[str, Any]:
    if not outcome.runs:
        return {"tiles": [], "rows": [], "plots": [], "servers": []}
    runs = outcome.runs
    found = figures([(run.job.arrival_s, run.end_s) for run in runs])
    used = utilisation(outcome, servers)
    total = sum(server.devices for server in servers)
    busy = sum(use.devices * server.devices for use, server in zip(used, servers, strict=True)) / total
    slowed = sum(run.end_s - run.start_s for run in runs) / sum(run.job.alone_s for run in runs)
    x = linear_axis([job.arrival_s for job in [*outcome.waiting, *(run.job for run in runs)]] + [r.end_s for r in runs])
    every = ceil(len(runs) / MOST_ROWS)
    in_use = [(run.start_s, run.job.workers) for run in runs] + [(run.end_s, -run.job.workers) for run in runs]
    queued = [(run.job.arrival_s, 1) for run in runs] + [(run.start_s, -1) for run in runs]
    queued += [(job.arrival_s, 1) for job in outcome.waiting]
    return {
        "tiles": [
            ("Mean completion time", duration(found.mean_s), "from arrival to end"),
            ("99th percentile", duration(found.p99_s), "of completion times"),
            ("Makespan", duration(found.makespan_s), "from first arrival to last end"),
            ("Devices in use", f"{busy:.1%}", f"of {total:,}, over the makespan"),
            ("Running over alone", f"{slowed:.3f}", "time of all jobs, loading included"),
            ("Jobs", f"{len(runs):,}", f"on {len(servers):,} servers"),
        ],
        "x": x,
        "every": every,
        "rows": [_row(run, number, x, servers) for number, run in enumerate(runs[::every])],
        "plots": [_plot("Devices in use", f"of {total:,}", in_use, x), _plot("Jobs that wait", "", queued, x)],
        "servers": [(server, use) for server, use in zip(servers, used, strict=True)],
    }


def _row(run: Run, number: int, x: Axis, servers: Sequence[Server]) -> Row:
    where = ", ".join(f"{servers[server].name} ({workers})" for server, workers in run.placement)
    job = run.job
    told = (
        f"job {job.name}: {job.workers} on {where}; waited {duration(run.start_s - job.arrival_s)},"
        f" ran {duration(run.end_s - run.start_s)} (alone {duration(job.alone_s)})"
    )
    loaded = run.start_s + job.phases.loading_s
    times = (job.arrival_s, run.start_s, loaded, run.end_s)
    waiting, loading, iterating = (_bar(x, number, *span) for span in pairwise(times))
    return Row(told, "several" if len(run.placement) > 1 else "one", waiting, loading, iterating)


def _bar(x: Axis, row: int, start: float, end: float) -> str:
    return f"M{x.at(start) * WIDTH:.0f} {row + 0.5}H{x.at(end) * WIDTH:.0f}"


def _plot(title: str, unit: str, changes: Sequence[tuple[float, int]], x: Axis) -> Plot:
    """The sum of all changes so far, as steps."""
    at_once = Counter[float]()
    for time, change in changes:
        at_once[time] += change
    times = sorted(at_once)
    values = [float(value) for value in accumulate(at_once[time] for time in times)]
    kept = thin([values], BUCKETS)
    corners = [(times[kept[0]], values[kept[0]])]
    for before, after in pairwise(kept):
        corners += [(times[after], values[before]), (times[after], values[after])]
    axis = linear_axis(values, zero=True)
    return Plot(title, unit, axis, line_path(x, axis, [at for at, _ in corners], [value for _, value in corners]))
