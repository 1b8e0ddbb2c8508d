"""Expressions have the value that exact arithmetic gives them, and what is no expression is refused with a reason."""

import operator
import time
from contextlib import suppress
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equigrad.rl.tasks.expression import DEEPEST, LONGEST, ExpressionError, decimal_text, evaluate

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
Tree = tuple[str, Fraction | None]
"""Text, and its value computed by Python; None where that divides by zero."""


def joined(left: Tree, symbol: str, right: Tree) -> Tree:
    (a, x), (b, y) = left, right
    undefined = x is None or y is None or (symbol == "/" and y == 0)
    return f"({a}{symbol}{b})", None if undefined else OPERATIONS[symbol](x, y)


LEAVES = st.integers(0, 30).map(lambda n: (str(n), Fraction(n))) | st.integers(0, 999).map(
    lambda n: (f"{n // 100}.{n % 100:02}", Fraction(n, 100))
)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.builds(joined, inner, st.sampled_from("+-*/"), inner)
        | inner.map(lambda tree: (f"-{tree[0]}", None if tree[1] is None else -tree[1]))
    ),
    max_leaves=6,
)


@given(TREES)
def test_a_tree_of_operations_has_the_value_of_rational_arithmetic(tree: Tree) -> None:
    text, value = tree
    if value is None:
        with pytest.raises(ExpressionError, match="division by zero"):
            evaluate(text)
    else:
        assert evaluate(text).value == value


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.lists(st.sampled_from("+-*/"), min_size=7, max_size=7))
def test_without_parentheses_products_bind_first_and_the_left_comes_first(
    numbers: list[int], symbols: list[str]
) -> None:
    text = str(numbers[0])
    python = f"F({numbers[0]})"
    for symbol, number in zip(symbols, numbers[1:], strict=False):
        text += f" {symbol} {number}"
        python += f"{symbol}F({number})"
    found = evaluate(text)
    assert found.value == eval(python, {"F": Fraction})
    assert found.numbers == tuple(map(str, numbers))
    assert not found.signed


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"), ("  ", "empty"), ("1+", "ends too early"), ("(1", "ends too early"), ("1)", "not expected"),
        ("(1 2)", "not closed"), ("1 2", "not expected"), ("+1", "not expected"), ("1+*2", "not expected"),
        ("()", "not expected"),
        ("2**3", "not expected"), ("2^3", "neither"), ("7//2", "not expected"), ("1e5", "neither"), ("1.", "neither"),
        (".5", "neither"), ("1/0", "by zero"), ("1/(2-2)", "by zero"), ("__import__('os')", "neither"),
        ("x", "neither"),
        ("\uff11+1", "neither"), ("1\u00d72", "neither"), ("1;2", "neither"), ("1" * (LONGEST + 1), "characters"),
        ("(" * (DEEPEST + 1) + "1" + ")" * (DEEPEST + 1), "inside each other"),
        ("-" * (DEEPEST + 1) + "1", "inside each other"),
    ],
)  # fmt: skip
def test_what_is_no_expression_is_refused_with_a_reason(text: str, reason: str) -> None:
    with pytest.raises(ExpressionError, match=reason):
        evaluate(text)


@given(st.text("0123456789+-*/(). ", max_size=LONGEST))
def test_no_text_of_the_right_characters_does_anything_else(text: str) -> None:
    try:
        value = evaluate(text).value
    except ExpressionError:
        return
    assert len(str(value.numerator)) <= 2 * LONGEST  # so it can always be written down


def test_the_largest_results_take_no_time() -> None:
    start = time.perf_counter()
    for text in ("9*" * 99 + "9", "9" * LONGEST, "1/" * 99 + "7", "1/7+" * 49 + "1/3", "." * LONGEST, "9*" * 10**6):
        with suppress(ExpressionError):
            decimal_text(evaluate(text).value)
    assert time.perf_counter() - start < 0.5


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Fraction(84), "84"), (Fraction(-1, 8), "-0.125"), (Fraction(1, 3), "1/3"), (Fraction(5, 2), "2.5"),
        (Fraction(-7, 6), "-7/6"), (Fraction(1, 1000), "0.001"), (Fraction(0), "0"), (Fraction(12345, 100), "123.45"),
    ],
)  # fmt: skip
def test_a_value_is_written_as_one_would_write_it(value: Fraction, text: str) -> None:
    assert decimal_text(value) == text


@given(st.fractions(max_denominator=10**6))
def test_a_written_value_is_the_value(value: Fraction) -> None:
    text = decimal_text(value)
    assert Fraction(text) == value
    assert ("/" in text) == (10**20 % value.denominator != 0)
