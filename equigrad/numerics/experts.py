"""A mixture of experts in native numerics: choice, exchange, grouped products, sum.

Every token is computed by every expert that it chose: none is dropped, and no room is padded. What an expert gets, and
the order in which the results of a token's k choices are added, depend on the token alone and not on who computed them.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from equigrad.config.model import Experts
from equigrad.numerics.deferred import weight_gradient, weight_gradients
from equigrad.numerics.ops import Layer, operands
from equigrad.numerics.routing import Dispatch, Exchange, Load, Routes
from equigrad.parallel.collectives import Axis, all_to_all, exchange
from equigrad.parallel.partition import even


def route(x: Tensor, layer: Layer, correction: Tensor | None, experts: Experts) -> Routes:
    """See ``Ops.router``."""
    weights, probability, chosen, counts = _Router.apply(x, layer.weight, layer.bias, correction, experts)
    return Routes(chosen, weights, Load(counts, probability))


class _Router(torch.autograd.Function):
    """All in float32, for a choice hangs on small differences."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, correction: Tensor | None, experts: Experts
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        logits = x.float() @ weight.float().t()
        if bias is not None:
            logits += bias.float()
        softmax = experts.scoring_func == "softmax"
        scores = logits.softmax(1) if softmax else logits.sigmoid()
        ranked = scores if correction is None else scores + correction
        # A stable sort and not topk, which promises nothing of equals.
        chosen = ranked.sort(dim=1, descending=True, stable=True).indices[:, : experts.num_experts_per_tok].contiguous()
        weights = scores.gather(1, chosen)
        if experts.norm_topk_prob:
            weights = weights / _total(weights)
        counts = torch.zeros(len(weight), dtype=torch.int64, device=x.device)
        counts.scatter_add_(0, chosen.flatten(), torch.ones_like(chosen).flatten())
        probability = (scores if softmax else scores / _total(scores)).sum(0)
        ctx.mark_non_differentiable(chosen, counts)
        ctx.save_for_backward(x, scores, chosen)
        ctx.weight, ctx.bias, ctx.experts = weight, bias, experts
        return weights * experts.routed_scaling_factor, probability, chosen, counts

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dweights: Tensor, dprobability: Tensor, *_: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        (x, scores, chosen), weight, bias = ctx.saved_tensors, ctx.weight, ctx.bias
        dchosen = dweights * ctx.experts.routed_scaling_factor
        if ctx.experts.norm_topk_prob:
            dchosen = _normalised_gradient(scores.gather(1, chosen), dchosen)
        dscores = torch.zeros_like(scores).scatter_(1, chosen, dchosen)
        if ctx.experts.scoring_func == "softmax":
            dscores += dprobability
            dlogits = scores * (dscores - (dscores * scores).sum(1, keepdim=True))
        else:
            dscores += _normalised_gradient(scores, dprobability.expand_as(scores))
            dlogits = dscores * scores * (1 - scores)
        dx = (dlogits @ weight.float()).to(x.dtype) if ctx.needs_input_grad[0] else None
        dw = db = None
        if ctx.needs_input_grad[1]:
            dw = weight_gradient(weight, lambda: (dlogits.t() @ x.float()).to(weight.dtype))
        if ctx.needs_input_grad[2]:
            db = weight_gradient(bias, lambda: dlogits.sum(0).to(bias.dtype))
        return dx, dw, db, None, None


def _total(scores: Tensor) -> Tensor:
    """The sum of each row; sigmoids may all have vanished."""
    return scores.sum(1, keepdim=True) + 1e-20


def _normalised_gradient(scores: Tensor, gradient: Tensor) -> Tensor:
    """The gradient of ``scores``, given that of ``scores / total``."""
    total = _total(scores)
    return (gradient - (gradient * scores / total).sum(1, keepdim=True)) / total


def dispatch(x: Tensor, chosen: Tensor, experts: int, dtype: torch.dtype, axis: Axis) -> tuple[Tensor, Dispatch]:
    """Copies of the tokens ``x`` [T, H], in ``dtype``, to the ranks of ``axis`` that have the ``experts`` chosen."""
    plan = plan_dispatch(chosen, experts, axis)
    copies = _Copies.apply(x, plan.order, plan.place, dtype)
    if plan.exchange is None:
        return copies, plan
    assert axis.group is not None
    received = all_to_all(copies, plan.exchange.sent, plan.exchange.received, axis.group)
    return _Permuted.apply(received, plan.exchange.arrange, plan.exchange.back), plan


