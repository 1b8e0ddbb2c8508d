"""Elementary functions of float64 tensors, in the same bits on every machine.

A library's exp differs from the next one's, and from itself between the body of a vector and its tail. These are made
of ``+ - * /``, rounding and powers of two alone, each of which IEEE 754 defines to the last bit, and none of them is
fused with the next: an element's result depends on that element and on nothing else. Their errors, measured in the
tests, are below 1e-15 of the result, far below what is lost when that is rounded to a value type.

Everything here runs unchanged under ``torch.compile``, which on CPUs contracts no product into a sum.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from equigrad.errors import UserError

# ln 2 and pi/2 in parts: a product of the first ones with a small integer is exact, because they end in zeros.
_LN2 = (float.fromhex("0x1.62e42feep-1"), float.fromhex("0x1.a39ef35793c76p-33"))
_HALF_PI = (float.fromhex("0x1.921fb5p+0"), float.fromhex("0x1.110b46p-26"), float.fromhex("0x1.1a62633145c07p-54"))
_LOG2_E, _TWO_OVER_PI = float.fromhex("0x1.71547652b82fep+0"), float.fromhex("0x1.45f306dc9c883p-1")
_SQRT_HALF, _LN2_WHOLE = float.fromhex("0x1.6a09e667f3bcdp-1"), float.fromhex("0x1.62e42fefa39efp-1")
# A quotient of integers is rounded once, so these are the same everywhere.
_EXP = [1 / math.factorial(n) for n in range(14)]
_SIN = [(-1) ** n / math.factorial(2 * n + 1) for n in range(9)]
_COS = [(-1) ** n / math.factorial(2 * n) for n in range(9)]
_ATANH = [1 / (2 * n + 1) for n in range(12)]

EXPONENT_BITS, EXPONENT_FIELD, _BIAS = 52, 0x7FF, 1023
_LARGEST_ANGLE = 2.0**24
_ROOT = (2 / 3, 17 / 48)
"""Slope and start of the line that is near square roots of numbers in [1/4, 1)."""


def power_of_two(n: Tensor) -> Tensor:
    """2^n float64 of integers in [-1022, 1023], from their bits; what is outside is moved to the nearer end.

    Not ``torch.ldexp``, which multiplies by a power that it computes in float32.
    """
    return ((n.long().clamp(-1022, 1023) + _BIAS) << EXPONENT_BITS).view(torch.float64)


def exponent(x: Tensor) -> Tensor:
    """The smallest e with ``|x| < 2^e``, int64; -1022 where x is zero or less than 2^-1022, 1025 where it is not
    finite."""
    return ((x.view(torch.int64) >> EXPONENT_BITS) & EXPONENT_FIELD) - (_BIAS - 1)


def check_subnormals(device: torch.device) -> None:
    """``UserError`` where numbers below the normal ones are taken for zero: a library that was built for speed may have
    told the processor to, for the thread that loaded it and those that it started."""
    for dtype, bits in ((torch.float32, torch.int32), (torch.float64, torch.int64)):
        # Enough for all threads to have some. As integers, for a comparison would take them for zero as well.
        x = torch.full((1 << 16,), 4, dtype=bits, device=device).view(dtype)
        if not bool(((x * 0.5).view(bits) == 2).all()):
            raise UserError(
                "numerics.kind is exact, but this process flushes subnormal numbers to zero; a library built with"
                " -ffast-math does that when it is loaded"
            )


def quotient(x: Tensor, n: float) -> Tensor:
    """``x`` over a number, rounded once. Not ``x / n``: on CUDA, PyTorch multiplies by the reciprocal of a number,
    which is rounded itself."""
    return x / torch.full((), n, dtype=x.dtype, device=x.device)


def _polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Horner's rule, the constant first."""
    y = x * coefficients[-1] + coefficients[-2]
    for coefficient in reversed(coefficients[:-2]):
        y = y * x + coefficient
    return y


def exp(x: Tensor) -> Tensor:
    """e^x. Below -700 and above 700 it is that of -700 or 700: nothing overflows, and no subnormal number occurs."""
    x = x.clamp(-700.0, 700.0)
    n = torch.round(x * _LOG2_E)
    rest = (x - n * _LN2[0]) - n * _LN2[1]
    return _polynomial(rest, _EXP) * power_of_two(n)


def log(x: Tensor) -> Tensor:
    """The natural logarithm of normal positive numbers."""
    e = exponent(x)
    mantissa = x * power_of_two(-e)
    ratio = (mantissa - _SQRT_HALF) / (mantissa + _SQRT_HALF)
    return 2 * ratio * _polynomial(ratio * ratio, _ATANH) + (e.double() - 0.5) * _LN2_WHOLE


def sqrt(x: Tensor) -> Tensor:
    """The square root of zero and of normal positive numbers below 2^1021.

    IEEE 754 defines it to the last bit, but a library may not keep to that: MKL, to which ``torch.sqrt`` leaves float64
    tensors on CPUs, does not.
    """
    half = (exponent(x) + 1) >> 1
    rest = x * power_of_two(-2 * half)
    # Within 1/24 of the root of a number in [1/4, 1); Heron's steps square that error four times.
    root = rest * _ROOT[0] + _ROOT[1]
    for _ in range(4):
        root = (root + rest / root) * 0.5
    return torch.where(x == 0, 0.0, root * power_of_two(half))


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x)."""
    return 1 / (1 + exp(-x))


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), which for large x is x."""
    return x.clamp(min=0.0) + log(1 + exp(-x.abs()))


def cos_sin(x: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of angles up to 2^24, in radians. Raises ``ValueError`` beyond."""
    if not torch.compiler.is_compiling() and x.numel() and bool((x.abs() > _LARGEST_ANGLE).any()):
        raise ValueError(f"an angle of {float(x.abs().max())} radians; at most {_LARGEST_ANGLE:.0f} are exact")
    n = torch.round(x * _TWO_OVER_PI)
    rest = ((x - n * _HALF_PI[0]) - n * _HALF_PI[1]) - n * _HALF_PI[2]
    square = rest * rest
    cosine, sine = _polynomial(square, _COS), rest * _polynomial(square, _SIN)
    quarter = n.long() & 3
    swapped = (quarter & 1).bool()
    first, second = torch.where(swapped, sine, cosine), torch.where(swapped, cosine, sine)
    return (torch.where((quarter == 1) | (quarter == 2), -first, first),
            torch.where(quarter >= 2, -second, second))  # fmt: skip
