"""The gated delta rule behind its short convolution, in the same bits however a row is packed or divided.

The state of a head is a function of the tokens of one segment, one after another, and that is the order in which it is
computed: all segments and heads at the same time, token by token, in float64, by IEEE operations alone. Sums within a
token, over the width of a key or of a value, have an order of their own, a tree. So a head's bits depend on its own
segment up to the token, and decoding, which takes the same steps, continues it. Only sums over tokens, the gradients of
kernels and rates, need grids.

The backward pass is written out. It keeps the inputs and the state with which every 64th token begins, and computes the
states between them again. Only what passes from token to token is done one by one, forward and backward; the rest is
for all tokens of 64 steps together.

In shapes: T tokens, h key heads, r value heads to each, K and V the widths of a key and a value; m tokens of a chunk.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from equigrad.numerics.budget import WORKING_BYTES
from equigrad.numerics.deferred import weight_gradient
from equigrad.numerics.delta import Weights
from equigrad.numerics.exact.elementary import exp, sigmoid, softplus, sqrt
from equigrad.numerics.exact.fused import fused
from equigrad.numerics.exact.grids import value
from equigrad.numerics.exact.layers import LayerGrids
from equigrad.numerics.ops import DeltaLayer
from equigrad.parallel.collectives import Heads, Split, exchanged_to_heads, exchanged_to_tokens
from equigrad.parallel.partition import Range, part_of

_CHUNK = 64
_COPIES = 6
"""Of the states of a chunk's tokens, float64, while its gradients are computed."""


def tree_sum(x: Tensor, dim: int) -> Tensor:
    """Sum over ``dim``, which vanishes: the first half plus the second, over and over, and of an odd number the last
    one waits. An order that the width alone decides."""
    width = _constant(x.shape[dim])
    while width > 1:
        half, odd = divmod(width, 2)
        total = x.narrow(dim, 0, half) + x.narrow(dim, half, half)
        x = torch.cat([total, x.narrow(dim, width - 1, 1)], dim) if odd else total
        width = half + odd
    return x.squeeze(dim)


def _constant(size: int) -> int:
    """A size that compiled code has as a constant: halves of halves of an unknown one take it minutes to simplify."""
    return len([None] * size)


# Where the tokens are.


class _Chunk(NamedTuple):
    """Up to 64 steps of some segments.

    tokens: [m] int64, where they are in the row: of each step the token of every segment that is as long
    counts: how many those are at each step; longer segments come first
    """

    tokens: Tensor
    counts: tuple[int, ...]

    @property
    def steps(self) -> list[slice]:
        """Which of the tokens are of each step."""
        return [slice(*ends) for ends in pairwise(accumulate(self.counts, initial=0))]


class _Plan(NamedTuple):
    """
    before: [kernel, T] int64, the tokens that each one's convolution sees, T where the segment had not begun
    after:  [kernel, T] int64, the tokens that see each one, by the same taps, T where the segment has ended
    ends:   [kernel - 1, segments] int64, the tokens that the next one of each segment would see
    groups: the chunks of segments that are computed together, first to last
    order:  [segments] int64, those of all groups
    """

    before: Tensor
    after: Tensor
    ends: Tensor
    groups: tuple[tuple[_Chunk, ...], ...]
    order: Tensor

    @property
    def most(self) -> int:
        """Tokens of the largest chunk."""
        return max(len(chunk.tokens) for chunks in self.groups for chunk in chunks)


@lru_cache(maxsize=16)
@torch.inference_mode(False)
def _plan(lengths: tuple[int, ...], kernel: int, most: int, device: torch.device) -> _Plan:
    """Made once for all layers of a row. Segments are in one group while their chunks have ``most`` tokens at most."""
    starts = torch.tensor(list(accumulate(lengths, initial=0)))
    sizes, tokens = torch.tensor(lengths), int(starts[-1])
    first, stop = starts[:-1].repeat_interleave(sizes), starts[1:].repeat_interleave(sizes)
    back, here = torch.arange(kernel - 1, -1, -1)[:, None], torch.arange(tokens)
    before, after, ends = here - back, here + back, starts[1:] - back[:-1]
    order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
    groups, room = list[list[int]](), 0
    for n in order:
        room -= min(lengths[n], _CHUNK)
        if room < 0:
            groups.append([])
            room = most - min(lengths[n], _CHUNK)
        groups[-1].append(n)
    return _Plan(
        before.where(before >= first, tokens).to(device),
        after.where(after < stop, tokens).to(device),
        ends.where(ends >= starts[:-1], tokens).to(device),
        tuple(_chunks([lengths[n] for n in group], starts[group], device) for group in groups),
        torch.tensor(order, dtype=torch.int64, device=device),
    )


