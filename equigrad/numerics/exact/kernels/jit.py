"""What kernels compute with: ``exact.elementary`` and ``exact.grids`` once more, for Triton, on float64 tiles.

The same tables, the same operations in the same order, each of them IEEE 754's: ``+ - * /`` of float64 are, as long as
no product is contracted into a sum, which every launch forbids (``launch``). Nothing of a library: neither its exp nor
its square root, nor a division of float32, which is not rounded correctly. Floating-point maxima are those of integers,
for hardware's pass over a NaN.
"""

import triton
import triton.language as tl

from equigrad.numerics.exact import elementary
from equigrad.numerics.exact.grids import ROUND

_ROUND = tl.constexpr(ROUND)
_EXP, _EXPS = tl.constexpr(tuple(elementary._EXP)), tl.constexpr(len(elementary._EXP))
_ATANH, _ATANHS = tl.constexpr(tuple(elementary._ATANH)), tl.constexpr(len(elementary._ATANH))
_LOG2_E, _LN2 = tl.constexpr(elementary._LOG2_E), tl.constexpr(elementary._LN2_WHOLE)
_LN2_FIRST, _LN2_REST = (tl.constexpr(part) for part in elementary._LN2)
_SQRT_HALF = tl.constexpr(elementary._SQRT_HALF)
_ROOT_SLOPE, _ROOT_START = (tl.constexpr(c) for c in elementary._ROOT)
_BITS, _BIAS = tl.constexpr(elementary.EXPONENT_BITS), tl.constexpr(elementary._BIAS)
_SIGNLESS = tl.constexpr(2**63 - 1)
LOWEST = tl.constexpr(-(2**63))
"""Below the key of every number."""


@triton.jit
def power_of_two(n):
    """2^n of int64, from its bits; outside [-1022, 1023] that of the nearer end."""
    n = tl.minimum(tl.maximum(n, 1 - _BIAS), _BIAS)
    return ((n + _BIAS) << _BITS).to(tl.float64, bitcast=True)


@triton.jit
def exponent(x):
    """The smallest e with |x| < 2^e, int64, as ``elementary.exponent``."""
    return ((x.to(tl.int64, bitcast=True) >> _BITS) & 0x7FF) - (_BIAS - 1)


@triton.jit
def shifted(x, large):
    """Rounded to the grid that adding and subtracting ``large`` makes."""
    return (x + large) - large


@triton.jit
def onto(x, step):
    """Rounded to multiples of 2^step, int64."""
    return shifted(x, power_of_two(step) * _ROUND)


@triton.jit
def short(x):
    """Rounded to float32, carried on in float64."""
    return x.to(tl.float32).to(tl.float64)


@triton.jit
def widened(x):
    """To float64; of bfloat16 by its bits, of which Triton's interpreter loses those of subnormal numbers."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True).to(tl.float64)
    else:
        return x.to(tl.float64)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Rounded to a value type as PyTorch does: to bfloat16 by way of float32, and there by its bits too, which
    the interpreter cuts off."""
    if dtype == tl.bfloat16:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x != x, 0x7FC0, bits).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def larger(a, b):
    """The larger one, or a NaN if there is one."""
    return tl.where((a > b) | (a != a), a, b)


@triton.jit
def key_of(x):
    """An int64 that is the larger the larger ``x`` is; NaN has the largest, and -0.0 is below 0.0."""
    bits = tl.where(x != x, _SIGNLESS, x.to(tl.int64, bitcast=True))
    return bits ^ ((bits >> 63) & _SIGNLESS)


@triton.jit
def of_key(key):
    """The number that has this key."""
    return (key ^ ((key >> 63) & _SIGNLESS)).to(tl.float64, bitcast=True)


@triton.jit
def _polynomial(x, coefficients: tl.constexpr, count: tl.constexpr):
    y = tl.zeros_like(x) + coefficients[count - 1]
    for n in tl.static_range(1, count):
        y = y * x + coefficients[count - 1 - n]
    return y


@triton.jit
def exp(x):
    x = tl.where(x > 700.0, 700.0, tl.where(x < -700.0, -700.0, x))
    # To the nearest integer, ties to even, which then are the last bits of the sum.
    moved = x * _LOG2_E + _ROUND
    n = moved - _ROUND
    power = moved.to(tl.int64, bitcast=True) - (tl.zeros_like(x) + _ROUND).to(tl.int64, bitcast=True)
    rest = (x - n * _LN2_FIRST) - n * _LN2_REST
    return _polynomial(rest, _EXP, _EXPS) * power_of_two(power)


@triton.jit
def log(x):
    e = exponent(x)
    mantissa = x * power_of_two(-e)
    ratio = (mantissa - _SQRT_HALF) / (mantissa + _SQRT_HALF)
    return 2.0 * ratio * _polynomial(ratio * ratio, _ATANH, _ATANHS) + (e.to(tl.float64) - 0.5) * _LN2


@triton.jit
def sqrt(x):
    half = (exponent(x) + 1) >> 1
    rest = x * power_of_two(-2 * half)
    root = rest * _ROOT_SLOPE + _ROOT_START
    for _ in tl.static_range(4):
        root = (root + rest / root) * 0.5
    return tl.where(x == 0.0, 0.0, root * power_of_two(half))


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + exp(-x))
