"""Elementary functions of Python's floats."""

import mpmath
import pytest

from equigrad.numerics.exact import scalar


def test_powers_are_products() -> None:
    assert scalar.power(0.95, 0) == 1.0
    assert scalar.power(0.5, 300) == 2.0**-300
    for n in (1, 2, 7, 1000):
        assert scalar.power(0.999, n) == pytest.approx(0.999**n, rel=1e-13)


def test_cosines_of_half_a_turn() -> None:
    mpmath.mp.prec = 200
    for n in range(1001):
        x = 3.141592653589793 * n / 1000
        assert abs(scalar.cos(x) - mpmath.cos(mpmath.mpf(x))) <= 2e-15


def test_logarithms() -> None:
    mpmath.mp.prec = 200
    for n in range(-300, 300):
        x = 1.0371**n
        assert abs(scalar.log(x) - mpmath.log(mpmath.mpf(x))) <= 1e-15 * abs(mpmath.log(mpmath.mpf(x))) + 3e-16