def _chunks(lengths: Sequence[int], starts: Tensor, device: torch.device) -> tuple[_Chunk, ...]:
    """Of segments with so many tokens, the longest first, which begin at ``starts``."""
    chunks = []
    for begin in range(0, lengths[0], _CHUNK):
        steps = range(begin, min(begin + _CHUNK, lengths[0]))
        counts = tuple(sum(n > step for n in lengths) for step in steps)
        tokens = torch.cat([starts[:count] + step for step, count in zip(steps, counts, strict=True)])
        chunks.append(_Chunk(tokens.to(device), counts))
    return tuple(chunks)


def _chosen(x: Tensor, tokens: Tensor) -> Tensor:
    """``x`` [T, ...] at ``tokens`` [kernel, n], zero where they are T."""
    padded = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
    return padded.index_select(0, tokens.flatten()).unflatten(0, tokens.shape)


# What the rule sees of a token.


class _Features(NamedTuple):
    """Float64; or the gradients of them, that of ``fade`` being that of its logarithm.

    q, k: [T, h, K], units, the query over sqrt(K)
    v:    [T, h, r, V]
    beta: [T, h, r], the share of what the state lacks that is written to it
    fade: [T, h, r], what is left of the state before
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    fade: Tensor

    def at(self, tokens: Tensor | slice) -> "_Features":
        return _Features(*(x[tokens] for x in self))


@fused
def _convolve(window: Tensor, taps: Tensor) -> Tensor:
    """The sum over the first dimension of ``window`` [kernel, T, h, F] and ``taps`` [kernel, h, F], in its order,
    float64."""
    total = window[0].double() * taps[0]
    for tap in range(1, taps.shape[0]):
        total = total + window[tap].double() * taps[tap]
    return total


# One function each: compiled as one, the polynomial of a silu would stand in every branch of a tree.


@fused
def _silu(mixed: Tensor) -> Tensor:
    return mixed * sigmoid(mixed)


@fused
def _silu_backward(d: Tensor, mixed: Tensor) -> Tensor:
    open_ = sigmoid(mixed)
    return d * (open_ * (1 + mixed * (1 - open_)))


def _unit_scale(x: Tensor, length: float) -> Tensor:
    return (length / sqrt(tree_sum(x * x, -1) + 1e-6)).unsqueeze(-1)


@fused
def _unit(x: Tensor, length: float) -> Tensor:
    """The last dimension as a vector of that length."""
    return x * _unit_scale(x, length)


@fused
def _unit_backward(d: Tensor, x: Tensor, length: float, over: int) -> Tensor:
    """``over``: one over the square of the length."""
    scale = _unit_scale(x, length)
    unit = x * scale
    return scale * (d - unit * (tree_sum(unit * d, -1) * over).unsqueeze(-1))


# Not fused: a few numbers a token, and exponentials within each other, which take a compiler long.


def _rates(rates: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Beta, and how states fade."""
    b, a = rates.double().chunk(2, -1)
    return sigmoid(b), exp(-exp(a_log) * softplus(a + dt_bias))


