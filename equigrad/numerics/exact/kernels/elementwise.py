"""Norms, gates and rotary positions: kernels of ``exact.elementwise``, term by term as they stand there."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from equigrad.numerics.exact.kernels.jit import short, sigmoid, sqrt
from equigrad.numerics.exact.kernels.launch import Kernel, elementwise, launch, like

# Norms. Numbers: the width, epsilon, and whether the weight is around zero.


@triton.jit
def _factor(weight, numbers):
    if numbers[2]:
        return weight + 1.0
    else:
        return weight


@triton.jit
def _square(x, found, at, numbers):
    return (x[0] * x[0],)


@triton.jit
def _root(found, numbers):
    return (1.0 / sqrt(found[0] / numbers[0] + numbers[1]),)


@triton.jit
def _normed(x, found, at, numbers):
    return (short(x[0] * x[1]) * _factor(x[2], numbers),)


@triton.jit
def _of_unit(dy, x, inverse, weight, numbers):
    unit = short(x * inverse)
    return unit, short(dy * _factor(weight, numbers))


@triton.jit
def _along(x, found, at, numbers):
    unit, g = _of_unit(x[0], x[1], x[2], x[3], numbers)
    return (g * unit,)


@triton.jit
def _across(x, found, at, numbers):
    unit, g = _of_unit(x[0], x[1], x[2], x[3], numbers)
    mean = short(found[0] / numbers[0])
    return x[2] * (g - unit * mean) + 0.0, x[0] * unit


_INVERSE_RMS = Kernel(terms=_square, relative=True, row=_root)
_NORMED = Kernel(each=_normed)
_NORM_BACKWARD = Kernel(terms=_along, relative=True, each=_across)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    out = like(x[..., :1], torch.float32)
    launch(_INVERSE_RMS, [x], rows=[out], numbers=[float(x.shape[-1]), eps])
    return out


def normed(x: Tensor, inverse: Tensor, weight: Tensor, zero_centred: bool) -> Tensor:
    out = like(x, x.dtype)
    launch(_NORMED, [x, inverse, weight], [out], numbers=[float(x.shape[-1]), 0.0, zero_centred])
    return out


def norm_backward(dy: Tensor, x: Tensor, inverse: Tensor, weight: Tensor, zero_centred: bool) -> tuple[Tensor, Tensor]:
    dx, terms = like(x, torch.float32), like(x, torch.float64)
    numbers = [float(x.shape[-1]), 0.0, zero_centred]
    launch(_NORM_BACKWARD, [dy, x, inverse, weight], [dx, terms], numbers=numbers)
    return dx, terms


# Gates. Numbers of the clamped one: alpha and the limit.


@triton.jit
def _opened(x, found, at, numbers):
    unit, gate = x
    return (unit * short(gate * short(sigmoid(gate))),)


@triton.jit
def _opened_backward(x, found, at, numbers):
    dy, unit, gate = x
    open_ = short(sigmoid(gate))
    slope = short(open_ * (1.0 + gate * short(1.0 - open_)))
    return dy * short(gate * open_) + 0.0, short(dy * unit) * slope + 0.0


@triton.jit
def _clamped(x, found, at, numbers):
    g, u = _at_most(x[0], numbers[1]), _at_most(_at_least(x[1], -numbers[1]), numbers[1])
    return (short(g * short(sigmoid(numbers[0] * g))) * short(u + 1.0),)


@triton.jit
def _clamped_backward(x, found, at, numbers):
    dy, gate, up = x
    g, u = _at_most(gate, numbers[1]), _at_most(_at_least(up, -numbers[1]), numbers[1])
    open_ = short(sigmoid(numbers[0] * g))
    slope = short(open_ * (1.0 + short(numbers[0] * g) * short(1.0 - open_)))
    dgate = tl.where(gate <= numbers[1], short(dy * short(u + 1.0)) * slope, 0.0)
    dup = tl.where(tl.abs(up) <= numbers[1], dy * short(g * open_), 0.0)
    return dgate + 0.0, dup + 0.0


@triton.jit
def _at_most(x, limit):
    return tl.where(x > limit, tl.zeros_like(x) + limit, x)


@triton.jit
def _at_least(x, limit):
    return tl.where(x < limit, tl.zeros_like(x) + limit, x)


@triton.jit
def _times_sigmoid(x, found, at, numbers):
    return (x[0] * short(sigmoid(x[1])),)


@triton.jit
def _times_sigmoid_backward(x, found, at, numbers):
    dy, unit, gate = x
    open_ = short(sigmoid(gate))
    slope = short(open_ * short(1.0 - open_))
    return dy * open_ + 0.0, short(dy * unit) * slope + 0.0


opened, opened_backward = elementwise(_opened, 0), elementwise(_opened_backward, 1, 1)
clamped, clamped_backward = elementwise(_clamped, 0), elementwise(_clamped_backward, 1, 2)
times_sigmoid, times_sigmoid_backward = elementwise(_times_sigmoid, 0), elementwise(_times_sigmoid_backward, 1, 2)


# Rotary positions. The number: the sign of the angle.


@triton.jit
def _rotated(x, found, at, numbers):
    a, b, cos, sin = x
    sin = sin * numbers[0]
    return a * cos - b * sin + 0.0, b * cos + a * sin + 0.0


_ROTATED = Kernel(each=_rotated)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    """Both halves of what is rotated, and what is not."""
    out, half = like(x, x.dtype), cos.shape[-1]
    sizes = [half, half, x.shape[-1] - 2 * half]
    (a, b, rest), (first, second, kept) = x.split(sizes, -1), out.split(sizes, -1)
    if half:
        launch(_ROTATED, [a, b, cos[:, None], sin[:, None]], [first, second], numbers=[sign])
    torch.add(rest, 0.0, out=kept)
    return out
