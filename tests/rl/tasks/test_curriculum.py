"""Levels follow the rewards, and nothing but the set of results of each step."""

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equigrad.config.tasks import Curriculum
from equigrad.rl.tasks.curriculum import State, advance, begin, level_of
from equigrad.rl.tasks.draws import Draw
from equigrad.rl.tasks.protocol import Problem, Split, Verdict

LEVELS = {"a": 3, "b": 2}
CONFIG = Curriculum(window=4, raise_at=0.75, lower_at=0.25)
Result = tuple[Problem, Verdict]


def result(reward: float, level: int = 0, task: str = "a", split: Split = "train", failed: bool = False) -> Result:
    return Problem("id", task, split, 0, level, "?", {}), Verdict(reward, failed=failed)


def levels(state: State) -> list[int]:
    return [state[name]["level"] for name in ("a", "b")]


RESULTS = st.lists(
    st.builds(
        result,
        st.floats(-1e308, 1e308),
        st.integers(0, 2),
        st.sampled_from("ab"),
        st.sampled_from(["train", "held_out"]),
        st.booleans(),
    ),
    max_size=12,
)


@given(st.lists(RESULTS, max_size=5), st.randoms(use_true_random=False))
def test_the_order_of_a_steps_results_does_not_matter(steps: list[list[Result]], order: random.Random) -> None:
    one = other = begin(LEVELS, CONFIG)
    for results in steps:
        shuffled = list(results)
        order.shuffle(shuffled)
        one, other = advance(one, results, LEVELS, CONFIG), advance(other, shuffled, LEVELS, CONFIG)
        assert json.dumps(one) == json.dumps(other)  # bit by bit
        assert all(0 <= one[name]["level"] < LEVELS[name] for name in LEVELS)
        assert json.loads(json.dumps(one)) == one


def test_a_sum_that_rounds_is_the_same_in_any_order() -> None:
    """0.1 + 0.2 + 0.3 and 0.3 + 0.2 + 0.1 differ in floating point."""
    results = [result(r) for r in (0.1, 0.2, 0.3)]
    state = begin(LEVELS, CONFIG)
    assert sum([0.1, 0.2, 0.3]) != sum([0.3, 0.2, 0.1])
    assert advance(state, results, LEVELS, CONFIG) == advance(state, results[::-1], LEVELS, CONFIG)


def moved(*steps: list[Result], config: Curriculum = CONFIG) -> list[int]:
    state = begin(LEVELS, config)
    for results in steps:
        state = advance(state, results, LEVELS, config)
    return levels(state)


def test_right_answers_raise_and_wrong_ones_lower_a_level_at_a_time() -> None:
    right, wrong = [[result(1.0, level)] * 4 for level in range(3)], [[result(0.0, level)] * 4 for level in range(3)]
    assert moved(right[0]) == [1, 0]
    assert moved(right[0], right[1]) == [2, 0]
    assert moved(right[0], right[1], right[2]) == [2, 0]  # there is no harder one
    assert moved(right[0], wrong[1]) == [0, 0]
    assert moved(wrong[0]) == [0, 0]
    assert moved([result(0.5)] * 4) == [0, 0]
    assert moved([result(1.0, 0, "b")] * 4) == [0, 1]


def test_nothing_moves_before_the_window_is_full_and_then_it_begins_anew() -> None:
    assert moved([result(1.0)] * 3) == [0, 0]
    assert moved([result(1.0)] * 3, [result(1.0)]) == [1, 0]
    assert moved([result(0.5)] * 4, [result(1.0)] * 3) == [0, 0]
    assert moved([result(0.5)] * 4, [result(1.0)] * 4) == [1, 0]


@pytest.mark.parametrize(
    "other", [dict(failed=True), dict(split="held_out"), dict(level=1), dict(level=2)], ids=lambda d: next(iter(d))
)
def test_failures_held_out_problems_and_other_levels_do_not_count(other: dict[str, Any]) -> None:
    assert moved([result(1.0, **other)] * 40) == [0, 0]
    assert moved([result(0.0, **other)] * 40, [result(1.0)] * 4) == [1, 0]


def test_rewards_count_from_nought_to_one() -> None:
    assert moved([result(100.0), result(0.0), result(0.0), result(0.0)]) == [0, 0]
    assert moved([result(-100.0), result(1.0), result(1.0), result(1.0)]) == [1, 0]


def test_without_a_curriculum_nothing_moves_and_all_levels_are_drawn() -> None:
    off = Curriculum(enabled=False, window=1)
    assert moved([result(1.0)] * 9, config=off) == [0, 0]
    drawn = {level_of(Draw(n), "train", begin(LEVELS, off)["a"], 3, off) for n in range(100)}
    assert drawn == {0, 1, 2}


def test_held_out_problems_are_of_all_levels_whatever_the_state() -> None:
    state = begin(LEVELS, CONFIG)
    later = advance(state, [result(1.0)] * 4, LEVELS, CONFIG)
    for n in range(50):
        assert level_of(Draw(n), "held_out", state["a"], 3, CONFIG) == level_of(
            Draw(n), "held_out", later["a"], 3, CONFIG
        )
    assert {level_of(Draw(n), "held_out", state["a"], 3, CONFIG) for n in range(100)} == {0, 1, 2}


def test_review_takes_its_share_of_lower_levels_and_nothing_is_harder() -> None:
    standing = begin(LEVELS, Curriculum(start=2))["a"]
    drawn = [level_of(Draw("review", n), "train", standing, 3, Curriculum(review=0.25)) for n in range(4000)]
    assert max(drawn) == 2
    assert abs(sum(level < 2 for level in drawn) / 4000 - 0.25) < 4 * (0.25 * 0.75 / 4000) ** 0.5
    assert {0, 1} < set(drawn)


def test_a_first_level_beyond_the_last_is_the_last() -> None:
    assert levels(begin(LEVELS, Curriculum(start=9))) == [2, 1]
