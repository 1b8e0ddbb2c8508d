"""Countdown: every problem can be solved, and only by the given numbers."""

from collections.abc import Iterator
from fractions import Fraction

import pytest

from equigrad.config.tasks import Countdown
from equigrad.errors import UserError
from equigrad.rl.tasks.countdown import CountdownTask
from equigrad.rl.tasks.draws import Draw
from equigrad.rl.tasks.protocol import Question
from tests.rl.tasks.given import verdict

TASK = CountdownTask(Countdown(), long=False)


def reachable(numbers: list[Fraction]) -> Iterator[Fraction]:
    """Every value that can be made of some of the numbers: all pairs, all operations, until one is left."""
    yield from numbers
    for i, a in enumerate(numbers):
        for j, b in enumerate(numbers):
            if i != j:
                rest = [n for k, n in enumerate(numbers) if k not in (i, j)]
                for value in (a + b, a - b, a * b, *([a / b] if b else [])):
                    yield from reachable([*rest, value])


@pytest.mark.parametrize("level", [0, 1])
def test_brute_force_finds_the_target_too(level: int) -> None:
    for n in range(12):
        facts = TASK.draw(Draw(n), level).facts
        assert len(facts["numbers"]) == 3 + level
        assert facts["target"] not in facts["numbers"]
        assert 1 <= facts["target"] <= 100
        assert facts["target"] in set(reachable([Fraction(number) for number in facts["numbers"]]))


GIVEN = Question("3 5 5 8 -> 24", {"numbers": [3, 5, 5, 8], "target": 24})


@pytest.mark.parametrize(
    "answer",
    ["3*8", "3*8*(5/5)", "8*3+5-5", " ( 3 ) * ( 8 )", "3*8=24", "3*8 = 24 ", "8/((5/5)/3)", "<answer>3*8</answer>",
     "so 5 is wrong <answer>3*8=24</answer>"],
)  # fmt: skip
def test_right_ways_are_right(answer: str) -> None:
    assert verdict(TASK, GIVEN, answer).reward == 1


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("24", "24 is used more often than it is given"),
        ("3*8*1", "1 is used more often"),
        ("3*8+3-3", "3 is used more often"),
        ("5+5+5+8+1", "1, 5 is used more often"),
        ("03*8", "03 is used more often"),
        ("3.0*8", "3.0 is used more often"),
        ("-3*-8", "a sign before a number"),
        ("--24", "24 is used"),
        ("3*8=25", "after = stands not the target"),
        ("3*8=24=24", "after = stands not the target"),
        ("24=3*8", "24 is used"),
        ("3*5", "is 15, not 24"),
        ("8/3", "is 8/3, not 24"),
        ("3*8 or 8*3", "neither digit"),
        ("3**8", "not expected"),
        ("8/(5-5)", "division by zero"),
        ("", "empty"),
    ],
)
def test_wrong_ways_are_wrong_and_say_why(answer: str, reason: str) -> None:
    found = verdict(TASK, GIVEN, answer)
    assert found.reward == 0
    assert reason in found.reason


def test_thirds_are_no_rounding_error() -> None:
    """8 / (3 - 8/3) is 24 exactly; in floating point it is not."""
    question = Question("", {"numbers": [8, 3, 8, 3], "target": 24})
    assert verdict(TASK, question, "8/(3-8/3)").reward == 1
    assert 8 / (3 - 8 / 3) != 24


def test_a_setting_without_solutions_is_an_error_that_names_it() -> None:
    with pytest.raises(UserError, match=r"rl\.countdown\.target must be larger"):
        CountdownTask(Countdown(numbers=[3], largest=10**6, target=1), long=False).draw(Draw(0), 0)
