"""Onto grids, and from sums to values: kernels of ``exact.grids``, ``exact.channels`` and ``exact.linear``."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from equigrad.numerics.exact.grids import large_of
from equigrad.numerics.exact.kernels.jit import exponent, onto, power_of_two, rounded, shifted, widened
from equigrad.numerics.exact.kernels.launch import Kernel, elementwise, launch, like


@triton.jit
def _size(x, found, at, numbers):
    return (tl.abs(x[0]),)


@triton.jit
def _below_size(x, found, at, numbers):
    return (onto(x[0], exponent(found[0]) - numbers[0]),)


@triton.jit
def _below_given_size(x, found, at, numbers):
    return (onto(x[0], exponent(x[1]) - numbers[0]),)


@triton.jit
def itself(found, numbers):
    return found


@triton.jit
def _size_and_shifted(x, found, at, numbers):
    return tl.abs(x[0]), shifted(x[0], x[1])


@triton.jit
def _shifted(x, found, at, numbers):
    return (shifted(x[0], x[1]),)


@triton.jit
def _shifted_by_number(x, found, at, numbers):
    return (shifted(x[0], numbers[0]),)


@triton.jit
def _unit(x, found, at, numbers):
    return (shifted(x[0] * power_of_two(-exponent(found[0])), numbers[0]),)


@triton.jit
def power_of(found, numbers):
    return (power_of_two(exponent(found[0])),)


_RELATIVE = Kernel(largest=_size, each=_below_size)
_LARGEST = Kernel(largest=_size, row=itself)
_ONTO_CHANNELS = Kernel(largest=_size_and_shifted, row=itself)
_UNIT = Kernel(largest=_size, each=_unit, row=power_of)
onto_size = elementwise(_below_given_size, 0, dtype=torch.float64)
_coarser = elementwise(_shifted_by_number, 0, dtype=torch.float64)
onto_known = elementwise(_shifted, 0, dtype=torch.float64)


def to_rows(x: Tensor, bits: int) -> Tensor:
    out = like(x, torch.float64)
    launch(_RELATIVE, [x], [out], numbers=[bits])
    return out


def to_columns(x: Tensor, bits: int) -> Tensor:
    out = like(x, torch.float64)
    launch(_RELATIVE, [x.mT], [out.mT], numbers=[bits])
    return out


def largest(x: Tensor, dim: int) -> Tensor:
    size = like(x.narrow(dim, 0, 1), torch.float64)
    launch(_LARGEST, [x.transpose(dim, -1)], rows=[size.transpose(dim, -1)])
    return size


def onto_channels(x: Tensor, large: Tensor) -> tuple[Tensor, Tensor]:
    out, seen = like(x, torch.float64), like(large, torch.float64)
    launch(_ONTO_CHANNELS, [x.t(), large[:, None]], [out.t()], [seen[:, None]])
    return out, seen


def unit(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    out, power = like(x, torch.float64), like(x[..., :1], torch.float64)
    launch(_UNIT, [x], [out], [power], numbers=[large_of(bits)])
    return out, power.squeeze(-1)


def coarser(x: Tensor, bits: int) -> Tensor:
    return _coarser(x, large_of(bits))


# From sums to values. A sum that is zero has no sign.


@triton.jit
def _value(x, found, at, numbers):
    return (x[0] + 0.0,)


@triton.jit
def _sum(x, found, at, numbers):
    return (x[0] + x[1],)


@triton.jit
def _sum_of_rounded(x, found, at, numbers):
    return (x[0] + widened(rounded(x[1], numbers[0])),)


@triton.jit
def _scaled(x, found, at, numbers):
    return (x[0] * numbers[0] + 0.0,)


value, scaled = elementwise(_value, 0), elementwise(_scaled, 0)
_finish, _plus = elementwise(_sum, 0), elementwise(_sum_of_rounded, 0)
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


def finish(total: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return value(total, dtype) if bias is None else _finish(total, bias, dtype)


def plus(y: Tensor, x: Tensor) -> Tensor:
    return _plus(y, x, _TYPES[y.dtype])
