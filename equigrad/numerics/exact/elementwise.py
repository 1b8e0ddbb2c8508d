"""What lies between reductions: norms, rotary positions, gates. Every element of a result is a function of a few
elements, computed in float64 by IEEE operations alone and rounded to the value type.

Where a product is added to something, it is one of two values of at most 24 bits, and exact: contracted or not, the
sum is the same.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from equigrad.numerics.deferred import weight_gradient
from equigrad.numerics.exact.elementary import quotient, sigmoid, sqrt
from equigrad.numerics.exact.fused import fused
from equigrad.numerics.exact.grids import sum_last
from equigrad.numerics.exact.layers import LayerGrids


def short(x: Tensor) -> Tensor:
    """Rounded to float32, carried on in float64."""
    return x.float().double()


@fused
def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    x = x.double()
    return (1 / sqrt(quotient(sum_last(x * x), x.shape[-1]) + eps)).float()


@fused
def _normed(x: Tensor, inverse: Tensor, weight: Tensor, zero_centred: bool) -> Tensor:
    factor = weight + 1 if zero_centred else weight
    return (short(x.double() * inverse.double()) * factor).to(x.dtype)


@fused
def _norm_backward(dy: Tensor, x: Tensor, inverse: Tensor, weight: Tensor, zero_centred: bool) -> tuple[Tensor, Tensor]:
    """Of the input, float32, and at each token of the weight, float64."""
    dy, inverse = dy.double(), inverse.double()
    unit = short(x.double() * inverse)
    g = short(dy * (weight + 1 if zero_centred else weight))
    mean = short(quotient(sum_last(g * unit), unit.shape[-1]))
    return (inverse * (g - unit * mean) + 0.0).float(), dy * unit


class Norm(torch.autograd.Function):
    """Saves the input and one scalar a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, zero_centred: bool, grids: LayerGrids) -> Tensor:
        inverse = _inverse_rms(x, eps)
        ctx.save_for_backward(x, inverse)
        ctx.weight, ctx.zero_centred, ctx.grids = weight, zero_centred, grids
        return _normed(x, inverse, weight, zero_centred)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, inverse), weight = ctx.saved_tensors, ctx.weight
        dx, terms = _norm_backward(dy, x, inverse, weight, ctx.zero_centred)
        dw = weight_gradient(weight, partial(_sum, ctx.grids, terms)) if ctx.needs_input_grad[1] else None
        return dx.to(x.dtype), dw, None, None, None


def _sum(grids: LayerGrids, terms: Tensor) -> Tensor:
    """Over tokens, and heads if there are any."""
    return grids["sum"].round(terms.flatten(0, -2)).sum(0)


@fused
def _opened(unit: Tensor, gate: Tensor) -> Tensor:
    gate = gate.double()
    return (unit.double() * short(gate * short(sigmoid(gate)))).to(unit.dtype)


@fused
def _opened_backward(dy: Tensor, unit: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Of the product ``unit silu(gate)``."""
    dy, gate = dy.double(), gate.double()
    open_ = short(sigmoid(gate))
    slope = short(open_ * (1 + gate * short(1 - open_)))
    dunit = dy * short(gate * open_)
    return (dunit + 0.0).to(unit.dtype), (short(dy * unit.double()) * slope + 0.0).to(unit.dtype)


class Gated(torch.autograd.Function):
    """``silu(gate) up``; saves both."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _opened(up, gate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        dup, dgate = _opened_backward(dy, up, gate)
        return dgate, dup


@fused
def _clamped(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    g, u = gate.double().clamp(max=limit), up.double().clamp(-limit, limit)
    return (short(g * short(sigmoid(alpha * g))) * short(u + 1)).to(gate.dtype)


@fused
def _clamped_backward(dy: Tensor, gate: Tensor, up: Tensor, alpha: float, limit: float) -> tuple[Tensor, Tensor]:
    dy, g, u = dy.double(), gate.double().clamp(max=limit), up.double().clamp(-limit, limit)
    open_ = short(sigmoid(alpha * g))
    slope = short(open_ * (1 + short(alpha * g) * short(1 - open_)))
    dgate = torch.where(gate.double() <= limit, short(dy * short(u + 1)) * slope, 0.0)
    dup = torch.where(up.double().abs() <= limit, dy * short(g * open_), 0.0)
    return (dgate + 0.0).to(gate.dtype), (dup + 0.0).to(up.dtype)


class ClampedGated(torch.autograd.Function):
    """gpt-oss; saves both inputs."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.alpha, ctx.limit = alpha, limit
        return _clamped(gate, up, alpha, limit)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None]:
        gate, up = ctx.saved_tensors
        return *_clamped_backward(dy, gate, up, ctx.alpha, ctx.limit), None, None


@fused
def _times_sigmoid(x: Tensor, gate: Tensor) -> Tensor:
    return (x.double() * short(sigmoid(gate.double()))).to(x.dtype)


@fused
def _times_sigmoid_backward(dy: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    dy, open_ = dy.double(), short(sigmoid(gate.double()))
    slope = short(open_ * short(1 - open_))
    return (dy * open_ + 0.0).to(x.dtype), (short(dy * x.double()) * slope + 0.0).to(gate.dtype)


class OutputGate(torch.autograd.Function):
    """``x sigmoid(gate)``; saves both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(x, gate)
        return _times_sigmoid(x, gate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        return _times_sigmoid_backward(dy, *ctx.saved_tensors)


class GatedNorm(torch.autograd.Function):
    """``norm(x) silu(gate)``; saves the input, the gate and one scalar a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float, grids: LayerGrids) -> Tensor:
        inverse = _inverse_rms(x, eps)
        ctx.save_for_backward(x, gate, inverse)
        ctx.weight, ctx.grids = weight, grids
        return _opened(_normed(x, inverse, weight, False), gate.reshape(x.shape))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, gate, inverse), weight = ctx.saved_tensors, ctx.weight
        normed = _normed(x, inverse, weight, False)
        dnormed, dgate = _opened_backward(dy, normed, gate.reshape(x.shape))
        dx, terms = _norm_backward(dnormed, x, inverse, weight, False)
        dw = weight_gradient(weight, partial(_sum, ctx.grids, terms)) if ctx.needs_input_grad[2] else None
        return dx.to(x.dtype), dgate.view(gate.shape), dw, None, None


@fused
def _rotated(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    half = cos.shape[-1]
    a, b, rest = x.double().split([half, half, x.shape[-1] - 2 * half], -1)
    cos, sin = cos[:, None].double(), sin[:, None].double() * sign
    return (torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1) + 0.0).to(x.dtype)


class Rotary(torch.autograd.Function):
    """The two halves of each head, rotated by the table."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(dy, cos, sin, -1.0), None, None
