"""Invariants of the schedule, on any sample lengths, lanes and caps."""

import subprocess
import sys
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equigrad.data.samples import SampleRef
from equigrad.errors import UserError
from equigrad.schedule import packing
from equigrad.schedule.packing import Schedule, plan
from tests.jobs import refs

SAMPLES = st.lists(st.integers(1, 50), max_size=60)
KNOWN = st.lists(
    st.tuples(st.integers(1, 50), st.sampled_from(["audio", "text"]), st.none() | st.integers(0, 8)), max_size=60
)
"""Length, modality and group."""
KINDS = st.sampled_from(["best_fit", "first_fit"])


@given(SAMPLES, st.integers(1, 9), st.integers(50, 120), KINDS)
def test_every_sample_is_in_exactly_one_row_that_respects_the_cap(
    lengths: list[int], lanes: int, cap: int, kind: str
) -> None:
    schedule = plan(refs(lengths), lengths, lanes, cap, kind)
    rows = [row for round_ in schedule.rounds for row in round_]
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= cap for row in rows)
    assert all(len(round_) == lanes for round_ in schedule.rounds)


@given(SAMPLES, st.integers(1, 9), st.integers(50, 120), KINDS)
def test_rows_are_empty_only_where_no_row_can_be_split(lengths: list[int], lanes: int, cap: int, kind: str) -> None:
    rows = [row for round_ in plan(refs(lengths), lengths, lanes, cap, kind).rounds for row in round_]
    if () in rows:
        assert all(len(row) <= 1 for row in rows)
        assert rows.count(()) < lanes


def known_refs(known: list[tuple[int, str, int | None]]) -> list[SampleRef]:
    samples = refs([length for length, _, _ in known])
    return [ref._replace(modality=m, group=g) for ref, (_, m, g) in zip(samples, known, strict=True)]


@given(KNOWN, st.integers(1, 5), st.integers(50, 120), KINDS)
def test_a_round_has_one_modality_and_rows_are_split_within_it(
    known: list[tuple[int, str, int | None]], lanes: int, cap: int, kind: str
) -> None:
    samples = known_refs(known)
    rounds_of = plan(samples, [ref.length for ref in samples], lanes, cap, kind)
    rounds = rounds_of.rounds
    assert sorted(i for round_ in rounds for row in round_ for i in row) == list(range(len(samples)))
    assert all(sum(samples[i].length for i in row) <= cap for round_ in rounds for row in round_)
    modalities = [{samples[i].modality for row in round_ for i in row} for round_ in rounds]
    assert modalities == [{modality} for modality in rounds_of.modalities]
    for modality in ("audio", "text"):
        rows = [row for round_, found in zip(rounds, modalities, strict=True) if found == {modality} for row in round_]
        if () in rows:
            assert all(len(row) <= 1 for row in rows)
            assert rows.count(()) < lanes


@given(KNOWN, st.integers(1, 5), st.integers(50, 120), KINDS)
def test_a_modality_is_scheduled_as_if_it_were_alone(
    known: list[tuple[int, str, int | None]], lanes: int, cap: int, kind: str
) -> None:
    samples = known_refs(known)
    rounds = plan(samples, [ref.length for ref in samples], lanes, cap, kind).rounds
    for modality in ("audio", "text"):
        numbers = [i for i, ref in enumerate(samples) if ref.modality == modality]
        own = [samples[i] for i in numbers]
        alone = plan(own, [ref.length for ref in own], lanes, cap, kind).rounds
        rows = {tuple(numbers[i] for i in row) for round_ in alone for row in round_}
        assert {row for round_ in rounds for row in round_ if row and row[0] in numbers} == rows - {()}


@given(KNOWN, st.integers(1, 5), st.integers(50, 120), KINDS)
def test_a_group_shares_a_row_unless_it_fits_none_or_lanes_would_be_idle(
    known: list[tuple[int, str, int | None]], lanes: int, cap: int, kind: str
) -> None:
    samples = known_refs(known)
    rounds = plan(samples, [ref.length for ref in samples], lanes, cap, kind).rounds
    rows = [row for round_ in rounds for row in round_ if row]
    for modality, group in {(ref.modality, ref.group) for ref in samples if ref.group is not None}:
        members = {i for i, ref in enumerate(samples) if (ref.modality, ref.group) == (modality, group)}
        holding = [row for row in rows if members & set(row)]
        for row in holding:  # side by side
            places = [place for place, i in enumerate(row) if i in members]
            assert places == list(range(places[0], places[-1] + 1))
        if len(holding) > 1 and sum(samples[i].length for i in members) <= cap:
            # Only because there was no other way to keep lanes busy: no row of the modality has two groups.
            for row in rows:
                if samples[row[0]].modality == modality:
                    assert len({samples[i].group for i in row}) == 1
                    assert samples[row[0]].group is not None or len(row) == 1


def test_a_group_that_fits_shares_a_row() -> None:
    """Packed alone, 40 would lie with 10, 30 with 20."""
    samples = known_refs([(40, "text", 7), (30, "text", None), (20, "text", 7), (10, "text", None)])
    assert {frozenset(row) for row in plan(samples, [1.0] * 4, 1, 60, "best_fit").lane(0)} == {
        frozenset({0, 2}),
        frozenset({1, 3}),
    }
    assert plan(samples[::2], [4.0, 2.0], 2, 60, "best_fit").rounds == (
        ((0,), (1,)),
    )  # nothing else for the second lane


