"""Jobs and what is known of them: traces, profiles and measured runs, read from CSV files. Knows no cluster.

Every error names file, line and column. The order of rows means nothing: jobs are sorted by arrival and name.
"""

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeAlias

from equigrad.errors import UserError

LEAST, MOST = 1e-6, 1e10
"""Of any number in a file that is not 0. Three centuries in microseconds are as fine as a float64 can tell apart."""

Timing: TypeAlias = Literal["trace", "profile"]
"""Whose word counts for how long a job takes alone."""


@dataclass(frozen=True)
class Profile:
    """A model on some number of workers, alone.

    compute_s: seconds of an iteration in which it computes
    network_s: seconds of an iteration in which it communicates
    loading_s: seconds before the first iteration
    volume_mb: MB that each worker sends to the next one of the ring in an iteration
    """

    compute_s: float
    network_s: float
    loading_s: float
    volume_mb: float


Profiles: TypeAlias = Mapping[tuple[str, int], Profile]
"""By model and workers."""


@dataclass(frozen=True)
class Job:
    """Of a trace; ``number`` is its place among all jobs by arrival and name. Phases are those of the job alone.

    Example: ``Job(0, "7", "trace.csv:9", 0.0, 4, 1000, Profile(0.2, 0.4, 60.0, 143.0))`` wants four devices, loads for
    a minute, and then computes 0.2 s and communicates 0.4 s, a thousand times.
    """

    number: int
    name: str
    where: str
    arrival_s: float
    workers: int
    iterations: int
    phases: Profile

    @property
    def alone_s(self) -> float:
        """Seconds from its start to its end where it has all for itself."""
        return self.phases.loading_s + self.iterations * (self.phases.compute_s + self.phases.network_s)


def read_profiles(profile: Path, network: Path) -> dict[tuple[str, int], Profile]:
    """Profiles by model and workers.

    ``profile`` has the columns model, workers, compute_s, network_s and loading_s; ``network`` has model, workers and
    volume_mb, for more than one worker. Other columns are left alone.
    """
    volumes: dict[tuple[str, int], float] = {}
    for row in _rows(network, "network file", ("model", "workers", "volume_mb")):
        key = row.text("model"), row.whole("workers")
        row.once("model", key, volumes)
        volumes[key] = row.number("volume_mb")
    found: dict[tuple[str, int], Profile] = {}
    for row in _rows(profile, "profile", ("model", "workers", "compute_s", "network_s", "loading_s")):
        key = model, workers = row.text("model"), row.whole("workers")
        row.once("model", key, found)
        if workers > 1 and key not in volumes:
            row.fail("workers", f"{network} has no row for {model} on {workers} workers")
        compute, communicate = row.number("compute_s"), row.number("network_s")
        volume = volumes.get(key, 0.0) if workers > 1 else 0.0
        if volume and not communicate:
            row.fail("network_s", f"0 seconds for the {volume:g} MB that {network} tells")
        if not compute + communicate:
            row.fail("compute_s", "an iteration that takes no time at all")
        found[key] = Profile(compute, communicate, row.number("loading_s"), volume)
    return found


def read_trace(path: Path, profiles: Profiles, timing: Timing = "trace") -> list[Job]:
    """The jobs of a trace, by arrival and name.

    Its columns: job_id, model, arrival_time, num_iteration, gpu_workers, and with ``timing`` "trace" duration too. Then
    an iteration takes (duration - loading_s) / num_iteration where that is positive, and the profile tells which part
    of it is computation; a duration that is shorter than loading says nothing of iterations, and theirs is the
    profile's.

    Raises ``UserError`` where a job's model and workers are in no profile, and where there are no jobs.
    """
    columns = ["job_id", "model", "arrival_time", "num_iteration", "gpu_workers", *["duration"] * (timing == "trace")]
    rows: dict[str, tuple[float, _Row]] = {}
    for row in _rows(path, "trace", columns):
        name = row.text("job_id")
        row.once("job_id", name, rows)
        rows[name] = row.number("arrival_time"), row
    if not rows:
        raise UserError(f"{path}: no jobs")
    ordered = sorted(rows, key=lambda name: (rows[name][0], _natural(name)))
    return [_job(number, name, *rows[name], profiles, timing) for number, name in enumerate(ordered)]


