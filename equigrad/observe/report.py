"""``report.html``: a run on one self-contained page that opens from a file and loads nothing.

Reads what a run folder holds and knows no more about the run: ``metrics.jsonl``, ``rollouts.jsonl``, ``summary.json``
(absent until the run has finished), ``job.toml`` and ``sample.json`` ({"prompt": ..., "text": what the model added}).
Each may be absent.
"""

import json
import math
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from equigrad.errors import UserError
from equigrad.files import in_one_piece
from equigrad.observe.charts import (
    Axis,
    Value,
    dots_path,
    gaps_path,
    is_finite,
    line_path,
    linear_axis,
    log_axis,
    smooth,
    step_axis,
    thin,
)
from equigrad.observe.metrics import read_metrics
from equigrad.observe.text import compact, duration, loss_text

BUCKETS = 400
"""A longer run is thinned to a few points for each of so many stretches of its steps."""
GROUPS = 100
"""So many groups of rollouts are shown, of all steps alike."""
FEW = 60
"""Up to so many points of a line are drawn as dots too."""

Table = dict[str, list[Any]]
"""Columns by key, all of one length: ``step``, and values."""


@dataclass(frozen=True)
class Curve:
    """One line: its column, its name in the legend, and its style: ``plain``, ``thin``, ``bold`` or ``dotted``."""

    key: str
    label: str
    style: str = "plain"


@dataclass(frozen=True)
class Chart:
    """What a chart shows.

    format: of the read-out: ``loss``, ``exponent``, ``digits`` or ``count``
    zero:   whether the axis shows zero
    log:    whether there may be a logarithmic scale to switch to
    """

    key: str
    title: str
    unit: str
    curves: tuple[Curve, ...]
    format: str
    zero: bool = True
    log: bool = False


def _noisy(key: str) -> tuple[Curve, Curve]:
    return Curve(key, "raw", "thin"), Curve(f"{key}_smooth", "smoothed", "bold")


HELD_OUT = Curve("held_out_loss", "held out", "dotted")
CHARTS = (
    Chart("loss", "Loss", "nats per token", (*_noisy("loss"), HELD_OUT), "loss", zero=False, log=True),
    Chart("lr", "Learning rate", "", (Curve("lr", "rate"),), "exponent"),
    Chart("grad_norm", "Gradient norm", "L2", _noisy("grad_norm"), "digits", log=True),
    Chart("speed", "Throughput", "tokens per second", _noisy("tokens_per_second"), "count"),
)
POLICY_CHARTS = (
    Chart("reward", "Reward", "", (*_noisy("reward"), Curve("held_out_reward", "held out", "dotted")), "digits"),
    Chart("response", "Answers", "tokens", _noisy("response_tokens"), "digits"),
    Chart("entropy", "Entropy", "nats per token", _noisy("entropy"), "digits"),
    Chart(
        "shares",
        "Shares",
        "",
        (Curve("truncated", "cut off"), Curve("zero_spread", "groups alike"), Curve("clip_share", "clipped")),
        "digits",
    ),
    Chart("apart", "Sampling against training", "nats", _noisy("logprob_diff_max"), "exponent", log=True),
)
"""Beside those, of reinforcement learning."""
STEP_KEYS = ("loss", "lr", "grad_norm", "tokens_per_second")
POLICY_KEYS = ("reward", "response_tokens", "entropy", "truncated", "zero_spread", "clip_share", "logprob_diff_max")
EVAL_KEYS = ("held_out_loss", "held_out_reward")
FIGURES = ("steps", "tokens", "tokens_per_second", "mfu", "wall_seconds", "held_out_loss", "held_out_bits_per_byte",
           "held_out_reward", "held_out_solved")  # fmt: skip
"""What ``summary.json`` says in numbers, as far as it is shown."""


def write_report(run_folder: Path) -> Path:
    """Write ``report.html`` into the run folder and return its path. Also of a run that has not finished, or not begun.

    Raises ``UserError`` where a file of the run cannot be read.
    """
    from jinja2 import Environment

    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    template = files("equigrad.observe").joinpath("report_template.html").read_text(encoding="utf-8")
    html = page.from_string(template).render(_contents(run_folder))
    path = run_folder / "report.html"
    with in_one_piece(path) as aside:
        aside.write_text(html, encoding="utf-8", errors="backslashreplace")  # a model may emit half a surrogate pair
    return path


