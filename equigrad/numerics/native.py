"""The native op set: PyTorch's fastest kernels, equal across layouts up to rounding.

Matrix products and attention compute in ``dtype``; norms, rotary tables and the loss compute in float32. Every
backward pass is written out, for three reasons: the gradients of input and weight stay separate, sums of gradients
have one order, and less is saved and fewer passes over memory are made than autograd would.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from equigrad.config.model import Experts
from equigrad.numerics.attention import packed_attention
from equigrad.numerics.context import context_attention
from equigrad.numerics.deferred import is_deferred, weight_gradient
from equigrad.numerics.experts import ExpertLinears, TokenGate, combine, dispatch, pairs, route
from equigrad.numerics.ops import AttentionLayer, RotaryTable
from equigrad.numerics.routing import Dispatch, Routes
from equigrad.numerics.row import Row
from equigrad.parallel.collectives import Split, gather, reduce_scatter
from equigrad.parallel.partition import Partition, part_of

# Logits are made in chunks of about this many elements (4 MB in float32), but of at least 256 tokens, so that the
# product stays efficient.
_CHUNK_ELEMENTS = 1 << 20


class NativeOps:
    """See ``equigrad.numerics.ops.Ops`` for shapes and meaning."""

    def __init__(self, dtype: torch.dtype = torch.float32, saved_logits_bytes: int = 256 << 20) -> None:
        self.dtype = dtype
        self.saved_logits_bytes = saved_logits_bytes

    def embedding(self, ids: Tensor, weight: Tensor, vocabulary: int, row: Row) -> Tensor:
        if row.tensor is None:
            return _Embedding.apply(ids, weight)
        first, stop = _own_rows(vocabulary, row.tensor)
        known = (ids >= first) & (ids < stop)
        found = _Embedding.apply((ids - first).where(known, 0), weight)
        return reduce_scatter(found.masked_fill(~known[:, None], 0.0), row.tensor)

    def column_linears(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], row: Row
    ) -> tuple[Tensor, ...]:
        return _Linears.apply(gather(x, row.tensor), self.dtype, *pairs(weights, biases))

    def row_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, row: Row) -> Tensor:
        if row.tensor is None:
            return _Linears.apply(x, self.dtype, weight, bias)[0]
        y = reduce_scatter(_Linears.apply(x, self.dtype, weight, None)[0], row.tensor)
        return y if bias is None else _Bias.apply(y, bias)

    def norm(self, x: Tensor, weight: Tensor, eps: float, row: Row) -> Tensor:
        return _Norm.apply(x, weight, eps)

    def rotary_table(self, frequencies: Tensor, scale: float, row: Row) -> RotaryTable:
        if frequencies.ndim == 2:
            lengths = torch.tensor(row.lengths, device=frequencies.device)
            frequencies = frequencies.repeat_interleave(lengths, 0)
            frequencies = frequencies if row.context is None else row.context.take(frequencies)
        angles = row.positions[:, None].float() * frequencies
        return angles.cos() * scale, angles.sin() * scale

    def rotary(self, x: Tensor, table: RotaryTable, row: Row) -> Tensor:
        return _Rotary.apply(x, *table)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer, row: Row, sinks: Tensor | None = None
    ) -> Tensor:
        if row.cache is not None:
            return row.cache.attention(q, k, v, layer, row, sinks)
        if row.context is not None:
            return context_attention(q, k, v, row, layer.window, sinks)
        return packed_attention(q, k, v, row.lengths, layer.window, sinks)

    def gated(self, gate: Tensor, up: Tensor, row: Row) -> Tensor:
        return _Gated.apply(gate, up)

    def clamped_gated(self, gate: Tensor, up: Tensor, alpha: float, limit: float, row: Row) -> Tensor:
        return _ClampedGated.apply(gate, up, alpha, limit)

    def router(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, correction: Tensor | None, experts: Experts, row: Row
    ) -> Routes:
        return route(x, weight, bias, correction, experts)

    def dispatch(self, x: Tensor, routes: Routes, row: Row) -> tuple[Tensor, Dispatch]:
        # Tensor ranks cut every expert, so each needs all tokens. They are gathered before they are copied, once and
        # not k times; the price is that each tensor rank sends all of them to the other expert ranks.
        chosen = gather(routes.experts, row.tensor)
        return dispatch(gather(x, row.tensor), chosen, len(routes.load.counts), self.dtype, row.experts)

    def expert_column_linears(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], at: Dispatch, row: Row
    ) -> tuple[Tensor, ...]:
        return ExpertLinears.apply(x, at.ends, True, *pairs(weights, biases))

    def expert_row_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, at: Dispatch, row: Row) -> Tensor:
        # The results of the tensor ranks are added, the bias with them: so one of them alone adds it.
        return ExpertLinears.apply(x, at.ends, row.tensor is None or row.tensor.rank == 0, weight, bias)[0]

    def combine(self, x: Tensor, routes: Routes, at: Dispatch, row: Row) -> Tensor:
        return reduce_scatter(combine(x, gather(routes.weights, row.tensor), at, row.experts), row.tensor)

    def token_gate(self, x: Tensor, weight: Tensor, y: Tensor, row: Row) -> Tensor:
        return TokenGate.apply(x, weight, y)

    def add(self, a: Tensor, b: Tensor, row: Row) -> Tensor:
        return a + b

    def fork(self, x: Tensor, row: Row) -> tuple[Tensor, Tensor]:
        return _Fork.apply(x)

    def logits(self, x: Tensor, weight: Tensor, at: Tensor | None, vocabulary: int, row: Row) -> Tensor:
        y = _Linears.apply(_at(x, at, row), self.dtype, weight, None)[0]
        if row.tensor is None:
            return y
        columns = Partition.contiguous(vocabulary, len(row.tensor.partition.ranges))
        return gather(y.t().contiguous(), replace(row.tensor, partition=columns)).t()

    def cross_entropy(
        self, x: Tensor, weight: Tensor, labels: Tensor, at: Tensor | None, vocabulary: int, row: Row
    ) -> Tensor:
        # Asked here: inside a function's forward gradients are always off, and inputs say that they need one.
        budget = self.saved_logits_bytes if torch.is_grad_enabled() else -1
        head = _Head(self.dtype, budget, vocabulary, row.tensor)
        return _CrossEntropy.apply(_at(x, at, row), weight, labels, head)


def _at(x: Tensor, at: Tensor | None, row: Row) -> Tensor:
    """The tokens of the residual stream at which a head is wanted, whole on every tensor rank."""
    x = gather(x, row.tensor)
    return x if at is None else _Select.apply(x, at)


def _own_rows(vocabulary: int, tensor: Split | None) -> tuple[int, int]:
    """The rows of an embedding or a head that are on this rank."""
    return (0, vocabulary) if tensor is None else part_of(vocabulary, len(tensor.partition.ranges), tensor.rank)


# Gradients of a product, apart from each other: what a split-backward pipeline schedule calls at different times.
def _input_gradient(dy: Tensor, weight: Tensor) -> Tensor:
    return dy @ weight.to(dy.dtype)


def _linear_weight_gradient(dy: Tensor, x: Tensor, like: Tensor) -> Tensor:
    return (dy.t() @ x).to(like.dtype)


def _bias_gradient(dy: Tensor, like: Tensor) -> Tensor:
    return dy.sum(0, dtype=like.dtype)


class _Linears(torch.autograd.Function):
    """One input, several weights (and biases): ``pairs`` is weight, bias, weight, bias, ..."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, *pairs: Tensor | None) -> tuple[Tensor, ...]:
        xq = x.to(dtype)
        outputs = []
        for weight, bias in zip(pairs[::2], pairs[1::2], strict=True):
            assert weight is not None
            wt = weight.to(dtype).t()
            outputs.append(xq @ wt if bias is None else torch.addmm(bias.to(dtype), xq, wt))
        ctx.save_for_backward(xq, *pairs)
        ctx.x_dtype = x.dtype
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        xq, *pairs = ctx.saved_tensors
        dx: Tensor | None = None
        gradients: list[Tensor | None] = []
        for index, dy in enumerate(dys):
            weight, bias = pairs[2 * index], pairs[2 * index + 1]
            needs_weight, needs_bias = ctx.needs_input_grad[2 + 2 * index : 4 + 2 * index]
            if ctx.needs_input_grad[0]:
                dx = _input_gradient(dy, weight) if dx is None else dx.addmm_(dy, weight.to(dy.dtype))
            of_weight = partial(_linear_weight_gradient, dy, xq, weight)
            gradients.append(weight_gradient(weight, of_weight) if needs_weight else None)
            gradients.append(weight_gradient(bias, partial(_bias_gradient, dy, bias)) if needs_bias else None)
        return (None if dx is None else dx.to(ctx.x_dtype), None, *gradients)


