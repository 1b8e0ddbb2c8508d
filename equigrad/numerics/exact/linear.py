"""Linear layers and the embedding. A contraction that tensor ranks divide is added up in float64, and rounded after
that; the grids of its operands come from the largest values on all of those ranks."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from equigrad.numerics.deferred import weight_gradient, weight_gradients
from equigrad.numerics.exact.channels import Channels
from equigrad.numerics.exact.fused import fused
from equigrad.numerics.exact.grids import Side, operand_bits, rows, together, value
from equigrad.numerics.exact.layers import LayerGrids, grids_of
from equigrad.numerics.ops import Layer, operands
from equigrad.parallel.collectives import Split, gathered, reduce_scattered


@fused
def finish(total: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The end of a product: plus the bias, rounded."""
    total = total + 0.0 if bias is None else total + bias
    return total.to(dtype)


@fused
def plus(y: Tensor, x: Tensor) -> Tensor:
    """``y`` plus a product that is rounded first, both in the type of ``y``."""
    return (y.double() + x.to(y.dtype).double()).to(y.dtype)


@fused
def scaled(total: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """The end of a product, times a number."""
    return (total * scale + 0.0).to(dtype)


def group_of(split: Split | None) -> Any:
    """The process group, if ranks divide anything."""
    return None if split is None else split.group


def product(x: Tensor, weight: Tensor, length: int, across: Any = None) -> Tensor:
    """``x`` [T, K] times ``weight`` [N, K] transposed, exact, float64; K are ``length`` on the ranks ``across``."""
    a, b = operand_bits(length)
    (xq,), (wq,) = together([Side([x], -1, a), Side([weight], -1, b)], across)
    return xq @ wq.t()


def back_product(dy: Tensor, weight: Tensor, length: int, across: Any = None) -> Tensor:
    """``dy`` [T, N] times ``weight`` [N, K], exact, float64; N are ``length`` on the ranks ``across``."""
    a, b = operand_bits(length)
    (dyq,), (wq,) = together([Side([dy], -1, a), Side([weight], -2, b)], across)
    return dyq @ wq


def token_product(out: Channels, dy: Tensor, into: Channels, x: Tensor) -> Tensor:
    """``dy`` [T, N] transposed times ``x`` [T, K], the part that these tokens have in an exact sum over the step."""
    return out.round(dy).t() @ into.round(x)


def token_sum(out: Channels, dy: Tensor) -> Tensor:
    """The sum of ``dy`` [T, N] over tokens, likewise."""
    return out.round(dy).sum(0)


class ColumnLinears(torch.autograd.Function):
    """From the residual stream to features: one input [own tokens, K], several weights [N, K] -> [T, N] each."""

    @classmethod
    def of(cls, x: Tensor, layers: Sequence[Layer], split: Split | None, dtype: torch.dtype) -> tuple[Tensor, ...]:
        scales, flat = operands(layers)
        return cls.apply(x, split, dtype, tuple(map(grids_of, layers)), scales, *flat)

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        split: Split | None,
        dtype: torch.dtype,
        known: tuple[LayerGrids, ...],
        scales: tuple[float, ...],
        *operands: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.x_dtype = x.dtype
        x = gathered(x.to(dtype), split)
        bits = operand_bits(x.shape[1])
        xq, outputs, lows = rows(x, bits[0]), [], []
        for scale, weight, bias, a, b in zip(scales, *(operands[n::4] for n in range(4)), strict=True):
            assert weight is not None
            y = finish(xq @ rows(weight, bits[1]).t(), bias, dtype)
            low = None
            if a is not None and b is not None:
                low = scaled(xq @ rows(a, bits[1]).t(), scale, dtype)
                y = plus(y, product(low, b, low.shape[1]))
            outputs.append(y)
            lows.append(low)
        ctx.save_for_backward(x if any(ctx.needs_input_grad[5:]) else None, *lows)
        ctx.split, ctx.dtype, ctx.known, ctx.scales, ctx.operands = split, dtype, known, scales, operands
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        x, *lows = ctx.saved_tensors
        split, dtype, known = ctx.split, ctx.dtype, ctx.known
        across = group_of(split)
        dx = None
        if ctx.needs_input_grad[0]:
            a_bits, b_bits = operand_bits(sum(grids.outputs for grids in known))
            sides = Side(dys, -1, a_bits), Side(ctx.operands[::4], -2, b_bits)
            (dyq, *more), (wq, *others) = together(sides, across)
            total = dyq @ wq
            for dyq, wq in zip(more, others, strict=True):
                total.addmm_(dyq, wq)
            dx = value(reduce_scattered(total, split), dtype)
        gradients: list[Tensor | None] = []
        for n, (grids, scale, dy, low) in enumerate(zip(known, ctx.scales, dys, lows, strict=True)):
            weight, bias, a, b = ctx.operands[4 * n : 4 * n + 4]
            computed = [partial(_weight_part, grids, "", dy, known[0], x), partial(_bias_part, grids, dy)]
            if a is not None:
                dlow = back_product(dy, b, grids.outputs, across)
                dlow = scaled(reduce_scattered(dlow, split), scale, dtype)
                if dx is not None:
                    dx = plus(dx, back_product(dlow, a, a.shape[0]))
                own = x if split is None or x is None else split.take(x)
                computed.append(partial(_weight_part, grids, "a.", dlow, grids, own))
                computed.append(partial(_weight_part, grids, "b.", dy, grids, low))
            needs = ctx.needs_input_grad[5 + 4 * n : 9 + 4 * n]
            gradients += weight_gradients((weight, bias, a, b), needs, computed)
        return (None if dx is None else dx.to(ctx.x_dtype), None, None, None, None, *gradients)


def _weight_part(out: LayerGrids, matrix: str, dy: Tensor, into: LayerGrids, x: Tensor) -> Tensor:
    """``matrix``: ``a.`` or ``b.`` of an adapter, or nothing."""
    return token_product(out[f"{matrix}out"], dy, into[f"{matrix}in"], x)


def _bias_part(grids: LayerGrids, dy: Tensor) -> Tensor:
    return token_sum(grids["out"], dy)


class RowLinear(torch.autograd.Function):
    """From features back to the residual stream: [T, K] -> [own tokens, N]; tensor ranks divide K."""

    @classmethod
    def of(cls, x: Tensor, layer: Layer, split: Split | None, dtype: torch.dtype) -> Tensor:
        (scale,), flat = operands([layer])
        return cls.apply(x, split, dtype, grids_of(layer), scale, *flat)

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        split: Split | None,
        dtype: torch.dtype,
        grids: LayerGrids,
        scale: float,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor | None,
        b: Tensor | None,
    ) -> Tensor:
        x = x.to(dtype)
        across, bits = group_of(split), operand_bits(grids.inputs)
        matrices = [Side([m], -1, bits[1]) for m in (weight, a) if m is not None]
        (xq,), (wq,), *of_a = together([Side([x], -1, bits[0]), *matrices], across)
        y = finish(reduce_scattered(xq @ wq.t(), split), bias, dtype)
        low = None
        if a is not None and b is not None:
            low = scaled(reduce_scattered(xq @ of_a[0][0].t(), split), scale, dtype)
            y = plus(y, product(low, b, low.shape[1]))
        ctx.save_for_backward(x if any(ctx.needs_input_grad[5:]) else None, low)
        ctx.split, ctx.grids, ctx.scale, ctx.operands = split, grids, scale, (weight, bias, a, b)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, low = ctx.saved_tensors
        split, grids, (weight, bias, a, b) = ctx.split, ctx.grids, ctx.operands
        whole = gathered(dy, split)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = value(back_product(whole, weight, grids.outputs), dy.dtype)
        computed = [partial(_weight_part, grids, "", whole, grids, x), partial(_bias_part, grids, dy)]
        if a is not None:
            dlow = gathered(scaled(back_product(dy, b, grids.outputs), ctx.scale, dy.dtype), split)
            if dx is not None:
                dx = plus(dx, back_product(dlow, a, a.shape[0]))
            computed.append(partial(_weight_part, grids, "a.", dlow, grids, x))
            computed.append(partial(_weight_part, grids, "b.", dy, grids, low))
        gradients = weight_gradients((weight, bias, a, b), ctx.needs_input_grad[5:9], computed)
        return (dx, None, None, None, None, *gradients)


class Embedding(torch.autograd.Function):
    """Rows of a table, and zeros for tokens that are not ``known`` here. Where the head is the same table, the gradient
    is one sum with the head's: see ``cross_entropy``."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, known: Tensor | None, weight: Tensor, grids: LayerGrids) -> Tensor:
        ctx.save_for_backward(ids, known)
        ctx.weight, ctx.grids = weight, grids
        found = weight.index_select(0, ids)
        if known is not None:
            found = found.masked_fill(~known[:, None], 0.0)
        return value(found, torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, None, Tensor | None, None]:
        (ids, known), weight = ctx.saved_tensors, ctx.weight
        if not ctx.needs_input_grad[2]:
            return None, None, None, None
        compute = partial(_embedding_gradient, dy, ids, known, weight, ctx.grids)
        return None, None, weight_gradient(weight, compute), None


def _embedding_gradient(dy: Tensor, ids: Tensor, known: Tensor | None, weight: Tensor, grids: LayerGrids) -> Tensor:
    gradient = torch.zeros_like(weight)
    addend = grids["further" if "further" in grids.channels else "in"].round(dy)
    if known is not None:
        addend = addend.masked_fill(~known[:, None], 0.0)
    return gradient.index_add_(0, ids, addend)
