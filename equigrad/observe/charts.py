"""Curves as drawings: which points to keep, axes with sensible ticks, SVG paths. Knows numbers, not what they mean.

A plot is a unit square that the page stretches to any size. Lines are SVG paths in it, and labels are text that the
page places by percentage: neither needs a script, and text keeps its size on every screen.

A value is None where nothing was logged, and NaN or infinite where that was logged: each interrupts a line.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import TypeGuard

from equigrad.observe.text import compact, exponent

Value = float | None

WIDTH, HEIGHT = 4000, 1000
"""Resolution of paths: whole numbers that are finer than a screen."""


def is_finite(value: Value) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def thin(columns: Sequence[Sequence[Value]], buckets: int) -> list[int]:
    """Rows that stand for all rows of a table: in each bucket the smallest and the largest value of each column.

    So spikes stay, and so does one value per bucket that is not finite. A short table is kept whole.
    """
    rows = len(columns[0])
    if rows <= 4 * buckets:
        return list(range(rows))
    kept = {0, rows - 1}
    for low, high in pairwise(rows * b // buckets for b in range(buckets + 1)):
        for column in columns:
            drawn = [(value, i) for i in range(low, high) if is_finite(value := column[i])]
            if drawn:
                kept |= {min(drawn)[1], max(drawn)[1]}
            if len(drawn) < high - low:
                kept.add(next(i for i in range(low, high) if not is_finite(column[i])))
    return sorted(kept)


def smooth(values: Sequence[Value], reach: int, rows: Sequence[int]) -> list[Value]:
    """At each of ``rows``, the median of the value and its ``reach`` neighbours on either side; gaps stay gaps.

    Near the start, where a loss falls steeply, as few neighbours on the right as there are on the left; at the end the
    median of the last values. A mean would turn every spike into a plateau.
    """
    medians: list[Value] = []
    for i in rows:
        side = min(reach, i)
        near = [v for v in values[i - side : i + side + 1] if is_finite(v)]
        medians.append(statistics.median(near) if is_finite(values[i]) else None)
    return medians


@dataclass(frozen=True)
class Tick:
    """at: share of the axis, 0 (low end) to 1."""

    at: float
    text: str


@dataclass(frozen=True)
class Axis:
    """A range of values, linear or logarithmic, and its ticks."""

    low: float
    high: float
    log: bool = False
    ticks: tuple[Tick, ...] = ()

    def at(self, value: float) -> float:
        """Where a value lies: 0 is the low end and 1 the high one."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def linear_axis(values: Sequence[float], zero: bool = False, exponents: bool = False) -> Axis:
    """An axis from tick to tick around the values, and zero if asked; 0 to 1 if there are no values."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high == low:
        margin = abs(low) / 2 or 1.0
        low, high = low if zero else low - margin, high + margin
    step = _nice_step((high - low) / 4)
    first, last = math.floor(low / step + 1e-6), math.ceil(high / step - 1e-6)
    return _with_ticks(Axis(first * step, last * step), [i * step for i in range(first, last + 1)], exponents)


def log_axis(values: Sequence[float], exponents: bool = False) -> Axis:
    """A logarithmic axis around positive values."""
    low, high = min(values), max(values)
    margin = max((high / low) ** 0.05, 1.02)
    axis = Axis(low / margin, high * margin, log=True)
    decades = range(math.floor(math.log10(axis.low)), math.ceil(math.log10(axis.high)) + 1)
    for digits in ((1,), (1, 2, 5)):
        ticks = [n * 10.0**d for d in decades for n in digits if axis.low <= n * 10.0**d <= axis.high]
        if len(ticks) >= 3:
            return _with_ticks(axis, ticks[:: math.ceil(len(ticks) / 7)], exponents)
    step = _nice_step((axis.high - axis.low) / 4)
    multiples = range(math.ceil(axis.low / step), math.floor(axis.high / step) + 1)
    return _with_ticks(axis, [i * step for i in multiples], exponents)


def step_axis(last: int) -> Axis:
    """An axis of step numbers from 0 to exactly ``last``."""
    step = max(int(_nice_step(last / 5)), 1)
    return _with_ticks(Axis(0, max(last, 1)), range(0, last + 1, step))


def _nice_step(least: float) -> float:
    """The next of 1, 2, 5, 10 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(least)) if least else 0.0
    return next((n * power for n in (1, 2, 5) if n * power >= least * 0.999), 10 * power)


def _with_ticks(axis: Axis, values: Sequence[float], exponents: bool = False) -> Axis:
    text = exponent if exponents else compact
    labels = [[text(v, digits) for v in values] for digits in range(3, 16)]
    distinct = next((few for few in labels if len(set(few)) == len(few)), labels[0])
    return replace(axis, ticks=tuple(Tick(axis.at(v), label) for v, label in zip(values, distinct, strict=True)))


def _points(x: Axis, y: Axis, steps: Sequence[float], values: Sequence[Value]) -> Iterator[str | None]:
    """Path coordinates of each point, None where it cannot be drawn."""
    for step, value in zip(steps, values, strict=True):
        if is_finite(value) and (value > 0 or not y.log):
            yield f"{x.at(step) * WIDTH:.0f} {(1 - y.at(value)) * HEIGHT:.0f}"
        else:
            yield None


def line_path(x: Axis, y: Axis, steps: Sequence[float], values: Sequence[Value]) -> str:
    """An SVG path through the points, interrupted where one cannot be drawn. A lone point is a dot."""
    runs = (list(run) for drawn, run in groupby(_points(x, y, steps, values), bool) if drawn)
    return "".join(f"M{' '.join(filter(None, run))}{'h0' if len(run) == 1 else ''}" for run in runs)


def dots_path(x: Axis, y: Axis, steps: Sequence[float], values: Sequence[Value]) -> str:
    """An SVG path that is a dot at each point, given round line caps."""
    return "".join(f"M{point}h0" for point in _points(x, y, steps, values) if point)


def gaps_path(x: Axis, steps: Sequence[float], values: Sequence[Value]) -> str:
    """An SVG path with a mark on the step axis wherever a value was logged that is not finite."""
    bad = (s for s, v in zip(steps, values, strict=True) if v is not None and not math.isfinite(v))
    return "".join(f"M{x.at(step) * WIDTH:.0f} {HEIGHT}v-{HEIGHT // 12}" for step in bad)