class _Bias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(bias)
        return x + bias.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None]:
        (bias,) = ctx.saved_tensors
        return dy, weight_gradient(bias, partial(_bias_gradient, dy, bias))


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(ids, weight)
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor | None]:
        ids, weight = ctx.saved_tensors
        return None, weight_gradient(weight, lambda: torch.zeros_like(weight).index_add_(0, ids, dy.to(weight.dtype)))


class _Norm(torch.autograd.Function):
    """Computes in float32 and saves the input and one scalar a row; Zhang and Sennrich, arXiv 1910.07467."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        xf = x.float()
        rms = torch.linalg.vector_norm(xf, dim=-1, keepdim=True)
        inverse = rms.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (xf * inverse).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, inverse = ctx.saved_tensors
        dy, unit = dy.float(), x.float() * inverse
        product = dy * unit
        channels = product.flatten(0, -2).sum(0)
        dw = weight_gradient(weight, lambda: channels.to(weight.dtype))
        # dx = inverse * (dy w - unit * mean(dy w unit)); the mean is a product of the matrix dy*unit with w
        mean = (product @ weight.float()).div_(-x.shape[-1]).unsqueeze_(-1)
        dx = torch.mul(dy, weight, out=product).addcmul_(unit, mean).mul_(inverse)
        return dx.to(x.dtype), dw, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    """Rotate the halves (a, b) of the last dimension to (a cos - sign b sin, b cos + sign a sin)."""
    a, b = x.chunk(2, -1)
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    if torch.compiler.is_compiling():  # the compiler fuses this, and mishandles writes into halves
        return torch.cat([a * cos - sign * b * sin, b * cos + sign * a * sin], -1)
    y = torch.empty_like(x)
    ya, yb = y.chunk(2, -1)
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


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.view_as(x), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        return first + second


@dataclass(frozen=True)
class _Head:
    """How a cross-entropy is computed.

    dtype:      operands of the products
    budget:     bytes up to which p - onehot is kept for the backward pass
    vocabulary: columns of the logits on all ranks together
    tensor:     the ranks that share them; None: they are all here
    """

    dtype: torch.dtype
    budget: int
    vocabulary: int
    tensor: Split | None

    def probabilities(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Softmax, in place, and the loss [n] of each label."""
        if self.tensor is None:
            label = logits.gather(1, labels[:, None])
            top, where = logits.max(1, keepdim=True)
            softmax = torch.softmax(logits, 1, out=logits)
            # log sum exp = top - log p(top), and p(top) >= 1/V never underflows
            return softmax, torch.sub(top - softmax.gather(1, where).log_(), label).squeeze(1)
        own, here = self.own(labels)
        top = logits.amax(1)
        dist.all_reduce(top, dist.ReduceOp.MAX, self.tensor.group)
        label = logits.gather(1, own[:, None]).squeeze(1).where(here, 0.0)
        exponentials = logits.sub_(top[:, None]).exp_()
        sums = torch.stack([exponentials.sum(1), label])
        dist.all_reduce(sums, group=self.tensor.group)
        return exponentials.div_(sums[0, :, None]), top + sums[0].log() - sums[1]

    def own(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Each label's column on this rank, and whether it is one; 0 where it is not."""
        first, stop = _own_rows(self.vocabulary, self.tensor)
        here = (labels >= first) & (labels < stop)
        return (labels - first).where(here, 0), here

    def errors(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """p - onehot, in place, and the loss. Subtracted in float32 before anything is rounded: near p = 1 the
        difference is all there is."""
        softmax, loss = self.probabilities(logits, labels)
        own, here = (labels, None) if self.tensor is None else self.own(labels)
        one = torch.ones((), dtype=logits.dtype, device=logits.device).expand(len(labels))
        minus = -one if here is None else -one.where(here, 0.0)
        return softmax.scatter_add_(1, own[:, None], minus[:, None]), loss

    def chunks(self, tokens: int) -> list[slice]:
        """The same on all ranks that share the vocabulary, for each chunk costs them two sums."""
        size = max(256, _CHUNK_ELEMENTS // self.vocabulary)
        return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


class _CrossEntropy(torch.autograd.Function):
    """Chunked over tokens. What the backward pass needs, p - onehot with p = softmax(x w^T), is kept while it fits the
    budget, else made again. The incoming gradient scales rows of x and dx, which are V/H times smaller."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, head: _Head) -> Tensor:
        xq, wq = x.to(head.dtype), weight.to(head.dtype)
        tokens = x.shape[0]
        needed = any(ctx.needs_input_grad[:2])
        keep = needed and tokens * head.vocabulary * 4 <= head.budget
        kept = torch.empty(tokens if keep else 0, len(weight), device=x.device)
        # A tensor of its own, not a view: FSDP warns of modules that return views.
        loss = torch.empty(tokens, device=x.device)
        for part in head.chunks(tokens):
            logits = _product(xq[part], wq, kept[part] if keep else None)
            step = head.errors if keep else head.probabilities
            loss[part] = step(logits, labels[part])[1]
        ctx.save_for_backward(xq, weight, labels, kept)
        ctx.x_dtype, ctx.head, ctx.keep = x.dtype, head, keep
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        weight = ctx.saved_tensors[1]
        gradients = partial(_head_gradients, ctx.saved_tensors, ctx.keep, ctx.head, dloss)
        if needs_weight and is_deferred(weight):
            dx, _ = gradients(needs_x, False)
            dw = weight_gradient(weight, lambda: cast(Tensor, gradients(False, True)[1]))
        else:
            dx, dw = gradients(needs_x, needs_weight)
        return None if dx is None else dx.to(ctx.x_dtype), dw, None, None


def _head_gradients(
    saved: tuple[Tensor, ...], keep: bool, head: _Head, dloss: Tensor, needs_x: bool, needs_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the input (float32) and of the weight of a cross-entropy, or of one of them."""
    xq, weight, labels, kept = saved
    wq, d = weight.to(xq.dtype), dloss[:, None]
    scaled = (xq * d).to(xq.dtype)
    dx = torch.empty(xq.shape, device=xq.device) if needs_x else None
    dw = torch.zeros_like(weight) if needs_weight else None
    # What is kept needs no chunks: each would read and write the weight's whole gradient once more.
    for part in [slice(None)] if keep else head.chunks(len(labels)):
        if keep:
            error = kept[part].to(xq.dtype)
        else:
            error = head.errors(_product(xq[part], wq, None), labels[part])[0].to(xq.dtype)
        if dx is not None:
            _product(error, wq.t(), dx[part])
        if dw is not None:
            _accumulate_product(dw, error.t(), scaled[part])
    return None if dx is None else dx.mul_(d), dw


def _product(x: Tensor, weight: Tensor, out: Tensor | None) -> Tensor:
    """``x weight^T`` in float32, written into ``out`` if given."""
    if x.dtype == torch.float32:
        return torch.mm(x, weight.t(), out=out)
    product = x @ weight.t()
    return product.float() if out is None else out.copy_(product)


def _accumulate_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b