def plan_dispatch(chosen: Tensor, experts: int, axis: Axis) -> Dispatch:
    """How copies of tokens get to the experts that they chose, ``chosen`` [T, k]."""
    sorted_, order = chosen.flatten().sort(stable=True, dim=0)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    ends = torch.searchsorted(sorted_, torch.arange(experts, device=order.device), right=True)
    sent = ends.diff(prepend=ends.new_zeros(1))
    if axis.group is None:
        return Dispatch(order, place.view_as(chosen), ends.int(), None)
    ends, exchanged = _exchange_counts(sent, axis)
    return Dispatch(order, place.view_as(chosen), ends, exchanged)


def _exchange_counts(counts: Tensor, axis: Axis) -> tuple[Tensor, Exchange]:
    """From the copies here for each expert of all to the copies on their way, and the ends of the own experts' runs."""
    assert axis.group is not None
    owned = even(len(counts), axis.size)
    theirs = counts.split(owned)
    own = torch.stack(exchange(theirs, [(owned[axis.rank],)] * axis.size, axis.group))
    # One wait for both: the host must know the sizes of what it is about to send and receive.
    sent, received = torch.stack([torch.stack([part.sum() for part in theirs]), own.sum(1)]).tolist()
    # The runs arrive sender after sender, each by expert; they are wanted expert after expert, each by sender.
    run = torch.arange(own.numel(), device=own.device).view_as(own).t().flatten()
    lengths = own.flatten()[run]
    starts = (own.flatten().cumsum(0) - own.flatten())[run]
    offset = starts - (lengths.cumsum(0) - lengths)
    total = sum(received)
    arrange = torch.arange(total, device=own.device) + offset.repeat_interleave(lengths, output_size=total)
    back = torch.empty_like(arrange).scatter_(0, arrange, torch.arange(total, device=own.device))
    return own.sum(0).cumsum(0).int(), Exchange(sent, received, arrange, back)


def combine(x: Tensor, weights: Tensor, plan: Dispatch, axis: Axis) -> Tensor:
    """The experts' results [copies, H] back to the tokens: their sum [T, H], weighted by ``weights`` [T, k]."""
    if plan.exchange is not None:
        assert axis.group is not None
        x = _Permuted.apply(x, plan.exchange.back, plan.exchange.arrange)
        x = all_to_all(x, plan.exchange.received, plan.exchange.sent, axis.group)
    return _WeightedSum.apply(x, weights, plan.order, plan.place)


class _Copies(torch.autograd.Function):
    """k copies of each token, sorted by expert; their gradients are added in the order of the token's choices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, place: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(place)
        ctx.x_dtype = x.dtype
        return x.to(dtype).index_select(0, order // place.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        (place,) = ctx.saved_tensors
        first, *rest = place.unbind(1)
        dx = dy.index_select(0, first).float()
        for choice in rest:
            dx += dy.index_select(0, choice)
        return dx.to(ctx.x_dtype), None, None, None


class _Permuted(torch.autograd.Function):
    """``x[index]``, where ``index`` is a permutation and ``inverse`` its inverse: no gradient is ever added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return dy.index_select(0, inverse), None, None


class _WeightedSum(torch.autograd.Function):
    """In float32, the first choice of a token first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(x, weights, order, place)
        first, *rest = place.unbind(1)
        total = x.index_select(0, first) * weights[:, :1]
        for j, choice in enumerate(rest, 1):
            total.addcmul_(x.index_select(0, choice), weights[:, j : j + 1])
        return total.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weights, order, place = ctx.saved_tensors
        copies = dy.index_select(0, order // place.shape[1])
        dweights = (copies.float() * x).sum(1).index_select(0, place.flatten()).view_as(weights)
        return (copies * weights.flatten()[order, None]).to(x.dtype), dweights, None, None


def expert_linears(x: Tensor, layers: Sequence[Layer], at: Dispatch, biased: bool) -> tuple[Tensor, ...]:
    """See ``Ops.expert_column_linears``; ``biased``: whether biases are added, which have a gradient in any case."""
    scales, flat = operands(layers)
    return _ExpertLinears.apply(x, at.ends, biased, scales, *flat)


class _ExpertLinears(torch.autograd.Function):
    """One input, sorted by expert; ``scales`` and ``operands`` as ``ops.operands`` makes them. An expert without tokens
    has zeros for a gradient, and so has a bias that is not ``added``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, ends: Tensor, added: bool, scales: tuple[float, ...], *operands: Tensor | None
    ) -> tuple[Tensor, ...]:
        outputs, lows = [], []
        for scale, weight, bias, a, b in zip(scales, *(operands[n::4] for n in range(4)), strict=True):
            assert weight is not None
            y = _grouped(x, weight.to(x.dtype).mT, ends)
            if bias is not None and added:
                y.add_(bias.to(y.dtype)[expert_of_copy(ends, len(y))])
            low = None
            if a is not None and b is not None:
                low = _grouped(x, a.to(x.dtype).mT, ends).mul_(scale)
                y.add_(_grouped(low, b.to(x.dtype).mT, ends))
            outputs.append(y)
            lows.append(low)
        # Frozen weights without adapters do not need their input again.
        needed = any(ctx.needs_input_grad[4::4]) or any(ctx.needs_input_grad[6::4])
        ctx.save_for_backward(x if needed else None, ends, *lows)
        ctx.added, ctx.scales, ctx.operands = added, scales, operands
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        x, ends, *lows = ctx.saved_tensors
        dx: Tensor | None = None
        gradients: list[Tensor | None] = []
        for index, (dy, scale, low) in enumerate(zip(dys, ctx.scales, lows, strict=True)):
            weight, bias, a, b = ctx.operands[4 * index : 4 * index + 4]
            needs = ctx.needs_input_grad[4 + 4 * index : 8 + 4 * index]
            if ctx.needs_input_grad[0]:
                part = _grouped(dy, weight.to(dy.dtype), ends)
                dx = part if dx is None else dx.add_(part)
            computed = [
                partial(_expert_weight_gradient, dy, x, ends, weight),
                partial(_expert_bias_gradient, dy if ctx.added else dy[:0], ends, bias),
            ]
            if a is not None:
                dlow = _grouped(dy, b.to(dy.dtype), ends).mul_(scale)
                dx = None if dx is None else dx.add_(_grouped(dlow, a.to(dlow.dtype), ends))
                computed.append(partial(_expert_weight_gradient, dlow, x, ends, a))
                computed.append(partial(_expert_weight_gradient, dy, low, ends, b))
            gradients += weight_gradients((weight, bias, a, b), needs, computed)
        return (dx, None, None, None, *gradients)