def _job(number: int, name: str, arrival: float, row: "_Row", profiles: Profiles, timing: Timing) -> Job:
    model, workers, iterations = row.text("model"), row.whole("gpu_workers"), row.whole("num_iteration")
    if "gpu_per_worker" in row.values and row.whole("gpu_per_worker") != 1:
        row.fail("gpu_per_worker", f"{row.whole('gpu_per_worker')}, but a worker has one device here")
    phases = profiles.get((model, workers))
    if phases is None:
        known = sorted(n for m, n in profiles if m == model)
        hint = f"; there is {model} on {', '.join(map(str, known))}" if known else ""
        row.fail("gpu_workers" if known else "model", f"no profile of {model} on {workers} workers{hint}")
    if timing == "trace":
        told = (row.number("duration") - phases.loading_s) / (iterations * (phases.compute_s + phases.network_s))
        pace = told if told > 0 else 1.0
        phases = Profile(phases.compute_s * pace, phases.network_s * pace, phases.loading_s, phases.volume_mb)
    return Job(number, name, row.where, arrival, workers, iterations, phases)


def read_measured(path: Path, jobs: Sequence[Job]) -> list[tuple[float, float]]:
    """When each of the jobs really started, and how long it ran from then to its end, in seconds, as ``jobs`` are
    ordered.

    Columns: job_id, start_s on the trace's clock, training_s. Raises ``UserError`` unless the file has exactly the
    trace's jobs, and none ends before it arrives.
    """
    arrivals = {job.name: job.arrival_s for job in jobs}
    spans: dict[str, tuple[float, float]] = {}
    for row in _rows(path, "measured run", ("job_id", "start_s", "training_s")):
        name = row.text("job_id")
        row.once("job_id", name, spans)
        start, seconds = spans[name] = row.number("start_s"), row.number("training_s")
        if not seconds:
            row.fail("training_s", "0 is not more than 0")
        if start + seconds <= arrivals.get(name, 0.0):
            row.fail("start_s", f"job {name} ends at {start + seconds:g}, but arrives at {arrivals[name]:g}")
    for missing in (job for job in jobs if job.name not in spans):
        raise UserError(f"{path}: job_id: no row for job {missing.name} ({missing.where})")
    if len(spans) > len(jobs):
        raise UserError(f"{path}: job_id: {min(spans.keys() - {job.name for job in jobs})} is no job of the trace")
    return [spans[job.name] for job in jobs]


def _natural(name: str) -> tuple[bool, int, str, str]:
    """Sorts 9 before 10, and numbers before words."""
    number = name.isascii() and name.isdecimal()
    digits = name.lstrip("0") if number else ""
    return not number, len(digits), digits, name


@dataclass(frozen=True)
class _Row:
    """A line of a CSV file, by column."""

    where: str
    values: Mapping[str, str]

    def fail(self, column: str, message: str) -> NoReturn:
        raise UserError(f"{self.where}: {column}: {message}")

    def once(self, column: str, key: Any, seen: Mapping[Any, object]) -> None:
        """``UserError`` where there was a row of this key before."""
        if key in seen:
            name = key if isinstance(key, str) else "{} on {} workers".format(*key)
            self.fail(column, f"a second row for {name}")

    def text(self, column: str) -> str:
        """What is written there; never empty."""
        value = self.values[column].strip()
        if not value:
            self.fail(column, "nothing is written there")
        return value

    def number(self, column: str) -> float:
        """0, or a number from ``LEAST`` to ``MOST``."""
        text = self.text(column)
        try:
            value = float(text)
        except ValueError:
            self.fail(column, f"{text!r} is not a number")
        if value and not LEAST <= value <= MOST:  # not a number is not, either
            self.fail(column, f"{text} is neither 0 nor from {LEAST:g} to {MOST:g}")
        return value

    def whole(self, column: str) -> int:
        """A whole number from 1 to ``MOST``."""
        value = self.number(column)
        if value < 1 or value != math.floor(value):
            self.fail(column, f"{self.text(column)} is not a whole number from 1 on")
        return int(value)


def _rows(path: Path, what: str, columns: Sequence[str]) -> Iterator[_Row]:
    """Lines of a CSV file that has these columns, and perhaps others."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            header = [name.strip() for name in next(reader, [])]
            for column in columns:
                if header.count(column) != 1:
                    number = "no" if column not in header else "more than one"
                    raise UserError(f"{path}:1: {number} column {column}; a {what} has {', '.join(columns)}")
            for values in reader:
                if not values:
                    continue
                where = f"{path}:{reader.line_num}"
                if len(values) != len(header):
                    raise UserError(f"{where}: {len(values)} values for {len(header)} columns")
                yield _Row(where, dict(zip(header, values, strict=True)))
    except FileNotFoundError:
        raise UserError(f"no {what} at {path}") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"cannot read {what} {path}: {error}") from None
