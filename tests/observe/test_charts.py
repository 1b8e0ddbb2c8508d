"""Thinned curves keep their extremes, axes have ticks that people would choose, paths break where values do."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equigrad.observe.charts import (
    HEIGHT,
    WIDTH,
    dots_path,
    gaps_path,
    line_path,
    linear_axis,
    log_axis,
    smooth,
    step_axis,
    thin,
)
from equigrad.observe.text import compact, duration, exponent, memory

VALUES = st.one_of(st.none(), st.floats(width=32))


@given(st.lists(st.tuples(VALUES, VALUES), min_size=1, max_size=200), st.integers(1, 9))
def test_thinning_keeps_ends_extremes_and_every_kind_of_gap(rows: list[tuple[float | None, ...]], buckets: int) -> None:
    columns = list(zip(*rows, strict=True))
    kept = thin(columns, buckets)
    assert kept == sorted(set(kept))
    assert {0, len(rows) - 1} <= set(kept)
    assert len(kept) <= max(4 * buckets, 6 * buckets + 2)
    for column in columns:
        numbers = [v for v in column if v is not None and math.isfinite(v)]
        shown = [column[i] for i in kept]
        if numbers:
            assert {min(numbers), max(numbers)} <= set(shown)
        if len(numbers) < len(column):
            assert any(v is None or not math.isfinite(v) for v in shown)


def test_short_tables_are_kept_whole() -> None:
    assert thin([[1.0] * 40], 10) == list(range(40))
    assert thin([[]], 10) == []


def test_smoothing_takes_local_medians_and_leaves_spikes_out_and_gaps_in() -> None:
    values = [5.0, 1.0, 2.0, 3.0, 1e30, 4.0, math.nan, 6.0, None, 1.0, 3.0]
    assert smooth(values, 1, range(11)) == [5.0, 2.0, 2.0, 3.0, 4.0, (1e30 + 4) / 2, None, 6.0, None, 2.0, 2.0]
    assert smooth(values, 2, [2, 10]) == [3.0, 2.0]


@pytest.mark.parametrize(
    ("values", "zero", "labels"),
    [
        ([2.9, 8.7], False, ["2", "4", "6", "8", "10"]),
        ([3e-4, 3e-3], True, ["0", "1e-3", "2e-3", "3e-3"]),
        ([12_000, 12_900], True, ["0", "5k", "10k", "15k"]),
        ([-1.5, 0.5], False, ["-1.5", "-1", "-0.5", "0", "0.5"]),
        ([4.0], False, ["2", "3", "4", "5", "6"]),
        ([3.00011, 3.00019], False, ["3.0001", "3.00012", "3.00014", "3.00016", "3.00018", "3.0002"]),
        ([], False, ["0", "0.5", "1"]),
        ([0.0, 0.0], True, ["0", "0.5", "1"]),
    ],
)
def test_linear_ticks(values: list[float], zero: bool, labels: list[str]) -> None:
    axis = linear_axis(values, zero, exponents=max(values, default=1) == 3e-3)
    assert [tick.text for tick in axis.ticks] == labels
    assert (axis.ticks[0].at, axis.ticks[-1].at) == (pytest.approx(0), pytest.approx(1))


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([0.02, 70], ["0.1", "1", "10", "100"]),
        ([0.6, 25], ["0.5", "1", "2", "5", "10", "20"]),
        ([2.9, 8.7], ["4", "6", "8"]),
        ([2.0, 2.0], ["1.98", "2", "2.02", "2.04"]),
    ],
)
def test_log_ticks(values: list[float], labels: list[str]) -> None:
    assert [tick.text for tick in log_axis(values).ticks] == labels


@given(st.lists(st.floats(1e-30, 1e30), min_size=1, max_size=5), st.booleans())
def test_values_lie_on_their_axis(values: list[float], zero: bool) -> None:
    for axis in (linear_axis(values, zero), log_axis(values)):
        assert all(-1e-6 <= axis.at(v) <= 1 + 1e-6 for v in values)
        assert all(-1e-6 <= tick.at <= 1 + 1e-6 for tick in axis.ticks)
        assert len(axis.ticks) <= 9


@pytest.mark.parametrize(
    ("last", "labels"),
    [(0, ["0"]), (1, ["0", "1"]), (7, ["0", "2", "4", "6"]), (500, ["0", "100", "200", "300", "400", "500"])],
)
def test_steps_are_whole_numbers(last: int, labels: list[str]) -> None:
    assert [tick.text for tick in step_axis(last).ticks] == labels


def test_paths_break_at_gaps_and_mark_them() -> None:
    x, y = step_axis(4), linear_axis([0.0, 4.0])
    steps, values = [0, 1, 2, 3, 4], [0.0, 4.0, math.nan, 2.0, None]
    assert line_path(x, y, steps, values) == f"M0 {HEIGHT} {WIDTH // 4} 0M{WIDTH * 3 // 4} {HEIGHT // 2}h0"
    assert dots_path(x, y, steps, values).count("h0") == 3
    assert re.findall(r"M(\d+) ", gaps_path(x, steps, values)) == [str(WIDTH // 2)]
    assert line_path(x, log_axis([1.0, 4.0]), steps, values).startswith(f"M{WIDTH // 4} ")


def test_numbers_read_well() -> None:
    assert [compact(v) for v in (0, 999, 999.6, 12_345, 3.1e6, 2e9, 7e13, 1e20, 1e-5, math.inf, -1500)] == [
        *("0", "999", "1k", "12.3k", "3.1M", "2G", "70T", "1e20", "1e-5", "inf", "-1.5k")
    ]
    assert [exponent(v) for v in (3e-3, 2.5e-4, 0, 1)] == ["3e-3", "2.5e-4", "0", "1e0"]
    assert [duration(v) for v in (0.4, 59.6, 754, 3720, 273_600)] == ["0s", "1m00s", "12m34s", "1h02m", "3d04h"]
    assert [memory(v) for v in (812.4, 141_000)] == ["812 MB", "141.0 GB"]