def _rates_backward(
    dbeta: Tensor, dg: Tensor, rates: Tensor, a_log: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the rates; and at each token those of ``a_log`` and ``dt_bias``, [T, h, r]."""
    b, a = rates.double().chunk(2, -1)
    step, rate, beta = a + dt_bias, -exp(a_log), sigmoid(b)
    dstep = rate * sigmoid(step) * dg
    return torch.cat([dbeta * beta * (1 - beta), dstep], -1), rate * softplus(step) * dg, dstep


# The rule. Keys stand upright, values lie: a state is [h, r, K, V].


def _upright(k: Tensor) -> Tensor:
    return k[:, :, None, :, None]


def _lying(v: Tensor) -> Tensor:
    return v[..., None, :]


def _each(beta: Tensor) -> Tensor:
    return beta[..., None, None]


@fused
def _write(state: Tensor, k: Tensor, v: Tensor, beta: Tensor, fade: Tensor) -> Tensor:
    """The states [n, h, r, K, V] after one more token of each of n segments."""
    state, k = state * _each(fade), _upright(k)
    written = beta[..., None] * (v - tree_sum(k * state, -2))
    return state + k * _lying(written)


@fused
def _read(q: Tensor, state: Tensor) -> Tensor:
    """The output [n, h, r, V]."""
    return tree_sum(_upright(q) * state, -2)


@fused
def _write_backward(
    dstate: Tensor, dout: Tensor, q: Tensor, k: Tensor, beta: Tensor, fade: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of the states after a token, which the output reads, and before it; ``dstate``: that of those after
    it, as far as later tokens see them."""
    dafter, k = dstate + _upright(q) * _lying(dout), _upright(k)
    missing = beta[..., None] * tree_sum(k * dafter, -2)
    return dafter, _each(fade) * (dafter - k * _lying(missing))


@fused
def _token_gradients(
    before: Tensor, dafter: Tensor, dout: Tensor, k: Tensor, v: Tensor, beta: Tensor, fade: Tensor
) -> tuple[Tensor, ...]:
    """The gradients of a token's features, given the states before it, and the gradient of those after it."""
    faded, k = before * _each(fade), _upright(k)
    missing = v - tree_sum(k * faded, -2)
    written = _lying(beta[..., None] * missing)
    dwritten = tree_sum(k * dafter, -2)
    dv = beta[..., None] * dwritten
    dq = tree_sum((faded + k * written) * _lying(dout), -1)
    dk = tree_sum(dafter * written - faded * _lying(dv), -1)
    dg = tree_sum(tree_sum(faded * (dafter - k * _lying(dv)), -1), -1)
    return tree_sum(dq, -2), tree_sum(dk, -2), dv, tree_sum(dwritten * missing, -1), dg


def _states(state: Tensor, own: _Features, chunk: _Chunk) -> list[Tensor]:
    """The states with which a chunk begins, and after each of its steps, of the segments that are as long."""
    states = [state]
    for now, count in zip(chunk.steps, chunk.counts, strict=True):
        states.append(_write(states[-1][:count], *own.at(now)[1:]))
    return states


def _scan(features: _Features, plan: _Plan) -> tuple[Tensor, list[Tensor], Tensor]:
    """The output [T, h, r, V]; the states with which each chunk but the first begins, group after group; and those
    after each segment [segments, h, r, K, V], in the order of the plan."""
    out, begun, last = torch.empty_like(features.v), list[Tensor](), list[Tensor]()
    for chunks in plan.groups:
        state, ended = _zeros(features, chunks[0].counts[0]), []
        for chunk, following in zip(chunks, [*(c.counts[0] for c in chunks[1:]), 0], strict=True):
            own = features.at(chunk.tokens)
            _, *states = _states(state, own, chunk)
            out.index_copy_(0, chunk.tokens, _read(own.q, torch.cat(states)))
            remaining = zip(states, (*chunk.counts[1:], following), strict=True)
            ended += [state[count:].clone() for state, count in remaining if count < len(state)]
            state = states[-1][:following].clone()
            begun += [state] if following else []
        last += reversed(ended)
    return out, begun, torch.cat(last)


def _scan_backward(dout: Tensor, features: _Features, begun: Sequence[Tensor], plan: _Plan) -> _Features:
    """The gradient of the features."""
    found, kept = _Features(*(torch.empty_like(x) for x in features)), iter(begun)
    for chunks in plan.groups:
        firsts = [_zeros(features, chunks[0].counts[0]), *(next(kept) for _ in chunks[1:])]
        dstate = _zeros(features, 0)
        for chunk, first in reversed(list(zip(chunks, firsts, strict=True))):
            own, d = features.at(chunk.tokens), dout[chunk.tokens]
            states = [state[:count] for state, count in zip(_states(first, own, chunk), chunk.counts, strict=False)]
            dafters = []
            for now, count in reversed(list(zip(chunk.steps, chunk.counts, strict=True))):
                if ending := count - len(dstate):
                    dstate = torch.cat([dstate, _zeros(features, ending)])
                dafter, dstate = _write_backward(dstate, d[now], own.q[now], own.k[now], own.beta[now], own.fade[now])
                dafters.append(dafter)
            parts = _token_gradients(torch.cat(states), torch.cat(dafters[::-1]), d, *own[1:])
            for whole, part in zip(found, parts, strict=True):
                whole.index_copy_(0, chunk.tokens, part)
    return found


def _zeros(features: _Features, count: int) -> Tensor:
    return features.v.new_zeros(count, *features.beta.shape[1:], features.k.shape[-1], features.v.shape[-1])


# The op.

_GRIDS = (
    *(f"linear_attn.{which}_conv1d.weight" for which in "qkv"),
    "linear_attn.A_log",
    "linear_attn.dt_bias",
)
"""Of the weights, in the layer's."""


def _bytes_of_state(layer: DeltaLayer) -> int:
    """Of one token and key head, while gradients are computed."""
    return 8 * _COPIES * layer.values * layer.key_dim * layer.value_dim


def _plan_of(lengths: tuple[int, ...], kernel: int, layer: DeltaLayer, device: torch.device) -> _Plan:
    return _plan(lengths, kernel, max(1, WORKING_BYTES // _bytes_of_state(layer)), device)


def _few_heads(x: Tensor, layer: DeltaLayer, plan: _Plan, heads: Range) -> Iterator[tuple[slice, Range]]:
    """Key heads of ``x`` [T, h, ...] to compute at a time, and which of the weights' they are. They have nothing to do
    with each other; all at once, what is computed again would be many times what is kept."""
    # Of the features too there are a dozen copies or two.
    of_head = plan.most * _bytes_of_state(layer) + 8 * 16 * len(x) * sum(layer.mixed)
    most = max(1, WORKING_BYTES // of_head)
    for start in range(0, x.shape[1], most):
        stop = min(start + most, x.shape[1])
        yield slice(start, stop), (heads[0] + start, heads[0] + stop)


def _own_heads(heads: int, split: Split | None) -> Heads:
    """The key heads of each context rank."""
    ranks = 1 if split is None else len(split.partition.ranges)
    return tuple(tuple(range(*part_of(heads, ranks, rank))) for rank in range(ranks))


def _enter(parts: Sequence[Tensor], heads: int, split: Split | None) -> Sequence[Tensor]:
    """Own tokens of all heads [own tokens, h, ...] -> all tokens of own heads, in one message."""
    if split is None:
        return parts
    whole = exchanged_to_heads(torch.cat([*parts], -1), split, _own_heads(heads, split))
    return whole.split([part.shape[-1] for part in parts], -1)


def _leave(parts: Sequence[Tensor], heads: int, split: Split | None) -> Sequence[Tensor]:
    """The way back."""
    if split is None:
        return parts
    own = torch.cat(exchanged_to_tokens(torch.cat([*parts], -1), split, _own_heads(heads, split)), 1)
    return own.split([part.shape[-1] for part in parts], -1)


class GatedDeltaRule(torch.autograd.Function):
    """Saves its inputs, and a state for every 64 tokens of a segment but the first. Where context ranks divide the row
    they exchange tokens for heads, and a head is computed on one rank as if there were no other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rates: Tensor, *rest: Any) -> Tensor:
        """``rest``: the weights, the layer and the row."""
        *own, layer, row = rest
        weights, heads, split = Weights(*own), x.shape[1], row.context
        ctx.weights, ctx.layer, ctx.heads, ctx.split, ctx.nothing = weights, layer, heads, split, None
        if not row.tokens or not heads:  # which all context ranks know
            ctx.nothing = x, rates
            return x.new_zeros(len(x), heads * layer.values, layer.value_dim)
        x, rates = _enter((x, rates), heads, split)
        ctx.range = part_of(heads, *((1, 0) if split is None else (len(split.partition.ranges), split.rank)))
        plan = ctx.plan = _plan_of(row.lengths, weights.kernel, layer, x.device)
        out, begun = x.new_empty(len(x), x.shape[1], layer.values, layer.value_dim), list[Tensor]()
        for some, which in _few_heads(x, layer, plan, ctx.range):
            features = _inputs(x[:, some], rates[:, some], weights, layer, plan, which)[1]
            read, states, _ = _scan(features, plan)
            out[:, some] = value(read, x.dtype)
            begun += states
        ctx.save_for_backward(x, rates, *begun)
        (out,) = _leave([out.flatten(2)], heads, split)
        return out.reshape(len(out), heads * layer.values, layer.value_dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        weights, layer, heads, split = ctx.weights, ctx.layer, ctx.heads, ctx.split
        if ctx.nothing is not None:
            nothing = [weight_gradient(w, partial(torch.zeros_like, w)) for w in weights]
            return *map(torch.zeros_like, ctx.nothing), *nothing, None, None
        x, rates, *begun = ctx.saved_tensors
        plan, kept = ctx.plan, iter(begun)
        (dout,) = _enter([dout.reshape(len(dout), heads, layer.values * layer.value_dim)], heads, split)
        dout = dout.double().unflatten(-1, (layer.values, layer.value_dim))
        dx, drates, dmixed = torch.empty_like(x), torch.empty_like(rates), torch.empty_like(x, dtype=torch.float64)
        of_rates = dout.new_empty(2, *x.shape[:2], layer.values)
        for some, which in _few_heads(x, layer, plan, ctx.range):
            mixed, features = _inputs(x[:, some], rates[:, some], weights, layer, plan, which)
            states = [next(kept) for chunks in plan.groups for _ in chunks[1:]]
            found = _scan_backward(dout[:, some], features, states, plan)
            dmixed[:, some] = _mixed_backward(found, mixed, layer)
            of_b_and_a, of_rates[0][:, some], of_rates[1][:, some] = _rates_backward(
                found.beta, found.fade, rates[:, some], *weights.rates(layer, which, torch.float64)
            )
            drates[:, some] = value(of_b_and_a, rates.dtype)
            taps = weights.taps(layer, which, torch.float64)
            dx[:, some] = value(_convolve(_chosen(dmixed[:, some], plan.after), taps), x.dtype)
        terms: list[Callable[[], Iterator[Tensor]]] = [
            partial(_kernel_terms, *pair, plan)
            for pair in zip(dmixed.split(layer.mixed, -1), x.split(layer.mixed, -1), strict=True)
        ]
        terms += [partial(iter, [of_rate]) for of_rate in of_rates]
        each = zip(weights, _GRIDS, terms, ctx.needs_input_grad[2:7], strict=True)
        gradients = [
            weight_gradient(of, partial(_gradient, of, layer.grids[name], ctx.range, own)) if needed else None
            for of, name, own, needed in each
        ]
        return *_leave((dx, drates), heads, split), *gradients, None, None


def _inputs(
    x: Tensor, rates: Tensor, weights: Weights, layer: DeltaLayer, plan: _Plan, heads: Range
) -> tuple[Tensor, _Features]:
    """What comes out of the convolution, and the rule's features, of some key heads."""
    mixed = _convolve(_chosen(x, plan.before), weights.taps(layer, heads, torch.float64))
    return mixed, _of_mixed(mixed, rates, weights, layer, heads)


def _of_mixed(mixed: Tensor, rates: Tensor, weights: Weights, layer: DeltaLayer, heads: Range) -> _Features:
    q, k, v = _silu(mixed).split(layer.mixed, -1)
    q, k, v = _unit(q, 1 / math.sqrt(layer.key_dim)), _unit(k, 1.0), v.unflatten(-1, (layer.values, layer.value_dim))
    return _Features(q, k, v, *_rates(rates, *weights.rates(layer, heads, torch.float64)))


def _mixed_backward(d: _Features, mixed: Tensor, layer: DeltaLayer) -> Tensor:
    """The gradient of what comes out of the convolution."""
    q, k, _ = _silu(mixed).split(layer.mixed, -1)
    dq = _unit_backward(d.q, q, 1 / math.sqrt(layer.key_dim), layer.key_dim)
    dk = _unit_backward(d.k, k, 1.0, 1)
    return _silu_backward(torch.cat([dq, dk, d.v.flatten(-2)], -1), mixed)


def _kernel_terms(dmixed: Tensor, x: Tensor, plan: _Plan) -> Iterator[Tensor]:
    """Of each tap at each token, [T, h, features of a head]."""
    for before in plan.before:
        yield dmixed * _chosen(x, before[None])[0]


def _gradient(like: Tensor, grids: LayerGrids, heads: Range, terms: Callable[[], Iterator[Tensor]]) -> Tensor:
    """Of a kernel [features, 1, kernel] or of what is of value heads, zero where key heads are not here; ``terms``: of
    each tap. A feature's taps share its channel."""
    gradient = torch.zeros_like(like)
    for tap, each in enumerate(terms()):
        first, stop = (head * each.shape[-1] for head in heads)
        total = grids["sum"].part(first, stop).round(each.flatten(1)).sum(0)
        gradient.view(len(like), -1)[first:stop, tap] = total
    return gradient


# Decoding, without gradients.


def prefill(
    x: Tensor, rates: Tensor, weights: Weights, layer: DeltaLayer, lengths: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """The rule's output, and for ``step`` the last kernel - 1 inputs of the convolution of each segment, [segments,
    kernel - 1, h, F], and its state [segments, h, r, K, V] float64."""
    plan = _plan_of(lengths, weights.kernel, layer, x.device)
    features = _inputs(x, rates, weights, layer, plan, (0, x.shape[1]))[1]
    out, _, last = _scan(features, plan)
    state = torch.empty_like(last).index_copy_(0, plan.order, last)
    return value(out.flatten(1, 2), x.dtype), _chosen(x, plan.ends).transpose(0, 1), state


def step(
    x: Tensor, rates: Tensor, weights: Weights, layer: DeltaLayer, window: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The same for one more token of each segment."""
    heads = 0, x.shape[1]
    window = torch.cat([window, x[:, None]], 1)
    mixed = _convolve(window.transpose(0, 1), weights.taps(layer, heads, torch.float64))
    features = _of_mixed(mixed, rates, weights, layer, heads)
    state = _write(state, *features[1:])
    return value(_read(features.q, state).flatten(1, 2), x.dtype), window[:, 1:], state
