"""Invariants of the schedule, on any sample lengths, lanes and caps."""

import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equigrad.errors import UserError
from equigrad.schedule.packing import plan

SAMPLES = st.lists(st.integers(1, 50), max_size=60)
KINDS = st.sampled_from(["best_fit", "first_fit"])


@given(SAMPLES, st.integers(1, 9), st.integers(50, 120), KINDS)
def test_every_sample_is_in_exactly_one_row_that_respects_the_cap(
    lengths: list[int], lanes: int, cap: int, kind: str
) -> None:
    schedule = plan(lengths, lengths, lanes, cap, kind)
    rows = [row for round_ in schedule.rounds for row in round_]
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= cap for row in rows)
    assert all(len(round_) == lanes for round_ in schedule.rounds)


@given(SAMPLES, st.integers(1, 9), st.integers(50, 120), KINDS)
def test_rows_are_empty_only_where_no_row_can_be_split(lengths: list[int], lanes: int, cap: int, kind: str) -> None:
    rows = [row for round_ in plan(lengths, lengths, lanes, cap, kind).rounds for row in round_]
    if () in rows:
        assert all(len(row) <= 1 for row in rows)
        assert rows.count(()) < lanes


@given(SAMPLES, st.integers(50, 120), KINDS)
def test_one_lane_needs_less_than_twice_the_fewest_rows(lengths: list[int], cap: int, kind: str) -> None:
    rounds = len(plan(lengths, lengths, 1, cap, kind).rounds)
    fewest = -(-sum(lengths) // cap)
    # Any two rows of a first-fit or best-fit packing are together fuller than one cap.
    assert rounds <= max(fewest, 2 * fewest - 1, 0) or rounds <= 1


@given(SAMPLES, st.integers(1, 5))
def test_a_round_is_made_of_rows_of_neighbouring_cost(lengths: list[int], lanes: int) -> None:
    costs = [n * n for n in lengths]
    rounds = [[sum(costs[i] for i in row) for row in round_] for round_ in plan(lengths, costs, lanes, 64).rounds]
    assert all(min(earlier) >= max(later) for earlier, later in pairwise(rounds))


def test_a_split_row_falls_into_halves_of_about_equal_cost() -> None:
    lengths = [400, 300, 250, 200, 100, 100, 50, 40, 30, 20, 10, 5]
    ((a, b),) = plan(lengths, lengths, 2, 2000).rounds
    assert abs(sum(lengths[i] for i in a) - sum(lengths[i] for i in b)) <= 10


def test_equal_lengths_lie_side_by_side_in_a_row() -> None:
    (row,) = plan([3, 9, 3, 9, 5], [1.0] * 5, 1, 100).lane(0)
    assert [[3, 9, 3, 9, 5][i] for i in row] == [9, 9, 5, 3, 3]


def test_the_schedule_is_the_same_in_every_process() -> None:
    code = "from equigrad.schedule.packing import plan; print(plan([7, 5, 3, 9, 9, 1], [1.0] * 6, 2, 12).digest)"
    digests = {subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout for _ in range(2)}
    assert digests == {plan([7, 5, 3, 9, 9, 1], [1.0] * 6, 2, 12).digest + "\n"}


def test_a_sample_that_fits_no_row_is_named() -> None:
    with pytest.raises(UserError, match="sample 1 has 9 tokens"):
        plan([3, 9], [1.0, 1.0], 1, 8)


def test_lanes_get_about_the_same_work_from_a_heavy_tail() -> None:
    lengths = [1 + 4000 // (1 + i % 97) for i in range(3000)]
    costs = [float(n * (3000 + n)) for n in lengths]
    for lanes in (8, 64):
        schedule = plan(lengths, costs, lanes, 8192)
        work = [sum(costs[i] for row in schedule.lane(lane) for i in row) for lane in range(lanes)]
        assert max(work) < 1.12 * sum(work) / lanes