def expert_of_copy(ends: Tensor, copies: int) -> Tensor:
    """[copies] int64: whose each dispatched copy is."""
    return torch.searchsorted(ends, torch.arange(copies, dtype=ends.dtype, device=ends.device), right=True)


def _expert_bias_gradient(dy: Tensor, ends: Tensor, like: Tensor) -> Tensor:
    """[experts, N], the sum of each expert's run of ``dy`` [tokens, N]. As a product, for it asks nothing of the host
    and has one order of sums."""
    chosen = F.one_hot(expert_of_copy(ends, len(dy)), len(ends)).float()
    return (chosen.t() @ dy.float()).to(like.dtype)


def _expert_weight_gradient(dy: Tensor, x: Tensor, ends: Tensor, like: Tensor) -> Tensor:
    """[experts, N, K] from [tokens, N] and [tokens, K]: a product for each expert's run of tokens."""
    if _aligned(dy, x):
        return F.grouped_mm(dy.t(), x, offs=ends).to(like.dtype)
    gradient = torch.zeros_like(like)
    for expert, run in enumerate(runs(ends)):
        gradient[expert] = dy[run].t() @ x[run]
    return gradient


def _grouped(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Each expert's run of ``x`` [tokens, K] times its matrix of ``weights`` [experts, K, N] -> [tokens, N]."""
    if _aligned(x, weights):
        return F.grouped_mm(x, weights, offs=ends)
    y = x.new_empty(len(x), weights.shape[2])
    for run, weight in zip(runs(ends), weights, strict=True):
        y[run] = x[run] @ weight
    return y


def _aligned(*operands: Tensor) -> bool:
    """Whether the grouped product takes them: rows of whole 16 bytes, not of none, and, but for the CPU, bfloat16."""
    if not all(x.is_cpu or x.dtype == torch.bfloat16 for x in operands):
        return False
    sizes = ((size, x.element_size()) for x in operands for size in x.shape[-2 + (x.ndim == 2) :])
    return all(size and size * width % 16 == 0 for size, width in sizes)


def runs(ends: Tensor) -> Sequence[slice]:
    """The copies of each expert here; the host waits for them."""
    stops = ends.tolist()
    return [slice(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]


class TokenGate(torch.autograd.Function):
    """``y sigmoid(x w)`` with one number a token, in float32; ``weight`` [1, H]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
        gate = (x.float() @ weight.float().t()).sigmoid()
        ctx.save_for_backward(x, y, gate)
        ctx.weight = weight
        return (y * gate).to(y.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        (x, y, gate), weight = ctx.saved_tensors, ctx.weight
        dlogit = (d.float() * y).sum(1, keepdim=True) * gate * (1 - gate)
        dw = None
        if ctx.needs_input_grad[1]:
            dw = weight_gradient(weight, lambda: (dlogit.t() @ x.float()).to(weight.dtype))
        return (dlogit * weight.float()).to(x.dtype), dw, (d * gate).to(y.dtype)
