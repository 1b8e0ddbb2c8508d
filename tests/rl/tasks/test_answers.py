"""What counts as the answer, and what as a number: little, and in little time, whatever a model writes."""

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equigrad.rl.tasks.answers import MOST_DIGITS, answer_text, judge_number, parse_number


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("19", "19"),
        (" 19\n", "19"),
        ("<answer> 19 </answer>", "19"),
        ("so <answer>19</answer>, as one sees = 20", "19"),
        ("<answer>18</answer> no, <answer>19</answer>", "19"),
        ("<answer>1<answer>19</answer>", "19"),
        ("<answer>19</answer></answer>", "19</answer>"),
        ("<answer></answer>", ""),
        ("<answer>19", "<answer>19"),
        ("</answer>19<answer>", "</answer>19<answer>"),
        ("<ANSWER>19</ANSWER>", "<ANSWER>19</ANSWER>"),
        ("", ""),
    ],
)
def test_the_last_tags_hold_the_answer_and_without_tags_all_is(completion: str, answer: str) -> None:
    assert answer_text(completion) == answer


@pytest.mark.parametrize("text", ["19", "+19", "019", "19.0", "19.000"])
def test_a_number_counts_by_its_value(text: str) -> None:
    assert parse_number(text) == 19


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "-", "+", ".", "19.", ".5", "--19", "+-19", "- 19", "1 9", "1,9", "1_9", "1e1", "1/2", "0x13", "19 km",
        "nineteen", "nan", "inf", "\u0661\u0669", "\uff11\uff19", "19\u0660", "\u00b2",
        "\u221219", "19\x00", "19\u00a0", "9" * (MOST_DIGITS + 1),
        "0." + "9" * (MOST_DIGITS + 1),
    ],
)  # fmt: skip
def test_what_is_not_plainly_a_number_is_none(text: str) -> None:
    assert parse_number(text) is None
    assert judge_number(f"<answer>{text}</answer>", 19).parts["format"] == 0


@given(st.integers(-(10**MOST_DIGITS) + 1, 10**MOST_DIGITS - 1))
def test_every_whole_number_up_to_the_limit_is_read(number: int) -> None:
    assert parse_number(str(number)) == number


@given(st.decimals(allow_nan=False, allow_infinity=False, places=6, min_value=-1000, max_value=1000))
def test_decimals_are_read_exactly(number: object) -> None:
    assert parse_number(f"{number:f}") == Fraction(str(number))


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("19", 1), ("12+7=19", 1), ("12+7 = 19 ", 1), ("=18=19", 1), ("12+7=<answer>19</answer>", 1),
        ("<answer>12+7=19</answer>", 0),  # in tags stands the number alone
        ("12+7=19=", 0), ("19=12+7", 0), ("12+7=19.", 0), ("12+7=19 apples", 0), ("19 20", 0), ("19\n20", 0), ("", 0),
        ("=", 0), ("-19", 0), ("20", 0), ("<answer>19</answer><answer>20</answer>", 0),
    ],
)  # fmt: skip
def test_only_the_last_number_counts_and_nothing_may_follow_it(completion: str, reward: float) -> None:
    assert judge_number(completion, 19).reward == reward


@pytest.mark.parametrize(
    "completion",
    ["9" * 10**6, "<answer>" * 10**5, "</answer>" * 10**5, "=" * 10**6, " " * 10**6,
     "<answer>" + "9" * 10**6 + "</answer>", "<answer>1" * 10**5 + "</answer>" * 10**5],
    ids=["digits", "opening", "closing", "equals", "spaces", "tagged", "nested"],
)  # fmt: skip
def test_a_million_characters_take_no_time(completion: str) -> None:
    start = time.perf_counter()
    verdict = judge_number(completion, 19)
    assert time.perf_counter() - start < 0.5
    assert verdict.reward == 0
    assert len(verdict.reason) < 100
