"""Grids: what is rounded to them adds up to the same bits in any order."""

import math
from fractions import Fraction

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from equigrad.numerics.exact import grids


@pytest.mark.parametrize("length", [1, 2, 3, 1000, 1024, 1025, 151_936, 2**24])
@pytest.mark.parametrize("extra", [0, 1, 9])
def test_no_partial_sum_can_leave_53_bits(length: int, extra: int) -> None:
    """At the largest operands there can be: all of one sign, as large as their bits allow."""
    a, b = grids.operand_bits(length, extra)
    assert a - b == extra
    assert length * (2**a * 2**b) <= 2**53 < 2**3 * 2 ** (grids.length_bits(length) + a + b)
    assert length * 2 ** grids.term_bits(length) <= 2**53


@hypothesis.given(st.lists(st.floats(-1e3, 1e3, allow_subnormal=False), min_size=1, max_size=9), st.integers(-40, 3))
def test_rounding_is_to_the_nearest_multiple_and_ties_go_to_even(values: list[float], step: int) -> None:
    found = grids.onto(torch.tensor(values, dtype=torch.float64), grids.ROUND * 2.0**step).tolist()
    assert found == [float(round(Fraction(value) / Fraction(2) ** step) * Fraction(2) ** step) for value in values]


@hypothesis.given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=5), st.integers(3, 51)
)
def test_a_grid_lies_so_many_bits_below_the_largest_value(values: list[float], bits: int) -> None:
    """Of any size: where the grid would be finer than 2^-1022 it is that, and what would need one beyond float64 is
    undefined."""
    x = torch.tensor(values, dtype=torch.float64)
    size = grids.largest(x, 0)
    step = max(Fraction(2) ** (max(math.frexp(float(size))[1], -1022) - bits), Fraction(2) ** -1022)
    found = grids.relative(x, bits, size).tolist()
    if 1.5 * 2**52 * step >= 2**1024:
        assert all(map(math.isnan, found))
    else:
        assert found == [float(round(Fraction(value) / step) * step) for value in values]


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_makes_its_grid_undefined(odd: float) -> None:
    x = torch.tensor([1.0, odd], dtype=torch.float64)
    assert grids.relative(x, 20, grids.largest(x, 0)).isnan().all()


def test_a_rounded_product_is_exact_in_any_order() -> None:
    generator = torch.Generator().manual_seed(0)
    length = 3000
    a, b = grids.operand_bits(length)
    # Sizes over thirty orders of magnitude: without a grid no two orders agree.
    x, w = (torch.randn(5, length, generator=generator, dtype=torch.float64) for _ in range(2))
    x = x * torch.exp(8 * torch.randn(5, length, generator=generator, dtype=torch.float64))
    x, w = grids.relative(x, a, grids.largest(x, 1)), grids.relative(w, b, grids.largest(w, 1))
    exact = [[float(sum(Fraction(p) * Fraction(q) for p, q in zip(row, column, strict=True))) for column in w.tolist()]
             for row in x.tolist()]  # fmt: skip
    for _ in range(3):
        order = torch.randperm(length, generator=generator)
        parts = order.tensor_split(4)
        assert (x[:, order] @ w[:, order].t()).tolist() == exact
        assert sum((x[:, part] @ w[:, part].t() for part in parts), torch.zeros(5, 5)).tolist() == exact


def test_the_error_of_a_rounded_product_is_that_of_its_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(64, 512, generator=generator, dtype=torch.float64) for _ in range(2))
    a, b = grids.operand_bits(512)
    found = grids.relative(x, a, grids.largest(x, 1)) @ grids.relative(w, b, grids.largest(w, 1)).t()
    assert (found - x @ w.t()).norm() < 2e-6 * (x @ w.t()).norm()


@pytest.mark.parametrize("length", [0, 1, 2, 5, 4097])
def test_sums_of_rows_are_exact_in_any_order(length: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, length, generator=generator, dtype=torch.float64)
    found = grids.sum_last(x)
    assert found.shape == (7, 1)
    for _ in range(3):
        assert torch.equal(grids.sum_last(x[:, torch.randperm(length, generator=generator)]), found)
    torch.testing.assert_close(found, x.sum(1, keepdim=True), rtol=0, atol=1e-9)


def test_what_is_not_finite_is_not_hidden() -> None:
    for wrong in (torch.inf, -torch.inf, torch.nan):
        x = torch.tensor([[1.0, wrong, 2.0]], dtype=torch.float64)
        assert not torch.isfinite(grids.sum_last(x)).any()
        assert not torch.isfinite(grids.relative(x, 20, grids.largest(x, 1))).all()


def test_rows_of_zeros_and_no_rows_at_all() -> None:
    assert grids.relative(torch.zeros(2, 3).double(), 20, torch.zeros(2, 1).double()).tolist() == [[0.0] * 3] * 2
    assert grids.largest(torch.zeros(0, 3).double(), 0).shape == (1, 3)
    assert grids.sum_last(torch.zeros(0, 3).double()).shape == (0, 1)
