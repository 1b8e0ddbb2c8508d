"""A mixture of experts in exact numerics. Which copies go where is the native op set's affair; what is added up here is
added in an order that belongs to the token, or on a grid.

All experts of a layer share the channel grids of their weights' gradients: so an expert that nobody chose for long has
a grid when it is.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from equigrad.config.model import Experts
from equigrad.numerics.deferred import weight_gradient, weight_gradients
from equigrad.numerics.exact.elementary import exp, sigmoid
from equigrad.numerics.exact.elementwise import short
from equigrad.numerics.exact.fused import fused
from equigrad.numerics.exact.grids import (
    Side,
    columns,
    fixed,
    operand_bits,
    rows,
    sum_last,
    together,
    value,
)
from equigrad.numerics.exact.layers import LayerGrids, grids_of
from equigrad.numerics.exact.linear import (
    back_product,
    finish,
    group_of,
    plus,
    product,
    scaled,
    token_product,
    token_sum,
)
from equigrad.numerics.experts import expert_of_copy, runs
from equigrad.numerics.ops import Layer, operands
from equigrad.numerics.routing import Dispatch, Load, Routes
from equigrad.parallel.collectives import Axis, Split, exchanged_tokens, gathered


def route(x: Tensor, layer: Layer, correction: Tensor | None, experts: Experts, terms: int) -> Routes:
    """See ``Ops.router``; ``terms``: bits of a sum over the tokens of a step."""
    grids = grids_of(layer)
    found = _Router.apply(x, layer.weight, layer.bias, correction, experts, grids, terms)
    weights, probability, chosen, counts = found
    return Routes(chosen, weights, Load(counts, probability))


@fused
def _softmax(logits: Tensor) -> Tensor:
    logits = logits.double()
    terms = exp(logits - logits.amax(1, keepdim=True))
    return (terms / sum_last(terms)).float()


@fused
def _sigmoid(logits: Tensor) -> Tensor:
    return sigmoid(logits.double()).float()


@fused
def _shares(scores: Tensor) -> Tensor:
    """Over their sum, which may have vanished."""
    scores = scores.double()
    return (scores / _total(scores)).float()


def _total(scores: Tensor) -> Tensor:
    return short(sum_last(scores) + 1e-20)


@fused
def _shares_backward(scores: Tensor, gradient: Tensor) -> Tensor:
    scores, gradient = scores.double(), gradient.double()
    total = _total(scores)
    mean = short(sum_last(short(gradient * scores)) / total)
    return (short(gradient - mean) / total + 0.0).float()


@fused
def _softmax_backward(scores: Tensor, gradient: Tensor) -> Tensor:
    scores, gradient = scores.double(), gradient.double()
    return (scores * short(gradient - short(sum_last(short(gradient * scores)))) + 0.0).float()


@fused
def _sigmoid_backward(scores: Tensor, gradient: Tensor) -> Tensor:
    scores = scores.double()
    return (gradient.double() * short(scores * short(1 - scores)) + 0.0).float()


@fused
def _sum_of_shares(shares: Tensor, bits: int) -> Tensor:
    return fixed(shares.double(), bits).sum(0)


class _Router(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, correction: Tensor | None, experts: Experts,
        grids: LayerGrids, terms: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        logits = finish(product(x, weight, weight.shape[1]), bias, torch.float32)
        softmax = experts.scoring_func == "softmax"
        scores = _softmax(logits) if softmax else _sigmoid(logits)
        ranked = scores if correction is None else scores + correction
        chosen = ranked.sort(dim=1, descending=True, stable=True).indices[:, : experts.num_experts_per_tok].contiguous()
        weights = scores.gather(1, chosen)
        if experts.norm_topk_prob:
            weights = _shares(weights)
        counts = torch.zeros(len(weight), dtype=torch.int64, device=x.device)
        counts.scatter_add_(0, chosen.flatten(), torch.ones_like(chosen).flatten())
        probability = _sum_of_shares(scores if softmax else _shares(scores), terms)
        ctx.mark_non_differentiable(chosen, counts)
        ctx.save_for_backward(x, scores, chosen)
        ctx.weight, ctx.bias, ctx.experts, ctx.grids = weight, bias, experts, grids
        return weights * experts.routed_scaling_factor, probability, chosen, counts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dweights: Tensor, dprobability: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        (x, scores, chosen), weight, bias = ctx.saved_tensors, ctx.weight, ctx.bias
        grids, experts = ctx.grids, ctx.experts
        dchosen = dweights * experts.routed_scaling_factor
        if experts.norm_topk_prob:
            dchosen = _shares_backward(scores.gather(1, chosen), dchosen)
        dscores = torch.zeros_like(scores).scatter_(1, chosen, dchosen)
        further = dprobability.float().expand_as(scores)
        if experts.scoring_func == "softmax":
            dlogits = _softmax_backward(scores, dscores + further)
        else:
            dlogits = _sigmoid_backward(scores, dscores + _shares_backward(scores, further))
        dx = value(back_product(dlogits, weight, len(weight)), x.dtype) if ctx.needs_input_grad[0] else None
        dw = db = None
        if ctx.needs_input_grad[1]:
            dw = weight_gradient(weight, partial(token_product, grids["out"], dlogits, grids["in"], x))
        if ctx.needs_input_grad[2]:
            db = weight_gradient(bias, partial(token_sum, grids["out"], dlogits))
        return dx, dw, db, None, None, None, None


class Sent(torch.autograd.Function):
    """Copies of own tokens [T, H], and of those of all tensor ranks, to the experts of their choice. The gradients of a
    token are added in the order of its choices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, at: Dispatch, axis: Axis, split: Split | None, dtype: torch.dtype) -> Tensor:
        ctx.at, ctx.axis, ctx.split, ctx.x_dtype = at, axis, split, x.dtype
        x = gathered(x.to(dtype), split)
        return _forth(x.index_select(0, at.order // at.place.shape[1]), at, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None]:
        of_choices = _own(_back(dy, ctx.at, ctx.axis), ctx.at, ctx.split)
        return _summed(of_choices, None).to(ctx.x_dtype), None, None, None, None


class Combined(torch.autograd.Function):
    """The experts' results [copies, H] back to own tokens: their sum, weighted by ``weights`` [own tokens, k]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, at: Dispatch, axis: Axis, split: Split | None) -> Tensor:
        of_choices = _own(_back(x, at, axis), at, split)
        ctx.save_for_backward(of_choices, weights)
        ctx.at, ctx.axis, ctx.split = at, axis, split
        return _summed(of_choices, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        of_choices, weights = ctx.saved_tensors
        dweights, dx = _weighted_backward(dy, of_choices, weights)
        dx = gathered(dx, ctx.split).flatten(0, 1).index_select(0, ctx.at.order)
        return _forth(dx, ctx.at, ctx.axis), dweights, None, None, None


def _summed(of_choices: Tensor, weights: Tensor | None) -> Tensor:
    """[T, k, H] -> [T, H], the first choice first."""
    total = torch.zeros(len(of_choices), of_choices.shape[2], dtype=torch.float64, device=of_choices.device)
    for choice in range(of_choices.shape[1]):
        total = _one_more(total, of_choices[:, choice], None if weights is None else weights[:, choice, None])
    return value(total, of_choices.dtype)


@fused
def _one_more(total: Tensor, x: Tensor, weight: Tensor | None) -> Tensor:
    return total + (x.double() if weight is None else x.double() * weight.double())


@fused
def _weighted_backward(dy: Tensor, of_choices: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    dy = dy.double()[:, None]
    dweights = sum_last(dy * of_choices.double()).squeeze(-1)
    return (dweights + 0.0).float(), (dy * weights.double()[:, :, None] + 0.0).to(of_choices.dtype)


def _forth(copies: Tensor, at: Dispatch, axis: Axis) -> Tensor:
    """Sorted copies of tokens to the ranks that have their experts."""
    if at.exchange is None:
        return copies
    assert axis.group is not None
    received = exchanged_tokens(copies, at.exchange.sent, at.exchange.received, axis.group)
    return received.index_select(0, at.exchange.arrange)


def _back(copies: Tensor, at: Dispatch, axis: Axis) -> Tensor:
    """The way back, and then the choices of each token: [T k, H]."""
    if at.exchange is not None:
        assert axis.group is not None
        copies = copies.index_select(0, at.exchange.back)
        copies = exchanged_tokens(copies, at.exchange.received, at.exchange.sent, axis.group)
    return copies.index_select(0, at.place.flatten())


def _own(of_choices: Tensor, at: Dispatch, split: Split | None) -> Tensor:
    """[own tokens, k, H] of the choices of all tensor ranks' tokens, which each of them has."""
    whole = of_choices.unflatten(0, at.place.shape)
    return whole if split is None else split.take(whole)


class ExpertLinears(torch.autograd.Function):
    """One input [copies, K], sorted by expert, with matrices [E, N, K] -> [copies, N] each. Tensor ranks divide either
    N, and then add up the gradient of the input, or K, and then the output: each has all of it afterwards, as it has of
    what an adapter's first matrix makes. ``scales`` and ``operands`` as ``ops.operands`` makes them."""

    @classmethod
    def of(
        cls, x: Tensor, layers: Sequence[Layer], at: Dispatch, split: Split | None, divided_inputs: bool
    ) -> tuple[Tensor, ...]:
        scales, flat = operands(layers)
        known = tuple(grids_of(layer) for layer in layers)
        return cls.apply(x, at.ends, split, divided_inputs, known, scales, *flat)

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, ends: Tensor, split: Split | None, divided_inputs: bool, known: tuple[LayerGrids, ...],
        scales: tuple[float, ...], *operands: Tensor | None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        across = group_of(split) if divided_inputs else None
        bits = operand_bits(known[0].inputs)
        xq, outputs, lows, each = rows(x, bits[0], across), [], [], runs(ends)
        for scale, weight, bias, a, b in zip(scales, *(operands[n::4] for n in range(4)), strict=True):
            assert weight is not None
            y = _products(xq, rows(weight, bits[1], across), each, across)
            y = finish(y, None if bias is None else bias[expert_of_copy(ends, len(y))], x.dtype)
            low = None
            if a is not None and b is not None:
                low = scaled(_products(xq, rows(a, bits[1], across), each, across), scale, x.dtype)
                of_low, of_b = operand_bits(low.shape[1])
                y = plus(y, _products(rows(low, of_low), rows(b, of_b), each))
            outputs.append(y)
            lows.append(low)
        ctx.save_for_backward(x if any(ctx.needs_input_grad[6:]) else None, ends, *lows)
        ctx.split, ctx.divided_inputs, ctx.known = split, divided_inputs, known
        ctx.scales, ctx.operands = scales, operands
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        (x, ends, *lows), known, split = ctx.saved_tensors, ctx.known, ctx.split
        across = None if ctx.divided_inputs else group_of(split)
        weights, each, dx = ctx.operands[::4], runs(ends), None
        if ctx.needs_input_grad[0]:
            a_bits, b_bits = operand_bits(sum(grids.outputs for grids in known))
            total = torch.zeros(len(dys[0]), weights[0].shape[2], dtype=torch.float64, device=dys[0].device)
            for dyq, wq in zip(*together([Side(dys, -1, a_bits), Side(weights, -2, b_bits)], across), strict=True):
                for run, of_expert in zip(each, wq, strict=True):
                    total[run].addmm_(dyq[run], of_expert)
            if across is not None:
                dist.all_reduce(total, group=across)
            dx = value(total, dys[0].dtype)
        # Of what tensor ranks have whole, one of them has the gradient: of a bias and an adapter's second matrix where
        # they divide the inputs, of its first where they divide the outputs.
        other, none = split is not None and split.rank > 0, [slice(0)] * len(each)
        outputs_once, inputs_once = other and ctx.divided_inputs, other and not ctx.divided_inputs
        gradients: list[Tensor | None] = []
        for n, (dy, low, grids, scale) in enumerate(zip(dys, lows, known, ctx.scales, strict=True)):
            weight, bias, a, b = ctx.operands[4 * n : 4 * n + 4]
            computed = [
                partial(_weight_part, grids, "", dy, known[0], x, each, weight),
                partial(_bias_part, grids, dy[:0] if outputs_once else dy, ends, bias),
            ]
            if a is not None:
                of_dy, of_b = operand_bits(grids.outputs)
                dlow = _products(rows(dy, of_dy, across), columns(b, of_b, across).mT, each, across)
                dlow = scaled(dlow, scale, dy.dtype)
                if dx is not None:
                    of_low, of_a = operand_bits(a.shape[1])
                    dx = plus(dx, _products(rows(dlow, of_low), columns(a, of_a).mT, each))
                computed += [
                    partial(_weight_part, grids, "a.", dlow, grids, x, none if inputs_once else each, a),
                    partial(_weight_part, grids, "b.", dy, grids, low, none if outputs_once else each, b),
                ]
            gradients += weight_gradients((weight, bias, a, b), ctx.needs_input_grad[6 + 4 * n : 10 + 4 * n], computed)
        return (dx, None, None, None, None, None, *gradients)


def _products(xq: Tensor, wq: Tensor, each: Sequence[slice], across: ProcessGroup | None = None) -> Tensor:
    """Each run of ``xq`` [copies, K] times its matrix of ``wq`` [E, N, K] transposed, exact, float64 [copies, N];
    ``across``: the ranks that divide K."""
    y = xq.new_empty(len(xq), wq.shape[1])
    for run, of_expert in zip(each, wq, strict=True):
        torch.mm(xq[run], of_expert.t(), out=y[run])
    if across is not None:
        dist.all_reduce(y, group=across)
    return y


def _weight_part(
    out: LayerGrids, matrix: str, dy: Tensor, into: LayerGrids, x: Tensor, each: Sequence[slice], like: Tensor
) -> Tensor:
    """``matrix``: ``a.`` or ``b.`` of an adapter, or nothing."""
    gradient = torch.zeros_like(like)
    dyq, xq = out[f"{matrix}out"].round(dy), into[f"{matrix}in"].round(x)
    for of_expert, run in zip(gradient, each, strict=True):
        torch.mm(dyq[run].t(), xq[run], out=of_expert)
    return gradient


def _bias_part(grids: LayerGrids, dy: Tensor, ends: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(like).index_add_(0, expert_of_copy(ends, len(dy)), grids["out"].round(dy))


@fused
def _gated(y: Tensor, logit: Tensor) -> Tensor:
    return (y.double() * short(sigmoid(logit.double()))).to(y.dtype)


@fused
def _gate_backward(dy: Tensor, y: Tensor, logit: Tensor) -> tuple[Tensor, Tensor]:
    """Of the logit and of ``y``."""
    dy, gate = dy.double(), short(sigmoid(logit.double()))
    dlogit = short(sum_last(dy * y.double())) * short(gate * short(1 - gate))
    return (dlogit + 0.0).float(), (dy * gate + 0.0).to(y.dtype)


@fused
def _outer(dlogit: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    return (dlogit.double() * short(weight) + 0.0).to(dtype)


class TokenGate(torch.autograd.Function):
    """``y sigmoid(x w)`` with one number a token; ``weight`` [1, H]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, y: Tensor, grids: LayerGrids) -> Tensor:
        logit = value(product(x, weight, weight.shape[1]), torch.float32)
        ctx.save_for_backward(x, y, logit)
        ctx.weight, ctx.grids = weight, grids
        return _gated(y, logit)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, Tensor, None]:
        (x, y, logit), weight, grids = ctx.saved_tensors, ctx.weight, ctx.grids
        dlogit, d = _gate_backward(dy, y, logit)
        dw = None
        if ctx.needs_input_grad[1]:
            dw = weight_gradient(weight, partial(token_product, grids["out"], dlogit, grids["in"], x))
        return _outer(dlogit, weight, x.dtype), dw, d, None
