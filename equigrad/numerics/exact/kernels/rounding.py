"""Onto grids, and from sums to values: kernels of ``exact.grids``, ``exact.channels`` and ``exact.linear``."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from equigrad.numerics.exact.grids import ROUND
from equigrad.numerics.exact.kernels.jit import exponent, onto, power_of_two, rounded, shifted, widened
from equigrad.numerics.exact.kernels.launch import Kernel, launch


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
_RELATIVE_TO = Kernel(each=_below_given_size)
_LARGEST = Kernel(largest=_size, row=itself)
_ONTO_CHANNELS = Kernel(largest=_size_and_shifted, row=itself)
_ONTO = Kernel(each=_shifted)
_UNIT = Kernel(largest=_size, each=_unit, row=power_of)
_COARSER = Kernel(each=_shifted_by_number)


def like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous tensor of that shape, without values."""
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def grid(bits: int) -> float:
    """What rounds to multiples of 2^-bits when it is added and subtracted."""
    return ROUND * 2.0**-bits


def to_rows(x: Tensor, bits: int) -> Tensor:
    out = like(x, torch.float64)
    launch(_RELATIVE, [x], [out], numbers=[bits])
    return out


def to_columns(x: Tensor, bits: int) -> Tensor:
    out = like(x, torch.float64)
    launch(_RELATIVE, [x.mT], [out.mT], numbers=[bits])
    return out


def onto_size(x: Tensor, bits: int, size: Tensor) -> Tensor:
    out = like(x, torch.float64)
    launch(_RELATIVE_TO, [x, size], [out], numbers=[bits])
    return out


def largest(x: Tensor, dim: int) -> Tensor:
    size = like(x.narrow(dim, 0, 1), torch.float64)
    launch(_LARGEST, [x.transpose(dim, -1)], rows=[size.transpose(dim, -1)])
    return size


def onto_channels(x: Tensor, large: Tensor) -> tuple[Tensor, Tensor]:
    out, seen = like(x, torch.float64), like(large, torch.float64)
    launch(_ONTO_CHANNELS, [x.t(), large[:, None]], [out.t()], [seen[:, None]])
    return out, seen


def onto_known(x: Tensor, large: Tensor) -> Tensor:
    out = like(x, torch.float64)
    launch(_ONTO, [x, large], [out])
    return out


def unit(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    out, power = like(x, torch.float64), like(x[..., :1], torch.float64)
    launch(_UNIT, [x], [out], [power], numbers=[grid(bits)])
    return out, power.squeeze(-1)


def coarser(x: Tensor, bits: int) -> Tensor:
    out = like(x, torch.float64)
    launch(_COARSER, [x], [out], numbers=[grid(bits)])
    return out


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


VALUE, _FINISH, _PLUS, _SCALED = (Kernel(each=body) for body in (_value, _sum, _sum_of_rounded, _scaled))
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


def value(x: Tensor, dtype: torch.dtype) -> Tensor:
    out = like(x, dtype)
    launch(VALUE, [x], [out])
    return out


def finish(total: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    if bias is None:
        return value(total, dtype)
    out = like(total, dtype)
    launch(_FINISH, [total, bias], [out])
    return out


def plus(y: Tensor, x: Tensor) -> Tensor:
    out = like(y, y.dtype)
    launch(_PLUS, [y, x], [out], numbers=[_TYPES[y.dtype]])
    return out


def scaled(total: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    out = like(total, dtype)
    launch(_SCALED, [total], [out], numbers=[scale])
    return out
