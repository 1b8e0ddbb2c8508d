"""The native op set: PyTorch's fastest kernels, equal across layouts up to rounding.

Matrix products and attention compute in ``dtype``; norms, rotary tables and the loss compute in float32. Every
backward pass is written out, for three reasons: the gradients of input and weight stay separate, sums of gradients
have one order, and less is saved and fewer passes over memory are made than autograd would.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from equigrad.config.model import Experts
from equigrad.numerics import delta
from equigrad.numerics.attention import packed_attention
from equigrad.numerics.context import context_attention, context_delta_rule
from equigrad.numerics.cross_entropy import CrossEntropy, Distribution, Head
from equigrad.numerics.deferred import weight_gradient, weight_gradients
from equigrad.numerics.delta import Weights, gated_delta_rule
from equigrad.numerics.experts import TokenGate, combine, dispatch, expert_linears, route
from equigrad.numerics.function import call, forward_only
from equigrad.numerics.ops import AttentionLayer, DeltaLayer, Layer, RotaryTable, operands
from equigrad.numerics.routing import Dispatch, Routes
from equigrad.numerics.row import Row
from equigrad.parallel.collectives import gather, reduce_scatter
from equigrad.parallel.partition import Partition


class NativeOps:
    """See ``equigrad.numerics.ops.Ops`` for shapes and meaning."""

    parameter_dtype = torch.float32
    # Of the tensor ranks; here, so that they can be kept out of compiled blocks.
    gather, reduce_scatter = staticmethod(gather), staticmethod(reduce_scatter)

    def __init__(self, dtype: torch.dtype = torch.float32, saved_logits_bytes: int = 256 << 20) -> None:
        self.dtype = dtype
        self.saved_logits_bytes = saved_logits_bytes

    def embedding(self, ids: Tensor, layer: Layer, vocabulary: int, row: Row) -> Tensor:
        if row.tensor is None:
            return call(_Embedding, ids, layer.weight)
        first, stop = row.tensor.share(vocabulary)
        known = (ids >= first) & (ids < stop)
        found = call(_Embedding, (ids - first).where(known, 0), layer.weight)
        return self.reduce_scatter(found.masked_fill(~known[:, None], 0.0), row.tensor)

    def column_linears(self, x: Tensor, layers: Sequence[Layer], row: Row) -> tuple[Tensor, ...]:
        return _linears(self.gather(x, row.tensor), self.dtype, layers)

    def row_linear(self, x: Tensor, layer: Layer, row: Row) -> Tensor:
        if row.tensor is None:
            return _linears(x, self.dtype, [layer])[0]
        # A rank's part of ``x`` times its part of ``a`` is a part of a sum, and so is that times the whole ``b``.
        y = self.reduce_scatter(_linears(x, self.dtype, [layer], biased=False)[0], row.tensor)
        return y if layer.bias is None else call(_Bias, y, layer.bias)

    def joined_linear(self, a: Tensor, b: Tensor, layer: Layer, row: Row) -> Tensor:
        return _linears(torch.cat([a, b], 1), self.dtype, [layer])[0].to(a.dtype)

    def norm(self, x: Tensor, layer: Layer, eps: float, row: Row, zero_centred: bool = False) -> Tensor:
        return call(_Norm, x, layer.weight, eps, zero_centred)

    def gated_norm(self, x: Tensor, gate: Tensor, layer: Layer, eps: float, row: Row) -> Tensor:
        return call(_GatedNorm, x, gate, layer.weight, eps)

    def split(self, x: Tensor, sizes: Sequence[int], row: Row) -> tuple[Tensor, ...]:
        return x.split(list(sizes), -1)

    def rotary_table(self, frequencies: Tensor, scale: float, row: Row) -> RotaryTable:
        angles = rotary_angles(frequencies, row)
        return angles.cos() * scale, angles.sin() * scale

    def rotary(self, x: Tensor, table: RotaryTable, row: Row) -> Tensor:
        return call(_Rotary, x, *table)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer, row: Row, sinks: Tensor | None = None
    ) -> Tensor:
        if row.cache is not None:
            return row.cache.attention(q, k, v, layer, row, sinks)
        if row.context is not None:
            return context_attention(q, k, v, row, layer.window, sinks)
        return packed_attention(q, k, v, row.lengths, layer.window, sinks)

    def output_gate(self, x: Tensor, gate: Tensor, row: Row) -> Tensor:
        return call(_OutputGate, x, gate)

    def gated_delta_rule(
        self,
        x: Tensor,
        rates: Tensor,
        kernels: Sequence[Tensor],
        a_log: Tensor,
        dt_bias: Tensor,
        layer: DeltaLayer,
        row: Row,
    ) -> Tensor:
        query, key, value = kernels
        weights = Weights(query, key, value, a_log, dt_bias)
        if row.cache is not None:
            return row.cache.gated_delta_rule(delta, x, rates, weights, layer, row)
        if row.context is not None:
            return context_delta_rule(x, rates, weights, layer, row)
        return gated_delta_rule(x, rates, weights, layer, row.lengths)

    def gated(self, gate: Tensor, up: Tensor, row: Row) -> Tensor:
        return call(_Gated, gate, up)

    def clamped_gated(self, gate: Tensor, up: Tensor, alpha: float, limit: float, row: Row) -> Tensor:
        return call(_ClampedGated, gate, up, alpha, limit)

    def router(self, x: Tensor, layer: Layer, correction: Tensor | None, experts: Experts, row: Row) -> Routes:
        return route(x, layer, correction, experts)

    def dispatch(self, x: Tensor, routes: Routes, row: Row) -> tuple[Tensor, Dispatch]:
        # Tensor ranks cut every expert, so each needs all tokens. They are gathered before they are copied, once and
        # not k times; the price is that each tensor rank sends all of them to the other expert ranks.
        chosen = self.gather(routes.experts, row.tensor)
        return dispatch(self.gather(x, row.tensor), chosen, len(routes.load.counts), self.dtype, row.experts)

    def expert_column_linears(self, x: Tensor, layers: Sequence[Layer], at: Dispatch, row: Row) -> tuple[Tensor, ...]:
        return expert_linears(x, layers, at, True)

    def expert_row_linear(self, x: Tensor, layer: Layer, at: Dispatch, row: Row) -> Tensor:
        # The results of the tensor ranks are added, the bias with them: so one of them alone adds it.
        return expert_linears(x, [layer], at, row.tensor is None or row.tensor.rank == 0)[0]

    def combine(self, x: Tensor, routes: Routes, at: Dispatch, row: Row) -> Tensor:
        weights = self.gather(routes.weights, row.tensor)
        return self.reduce_scatter(combine(x, weights, at, row.experts), row.tensor)

    def token_gate(self, x: Tensor, layer: Layer, y: Tensor, row: Row) -> Tensor:
        return call(TokenGate, x, layer.weight, y)

    def add(self, a: Tensor, b: Tensor, row: Row) -> Tensor:
        return a + b

    def fork(self, x: Tensor, row: Row) -> tuple[Tensor, Tensor]:
        return call(Fork, x)

    def logits(self, x: Tensor, layer: Layer, at: Tensor | None, vocabulary: int, row: Row) -> Tensor:
        y = _linears(self._at(x, at, row), self.dtype, [layer])[0]
        if row.tensor is None:
            return y
        columns = Partition.contiguous(vocabulary, len(row.tensor.partition.ranges))
        return self.gather(y.t().contiguous(), replace(row.tensor, partition=columns)).t()

    def cross_entropy(
        self,
        x: Tensor,
        layer: Layer,
        labels: Tensor,
        at: Tensor | None,
        vocabulary: int,
        row: Row,
        temperature: float = 1.0,
    ) -> Tensor:
        adapter = layer.adapter
        # Asked here: inside a function's forward gradients are always off, and inputs say that they need one.
        budget = self.saved_logits_bytes if torch.is_grad_enabled() else -1
        scale = 1.0 if adapter is None else adapter.scale
        head = Head(self.dtype, budget, vocabulary, row.tensor, scale, temperature)
        x = self._at(x, at, row)
        if adapter is None:
            return call(CrossEntropy, x, layer.weight, labels, head, None, None)
        x, branch = call(Fork, x)
        (low,) = call(_Linears, branch, self.dtype, (1.0,), adapter.a, None, None, None)
        return call(CrossEntropy, x, layer.weight, labels, head, low, adapter.b)

    def distribution(self, logits: Tensor, temperature: Tensor) -> Distribution:
        return Distribution(logits, temperature)

    def total(self, terms: Tensor, most: int) -> Tensor:
        return terms.sum(dtype=torch.float64)

    def exp(self, x: Tensor) -> Tensor:
        return x.exp()

    def power(self, base: Tensor, exponent: Tensor) -> Tensor:
        return base**exponent

    def _at(self, x: Tensor, at: Tensor | None, row: Row) -> Tensor:
        """The tokens of the residual stream at which a head is wanted, whole on every tensor rank."""
        x = self.gather(x, row.tensor)
        return x if at is None else call(_Select, x, at)


def rotary_angles(frequencies: Tensor, row: Row) -> Tensor:
    """[T, D/2] float32, position times frequency; see ``Ops.rotary_table``."""
    if frequencies.ndim == 2:
        lengths = torch.tensor(row.lengths, dtype=torch.int64, device=frequencies.device)
        frequencies = frequencies.repeat_interleave(lengths, 0)
        frequencies = frequencies if row.context is None else row.context.take(frequencies)
    return row.positions[:, None].float() * frequencies


# Gradients of a product, apart from each other: what a split-backward pipeline schedule calls at different times.
def _input_gradient(dy: Tensor, weight: Tensor) -> Tensor:
    return dy @ weight.to(dy.dtype)


def _linear_weight_gradient(dy: Tensor, x: Tensor, like: Tensor) -> Tensor:
    return (dy.t() @ x).to(like.dtype)


def _bias_gradient(dy: Tensor, like: Tensor) -> Tensor:
    return dy.sum(0, dtype=like.dtype)


def _linears(x: Tensor, dtype: torch.dtype, layers: Sequence[Layer], biased: bool = True) -> tuple[Tensor, ...]:
    if forward_only():
        xq = x.to(dtype)
        each = ((layer.weight, layer.bias if biased else None, layer.adapter or (None, None, 1.0)) for layer in layers)
        return tuple(_linear(xq, weight, bias, *adapter)[0] for weight, bias, adapter in each)
    scales, flat = operands(layers, biased)
    return _Linears.apply(x, dtype, scales, *flat)


def _linear(
    xq: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor | None, b: Tensor | None, scale: float
) -> tuple[Tensor, Tensor | None]:
    """The output, and what the adapter's first matrix made of the input."""
    dtype = xq.dtype
    y = F.linear(xq, weight.to(dtype), None if bias is None else bias.to(dtype))
    if a is None or b is None:
        return y, None
    low = (xq @ a.to(dtype).t()).mul_(scale)
    return y.addmm_(low, b.to(dtype).t()), low