@given(SAMPLES, st.integers(50, 120), KINDS)
def test_one_lane_needs_less_than_twice_the_fewest_rows(lengths: list[int], cap: int, kind: str) -> None:
    rounds = len(plan(refs(lengths), lengths, 1, cap, kind).rounds)
    fewest = -(-sum(lengths) // cap)
    # Any two rows of a first-fit or best-fit packing are together fuller than one cap.
    assert rounds <= max(fewest, 2 * fewest - 1, 0) or rounds <= 1


@given(SAMPLES, st.integers(1, 5))
def test_a_round_is_made_of_rows_of_neighbouring_cost(lengths: list[int], lanes: int) -> None:
    costs = [n * n for n in lengths]
    rounds = [
        [sum(costs[i] for i in row) for row in round_]
        for round_ in plan(refs(lengths), costs, lanes, 64, "best_fit").rounds
    ]
    assert all(min(earlier) >= max(later) for earlier, later in pairwise(rounds))


def test_a_split_row_falls_into_halves_of_about_equal_cost() -> None:
    lengths = [400, 300, 250, 200, 100, 100, 50, 40, 30, 20, 10, 5]
    ((a, b),) = plan(refs(lengths), lengths, 2, 2000, "best_fit").rounds
    assert abs(sum(lengths[i] for i in a) - sum(lengths[i] for i in b)) <= 10


def test_equal_lengths_lie_side_by_side_in_a_row() -> None:
    (row,) = plan(refs([3, 9, 3, 9, 5]), [1.0] * 5, 1, 100, "best_fit").lane(0)
    assert [[3, 9, 3, 9, 5][i] for i in row] == [9, 9, 5, 3, 3]


def of_all_kinds() -> Schedule:
    """Of samples with several modalities and groups."""
    lengths = [7, 5, 3, 9, 9, 1, 2, 2, 8, 6]
    samples = [r._replace(modality="vw"[i % 2], group=[None, 4, 5][i % 3]) for i, r in enumerate(refs(lengths))]
    return plan(samples, [1.0] * len(samples), 2, 12, "best_fit")


def test_the_schedule_is_the_same_in_every_process() -> None:
    code = "from tests.schedule.test_packing import of_all_kinds; print(of_all_kinds())"
    digests = {subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout for _ in range(2)}
    assert digests == {f"{of_all_kinds()}\n"}


def test_a_sample_that_fits_no_row_is_named() -> None:
    with pytest.raises(UserError, match="sample 1 has 9 tokens"):
        plan(refs([3, 9]), [1.0, 1.0], 1, 8, "best_fit")


def test_lanes_get_about_the_same_work_from_a_heavy_tail() -> None:
    lengths = [1 + 4000 // (1 + i % 97) for i in range(3000)]
    costs = [float(n * (3000 + n)) for n in lengths]
    for lanes in (8, 64):
        schedule = plan(refs(lengths), costs, lanes, 8192, "best_fit")
        work = [sum(costs[i] for row in schedule.lane(lane) for i in row) for lane in range(lanes)]
        assert max(work) < 1.12 * sum(work) / lanes


@pytest.mark.parametrize("lanes", [7, 64])
def test_work_grows_with_samples_and_not_with_their_square(monkeypatch: pytest.MonkeyPatch, lanes: int) -> None:
    """Also where no row has room for a sample, and every row has been looked at."""
    pushed, push = 0, packing.heappush

    def counted(heap: list[Any], item: Any) -> None:
        nonlocal pushed
        pushed += 1
        push(heap, item)

    monkeypatch.setattr(packing, "heappush", counted)
    lengths = np.random.default_rng(1).integers(1, 4097, 5000).tolist()
    plan(refs(lengths), [float(n * (3000 + n)) for n in lengths], lanes, 4096, "best_fit")
    assert pushed < 8 * len(lengths)


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(50, 120))
def test_first_fit_takes_the_first_row_with_room(lengths: list[int], cap: int) -> None:
    rows: list[list[int]] = []
    for sample in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        row = next((row for row in rows if sum(lengths[i] for i in row) + lengths[sample] <= cap), None)
        if row is None:
            rows.append(row := [])
        row.append(sample)
    found = plan(refs(lengths), [1.0] * len(lengths), 1, cap, "first_fit")
    assert {row for (row,) in found.rounds} == set(map(tuple, rows))


def test_what_cannot_be_planned_is_refused() -> None:
    for costs, lanes in (([1.0], 1), ([1.0] * 3, 1), ([1.0] * 2, 0)):
        with pytest.raises(ValueError, match="2 samples have"):
            plan(refs([3, 9]), costs, lanes, 9, "best_fit")


def test_costs_that_are_nothing_leave_no_row_empty() -> None:
    """Cheapest rows are those without samples, whatever the samples cost."""
    rows = plan(refs([2, 1, 1, 1, 1]), [4.0, 0.0, 0.0, 1e15, 0.0], 5, 2, "best_fit").lane
    assert sorted(len(row) for lane in range(5) for row in rows(lane)) == [1] * 5