def _contents(folder: Path) -> dict[str, Any]:
    """Everything the template shows."""
    metrics = folder / "metrics.jsonl"
    records = read_metrics(metrics)
    for record in records:
        _check_numbers(record, _LOGGED, f"{metrics}: step {record['step']}")
    steps = [r for r in records if r.get("kind") == "step"]
    evals = [r for r in records if r.get("kind") == "eval"]
    summary, sample, job = _json(folder / "summary.json"), _json(folder / "sample.json"), _toml(folder / "job.toml")
    _check_numbers(summary, FIGURES, str(folder / "summary.json"))
    settings, known = tomllib.loads(job), {key: value for key, value in summary.items() if value is not None}
    reach = min(max(len(steps) // 50, 1), 500)
    groups = read_metrics(folder / "rollouts.jsonl")
    policy = any("reward" in record for record in steps)
    keys = STEP_KEYS + POLICY_KEYS if policy else STEP_KEYS
    tables = {"steps": _table(steps, keys, reach), "evals": _table(evals, EVAL_KEYS)}
    x = step_axis(max((int(r["step"]) for r in steps + evals), default=0))
    return {
        "name": settings.get("name", folder.resolve().name),
        "notes": _notes(steps, finished=bool(summary)),
        "tiles": _tiles(_figures(steps, evals) | known, settings.get("train", {}).get("steps")),
        "x": x,
        "plots": [
            _plot(chart, x, tables) for chart in (POLICY_CHARTS[:1] + CHARTS + POLICY_CHARTS[1:] if policy else CHARTS)
        ],
        "groups": [groups[len(groups) * n // GROUPS] for n in range(GROUPS)] if len(groups) > GROUPS else groups,
        "window": 2 * reach + 1,
        "data": {name: {k: list(map(_json_value, c)) for k, c in table.items()} for name, table in tables.items()},
        "job": job,
        "sample": {key: visible(str(text)) for key, text in sample.items()},
    }


_LOGGED = (*STEP_KEYS, *POLICY_KEYS, *EVAL_KEYS, "held_out_bits_per_byte", "total_tokens", "elapsed", "mfu")


def _check_numbers(values: dict[str, Any], keys: Sequence[str], where: str) -> None:
    """``UserError`` unless each of these keys is a number, null or absent."""
    for key in keys:
        value = values.get(key)
        if not isinstance(value, int | float | None):
            raise UserError(f"{where}: {key} must be a number, not {type(value).__name__}")


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: not a JSON object: {error}") from None


def _toml(path: Path) -> str:
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None
    return text


def _table(records: Sequence[dict[str, Any]], keys: Sequence[str], reach: int = 0) -> Table:
    """The columns ``step`` and ``keys`` of the records, thinned.

    With ``reach`` there is a ``_smooth`` column for each as well, of medians over all records.
    """
    columns: Table = {key: [r.get(key) for r in records] for key in keys}
    rows = thin(list(columns.values()), BUCKETS)
    table: Table = {"step": [records[i]["step"] for i in rows]}
    for key, column in columns.items():
        table[key] = [column[i] for i in rows]
        if reach:
            table[f"{key}_smooth"] = smooth(column, reach, rows)
    return table


def _json_value(value: Value) -> float | str | None:
    return float(f"{value:.7g}") if is_finite(value) else None if value is None else str(value)


def visible(text: str) -> str:
    """Control characters as their pictures, so that what a model emits neither vanishes nor breaks the page."""
    return "".join(chr(0x2400 + ord(c)) if c < " " and c not in "\n\t" else c for c in text)


def _notes(steps: Sequence[dict[str, Any]], finished: bool) -> list[str]:
    """What a reader must know before the figures."""
    notes = []
    if not steps:
        notes.append("No step has been logged yet.")
    elif not finished:
        notes.append("The run has not finished (there is no summary.json): figures are those of its last logged step.")
    if bad := sum(any(r.get(k) is not None and not math.isfinite(r[k]) for k in STEP_KEYS) for r in steps):
        subject = "1 logged step has values that are" if bad == 1 else f"{bad} logged steps have values that are"
        notes.append(f"{subject} not finite; marks at the foot of a chart show where.")
    return notes


def _figures(steps: Sequence[dict[str, Any]], evals: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the metrics alone say about the run, under the names that ``summary.json`` uses."""
    last, evaluated = (steps[-1] if steps else {}), (evals[-1] if evals else {})
    known = {
        "steps": last.get("step"),
        "tokens": last.get("total_tokens"),
        "wall_seconds": last.get("elapsed"),
        "held_out_loss": evaluated.get("held_out_loss"),
        "held_out_reward": evaluated.get("held_out_reward"),
        "held_out_solved": evaluated.get("held_out_solved"),
        "held_out_bits_per_byte": evaluated.get("held_out_bits_per_byte"),
    }
    for key in ("tokens_per_second", "mfu"):
        # Over the time of the steps, as the summary counts tokens per second, so that the two go together.
        told = [(r[key], r.get("step_seconds") or 1.0) for r in steps if is_finite(r.get(key))]
        known[key] = sum(v * s for v, s in told) / sum(s for _, s in told) if told else None
    return known


@dataclass(frozen=True)
class Tile:
    """A key figure. ``full`` is the whole value where ``value`` is shortened: shown on hover, copied on click."""

    label: str
    value: str
    note: str = ""
    full: str = ""


def _tiles(figures: dict[str, Any], planned: int | None) -> list[Tile]:
    """A tile for every key figure that is known."""
    loss, mfu, digest = figures.get("held_out_loss"), figures.get("mfu"), figures.get("parameter_digest")
    perplexity = f"perplexity {compact(math.exp(loss))}" if is_finite(loss) and loss < 100 else ""
    tiles: list[tuple[str, str, Callable[[Any], str], str]] = [
        ("Held-out loss", "held_out_loss", loss_text, perplexity),
        ("Held-out reward", "held_out_reward", loss_text, _solved(figures.get("held_out_solved"))),
        ("Bits per byte", "held_out_bits_per_byte", loss_text, "held out"),
        ("Tokens", "tokens", compact, "trained on"),
        ("Tokens per second", "tokens_per_second", compact, "" if mfu is None else f"{mfu:.0%} of peak"),
        ("Wall time", "wall_seconds", duration, ""),
        ("Steps", "steps", "{:,}".format, "" if planned is None else f"of {planned:,}"),
    ]
    shown = [Tile(name, text(figures[key]), note) for name, key, text, note in tiles if figures.get(key) is not None]
    return shown if digest is None else [*shown, Tile("Parameter digest", digest[:12], "SHA-256", full=digest)]


def _solved(share: float | None) -> str:
    return "" if share is None else f"{share:.1%} solved"


@dataclass(frozen=True)
class Drawing:
    """A curve as SVG paths: a line, and dots of some width in pixels."""

    curve: Curve
    line: str
    dots: str
    dot_width: int


@dataclass(frozen=True)
class Plot:
    """A chart with its curves drawn: on a linear scale, and where the values allow it on a logarithmic one."""

    chart: Chart
    curves: list[Curve]
    scales: list[tuple[Axis, list[Drawing]]]
    gaps: str


def _plot(chart: Chart, x: Axis, tables: dict[str, Table]) -> Plot:
    columns = {}
    for curve in chart.curves:
        table = next(t for t in tables.values() if curve.key in t)
        if any(v is not None for v in table[curve.key]):
            columns[curve] = (table["step"], table[curve.key])
    values = [v for _, column in columns.values() for v in column if is_finite(v)]
    exponents = chart.format == "exponent"
    axes = [linear_axis(values, chart.zero, exponents)]
    if chart.log and values and min(values) > 0:
        axes.append(log_axis(values, exponents))
    scales = [(y, [_draw(curve, x, y, *points) for curve, points in columns.items()]) for y in axes]
    return Plot(chart, list(columns), scales, "".join(gaps_path(x, *points) for points in columns.values()))


def _draw(curve: Curve, x: Axis, y: Axis, steps: list[Any], values: list[Value]) -> Drawing:
    few, dotted = len(values) <= FEW, curve.style == "dotted"
    dots = dots_path(x, y, steps, values) if dotted or (few and curve.style != "bold") else ""
    return Drawing(curve, line_path(x, y, steps, values), dots, dot_width=8 if few and dotted else 5)