class _Linears(torch.autograd.Function):
    """One input, several weights; ``scales`` and ``operands`` as ``ops.operands`` makes them."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dtype: torch.dtype, scales: tuple[float, ...], *operands: Tensor | None
    ) -> tuple[Tensor, ...]:
        xq = x.to(dtype)
        outputs, lows = [], []
        for scale, weight, bias, a, b in zip(scales, *(operands[n::4] for n in range(4)), strict=True):
            assert weight is not None
            y, low = _linear(xq, weight, bias, a, b, scale)
            outputs.append(y)
            lows.append(low)
        # A frozen weight without an adapter does not need its input again.
        needed = any(ctx.needs_input_grad[3::4]) or any(ctx.needs_input_grad[5::4])
        ctx.save_for_backward(xq if needed else None, *lows)
        ctx.x_dtype, ctx.scales, ctx.operands = x.dtype, scales, operands
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        xq, *lows = ctx.saved_tensors
        dx: Tensor | None = None
        gradients: list[Tensor | None] = []
        for index, (dy, scale, low) in enumerate(zip(dys, ctx.scales, lows, strict=True)):
            weight, bias, a, b = ctx.operands[4 * index : 4 * index + 4]
            needs = ctx.needs_input_grad[3 + 4 * index : 7 + 4 * index]
            if ctx.needs_input_grad[0]:
                dx = _input_gradient(dy, weight) if dx is None else dx.addmm_(dy, weight.to(dy.dtype))
            computed: list[Callable[[], Tensor]] = [
                partial(_linear_weight_gradient, dy, xq, weight),
                partial(_bias_gradient, dy, bias),
            ]
            if a is not None:
                dlow = (dy @ b.to(dy.dtype)).mul_(scale)
                dx = None if dx is None else dx.addmm_(dlow, a.to(dlow.dtype))
                computed.append(partial(_linear_weight_gradient, dlow, xq, a))
                computed.append(partial(_linear_weight_gradient, dy, low, b))
            gradients += weight_gradients((weight, bias, a, b), needs, computed)
        return (None if dx is None else dx.to(ctx.x_dtype), None, None, *gradients)


class _Bias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.bias = bias
        return x + bias.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None]:
        needed = ctx.needs_input_grad[1]
        return dy, weight_gradient(ctx.bias, partial(_bias_gradient, dy, ctx.bias)) if needed else None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight = weight
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor | None]:
        (ids,), weight = ctx.saved_tensors, ctx.weight
        if not ctx.needs_input_grad[1]:
            return None, None
        return None, weight_gradient(weight, lambda: torch.zeros_like(weight).index_add_(0, ids, dy.to(weight.dtype)))


class _Norm(torch.autograd.Function):
    """Computes in float32 and saves the input and one scalar a row; Zhang and Sennrich, arXiv 1910.07467."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, zero_centred: bool) -> Tensor:
        xf = x.float()
        inverse = _inverse_rms(xf, eps)
        ctx.save_for_backward(x, inverse)
        ctx.weight, ctx.zero_centred = weight, zero_centred
        return (xf * inverse).mul_(weight + 1 if zero_centred else weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        (x, inverse), weight = ctx.saved_tensors, ctx.weight
        factor = weight + 1 if ctx.zero_centred else weight
        dx, channels = _norm_backward(dy.float(), x.float() * inverse, inverse, factor, ctx.needs_input_grad[1])
        dw = None if channels is None else weight_gradient(weight, lambda: channels.to(weight.dtype))
        return dx.to(x.dtype), dw, None, None


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    """``1 / sqrt(mean(x^2) + eps)`` over the last dimension, which is kept."""
    rms = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return rms.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _norm_backward(
    dy: Tensor, unit: Tensor, inverse: Tensor, weight: Tensor, needed: bool
) -> tuple[Tensor, Tensor | None]:
    """Of ``x`` and, if ``needed``, of the weight, in float32; ``unit``: ``x`` times ``inverse``."""
    product = dy * unit
    channels = product.flatten(0, -2).sum(0) if needed else None
    # dx = inverse * (dy w - unit * mean(dy w unit)); the mean is a product of the matrix dy*unit with w
    mean = (product @ weight.float()).div_(-unit.shape[-1]).unsqueeze_(-1)
    return torch.mul(dy, weight, out=product).addcmul_(unit, mean).mul_(inverse), channels


class _GatedNorm(torch.autograd.Function):
    """As ``_Norm``; saves the input, the gate and one scalar a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        xf = x.float()
        inverse = _inverse_rms(xf, eps)
        ctx.save_for_backward(x, gate, inverse)
        ctx.weight = weight
        return (xf * inverse).mul_(weight).mul_(F.silu(gate.reshape(x.shape).float())).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        (x, gate, inverse), weight = ctx.saved_tensors, ctx.weight
        dy, unit, opened = dy.float(), x.float() * inverse, gate.reshape(x.shape).float()
        dgate = torch.ops.aten.silu_backward(dy * unit * weight, opened).view(gate.shape)
        dx, channels = _norm_backward(dy * F.silu(opened), unit, inverse, weight, ctx.needs_input_grad[2])
        dw = None if channels is None else weight_gradient(weight, lambda: channels.to(weight.dtype))
        return dx.to(x.dtype), dgate.to(gate.dtype), dw, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    """Rotate the halves (a, b) of the last dimension to (a cos - sign b sin, b cos + sign a sin); what is beyond the
    table stays."""
    half = cos.shape[-1]
    a, b, rest = x.split_with_sizes([half, half, x.shape[-1] - 2 * half], -1)
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    if torch.compiler.is_compiling():  # the compiler fuses this, and mishandles writes into halves
        return torch.cat([a * cos - sign * b * sin, b * cos + sign * a * sin, rest], -1)
    y = torch.empty_like(x)
    ya, yb, same = y.split_with_sizes([half, half, rest.shape[-1]], -1)
    if rest.shape[-1]:
        same.copy_(rest)
    torch.mul(a, cos, out=ya).addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=yb).addcmul_(a, sin, value=sign)
    return y


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(dy, cos, sin, -1.0), None, None


class _Gated(torch.autograd.Function):
    """Saves gate and up only; silu(gate) is computed again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(dy * up, gate), F.silu(gate).mul_(dy)


class _OutputGate(torch.autograd.Function):
    """Saves both inputs only; computes in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(x, gate)
        return gate.float().sigmoid().mul_(x).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, gate = ctx.saved_tensors
        open_ = gate.float().sigmoid()
        dx = dy * open_
        return dx.to(x.dtype), (dx * x * (1 - open_)).to(gate.dtype)


class _ClampedGated(torch.autograd.Function):
    """Saves gate and up only; computes in float32."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.alpha, ctx.limit = alpha, limit
        g, u = gate.float().clamp(max=limit), up.float().clamp(-limit, limit)
        return torch.sigmoid(alpha * g).mul_(g).mul_(u.add_(1)).to(gate.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None]:
        gate, up = ctx.saved_tensors
        alpha, limit, dy = ctx.alpha, ctx.limit, dy.float()
        g, u = gate.float().clamp(max=limit), up.float().clamp(-limit, limit)
        open_ = torch.sigmoid(alpha * g)
        dgate = dy * (u + 1) * open_ * (1 + alpha * g * (1 - open_)) * (gate <= limit)
        dup = dy * g * open_ * (up.abs() <= limit)
        return dgate.to(gate.dtype), dup.to(up.dtype), None, None


class _Select(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.tokens = len(x)
        return x.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return dy.new_zeros(ctx.tokens, *dy.shape[1:]).index_copy_(0, index, dy), None


class Fork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.view_as(x), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        return first + second
