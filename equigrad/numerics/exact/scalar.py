"""Elementary functions of Python's floats, in the same bits on every machine, where a C library's may differ. Made of
``+ - * /`` alone, as those of tensors are (``exact.elementary``). Torch-free."""

import math

_COS = [(-1) ** n / math.factorial(2 * n) for n in range(16)]
_ATANH = [1 / (2 * n + 1) for n in range(12)]
_SQRT_HALF, _LN2 = float.fromhex("0x1.6a09e667f3bcdp-1"), float.fromhex("0x1.62e42fefa39efp-1")


def power(base: float, n: int) -> float:
    """base^n for n >= 0, by squaring."""
    result, square = 1.0, base
    while n:
        if n & 1:
            result *= square
        square *= square
        n >>= 1
    return result


def cos(x: float) -> float:
    """The cosine of an angle in [0, pi], to 2e-15."""
    return _polynomial(x * x, _COS)


def log(x: float) -> float:
    """The natural logarithm of a normal positive number, to 1e-15 of it."""
    mantissa, e = math.frexp(x)
    ratio = (mantissa - _SQRT_HALF) / (mantissa + _SQRT_HALF)
    return 2 * ratio * _polynomial(ratio * ratio, _ATANH) + (e - 0.5) * _LN2


def _polynomial(x: float, coefficients: list[float]) -> float:
    y = coefficients[-1]
    for coefficient in reversed(coefficients[:-1]):
        y = y * x + coefficient
    return y
