"""Draws depend on their key alone, and are fair; the split of a key is fixed and takes its share."""

import subprocess
import sys
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from equigrad.rl.tasks.draws import Draw, is_held_out
from tests.jobs import environment


def test_another_process_draws_the_same() -> None:
    code = """
from equigrad.rl.tasks.draws import Draw
draw = Draw("a key", 7)
drawn = [draw.below(10**30), draw.between(-3, 3), draw.choice("abc"), draw.shuffled(range(9)), draw.chance(0.5)]
"""
    env = environment({"PYTHONHASHSEED": "1"})
    done = subprocess.run([sys.executable, "-c", f"{code}print(drawn)"], env=env, capture_output=True, text=True)
    here: dict[str, object] = {}
    exec(code, here)
    assert done.stdout == f"{here['drawn']}\n", done.stderr


@settings(max_examples=50)
@given(st.lists(st.text() | st.integers(), max_size=3), st.lists(st.text() | st.integers(), max_size=3))
def test_different_keys_are_different_draws(one: list[str | int], other: list[str | int]) -> None:
    assert (Draw(*one).below(1 << 200) == Draw(*other).below(1 << 200)) == (one == other)


def test_every_number_is_as_likely_as_any_other() -> None:
    draw = Draw("fair")
    counts = Counter(draw.below(20) for _ in range(20_000))
    # Chi-squared with 19 degrees of freedom: beyond 43.8 once in a thousand keys; this key is not chosen again.
    assert sum((counts[n] - 1000) ** 2 / 1000 for n in range(20)) < 43.8


def test_every_order_of_three_is_as_likely_as_any_other() -> None:
    draw = Draw("orders")
    counts = Counter(tuple(draw.shuffled("abc")) for _ in range(6000))
    assert len(counts) == 6
    assert sum((n - 1000) ** 2 / 1000 for n in counts.values()) < 20.5  # 5 degrees of freedom, one in a thousand


def test_a_chance_of_nothing_never_comes_and_a_certain_one_always() -> None:
    draw = Draw("edges")
    assert not any(draw.chance(0.0) for _ in range(100))
    assert all(draw.chance(1.0) for _ in range(100))


def test_about_one_key_in_so_many_is_held_out() -> None:
    share = sum(is_held_out(f"key {n}", 10) for n in range(10_000)) / 10_000
    assert abs(share - 0.1) < 4 * (0.1 * 0.9 / 10_000) ** 0.5
