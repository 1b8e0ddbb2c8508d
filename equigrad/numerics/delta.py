"""The gated delta rule behind its short convolution, for a packed row of segments, forward and backward.

Yang et al., arXiv 2412.06464 (gating) and arXiv 2406.06484 (parallel over the tokens of a chunk). A segment is cut into
chunks of 64 tokens, what remains into one that is shorter; so no chunk and no convolution crosses a segment. Within a
chunk everything is a product of matrices, and chunks of all segments are computed together; only states pass from chunk
to chunk, at the same time in all segments. A chunk's tile is filled up with tokens that neither write to the state nor
fade it, and whose results are dropped.

The backward pass is written out. It keeps the inputs and the state with which each chunk begins, one for 64 tokens, and
computes the rest again. All in float32.

In shapes: T tokens, h key heads, r value heads to each; n chunks of C tokens; K and V for the widths of a key and a
value.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from equigrad.numerics.budget import WORKING_BYTES, delta_bytes
from equigrad.numerics.deferred import weight_gradient
from equigrad.numerics.ops import DeltaLayer
from equigrad.parallel.partition import Range

_CHUNK = 64


class Weights(NamedTuple):
    """Of one layer, this tensor rank's: kernels of queries, keys and values, [features, 1, kernel]; rates, [heads]."""

    query: Tensor
    key: Tensor
    value: Tensor
    a_log: Tensor
    dt_bias: Tensor

    @property
    def kernel(self) -> int:
        """Tokens that the convolution sees."""
        return self.query.shape[2]

    def taps(self, layer: DeltaLayer, heads: Range, dtype: torch.dtype = torch.float32) -> Tensor:
        """The kernels of a range of key heads, [kernel, h, 2 K + r V], the last for the token itself."""
        each = zip(self, layer.mixed, strict=False)
        kernels = [w.to(dtype).view(-1, features, self.kernel)[slice(*heads)] for w, features in each]
        return torch.cat(kernels, 1).permute(2, 0, 1).contiguous()

    def rates(self, layer: DeltaLayer, heads: Range, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """``a_log`` and ``dt_bias`` of a range of key heads, [h, r]."""
        a_log, dt_bias = (w.to(dtype).view(-1, layer.values)[slice(*heads)] for w in self[3:])
        return a_log, dt_bias


def gated_delta_rule(
    x: Tensor, rates: Tensor, weights: Weights, layer: DeltaLayer, lengths: tuple[int, ...], heads: Range | None = None
) -> Tensor:
    """See ``Ops.gated_delta_rule``. ``heads``: which of the weights' key heads those of ``x`` are; None: all."""
    return _GatedDeltaRule.apply(x, rates, *weights, layer, lengths, heads or (0, x.shape[1]))


class _Tiling(NamedTuple):
    """Where the tokens of a row are.

    behind:   [T] int64, their places where kernel - 1 zeros stand before each segment
    chunks:   [n, C] int64, tokens of the whole chunks: the first ones of all segments, then the second ones, ...
    counts:   how many those are; the segments with more chunks come first
    rest:     for some sizes, the tokens [n, size] of what remains of segments, T where there is none, and ...
    segments: ... [n] int64, of which segments, counted in that order
    order:    [segments] int64, that order
    """

    behind: Tensor
    chunks: Tensor
    counts: tuple[int, ...]
    rest: tuple[Tensor, ...]
    segments: tuple[Tensor, ...]
    order: Tensor


@lru_cache(maxsize=16)
@torch.inference_mode(False)
def _tiling(lengths: tuple[int, ...], kernel: int, device: torch.device) -> _Tiling:
    """Made once for all layers of a row."""
    starts = list(accumulate(lengths, initial=0))
    order = sorted(range(len(lengths)), key=lambda n: -(lengths[n] // _CHUNK))
    behind = torch.arange(sum(lengths))
    behind += (kernel - 1) * (1 + torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths).long()))
    most = max(lengths, default=0) // _CHUNK
    rounds = [[starts[n] + _CHUNK * step for n in order if lengths[n] >= _CHUNK * (step + 1)] for step in range(most)]
    firsts = torch.tensor([first for firsts in rounds for first in firsts], dtype=torch.int64)
    # Tiles of few sizes, none more than twice too large.
    tiles: dict[int, list[int]] = {}
    for place, n in enumerate(order):
        if left := lengths[n] % _CHUNK:
            tiles.setdefault(1 << (left - 1).bit_length(), []).append(place)
    rest, segments = [], []
    for size, places in sorted(tiles.items()):
        stop = torch.tensor([starts[order[place] + 1] for place in places])[:, None]
        tokens = stop - torch.tensor([lengths[order[place]] % _CHUNK for place in places])[:, None] + torch.arange(size)
        rest.append(tokens.where(tokens < stop, sum(lengths)).to(device))
        segments.append(torch.tensor(places, device=device))
    chunks = firsts[:, None] + torch.arange(_CHUNK)
    sequence = torch.tensor(order, dtype=torch.int64, device=device)
    counts = tuple(map(len, rounds))
    return _Tiling(behind.to(device), chunks.to(device), counts, tuple(rest), tuple(segments), sequence)


# The convolution. Before each segment stand kernel - 1 zeros, so that all of it is a sum of shifted rows.


def _spread(x: Tensor, tiling: _Tiling, kernel: int, after: int = 0) -> Tensor:
    """``x`` [T, ...] with its zeros, and as many as asked for ``after`` it, float32."""
    rows = len(x) + (kernel - 1) * len(tiling.order) + after
    return x.new_zeros(rows, *x.shape[1:], dtype=torch.float32).index_copy_(0, tiling.behind, x.float())


def _convolve(x: Tensor, taps: Tensor, tiling: _Tiling) -> Tensor:
    """[T, h, F] float32 of ``x`` [T, h, F] and ``taps`` [kernel, h, F]."""
    kernel = len(taps)
    spread = _spread(x, tiling, kernel)
    rows = len(spread) - kernel + 1
    total = spread[:rows] * taps[0]
    for shift in range(1, kernel):
        total.addcmul_(spread[shift : shift + rows], taps[shift])
    return total.index_select(0, tiling.behind - kernel + 1)


def _convolve_backward(dy: Tensor, taps: Tensor, tiling: _Tiling) -> Tensor:
    """The gradient of ``x``."""
    kernel = len(taps)
    spread = _spread(dy, tiling, kernel, kernel - 1)
    rows = len(spread) - kernel + 1
    total = spread[:rows] * taps[-1]
    for shift in range(1, kernel):
        total.addcmul_(spread[shift : shift + rows], taps[-1 - shift])
    return total.index_select(0, tiling.behind)


def _kernel_gradient(dy: Tensor, x: Tensor, tiling: _Tiling, like: Tensor, heads: Range) -> Tensor:
    """Of one of the three kernels ``like`` [features, 1, kernel], from its part of ``dy`` and ``x`` [T, h, features a
    head]; zero for the heads that are not here."""
    kernel = like.shape[2]
    dy, x = (_spread(t, tiling, kernel) for t in (dy, x))
    rows = len(x) - kernel + 1
    gradient = torch.zeros_like(like)
    view = gradient.view(-1, dy.shape[2], kernel)[slice(*heads)]
    for shift in range(kernel):
        view[..., shift] = (dy[kernel - 1 : kernel - 1 + rows] * x[shift : shift + rows]).sum(0)
    return gradient


def _rate_gradient(of_token: Tensor, like: Tensor, heads: Range) -> Tensor:
    """Of ``a_log`` or ``dt_bias``, from its gradient at each token [T, h, r]."""
    gradient = torch.zeros_like(like)
    gradient.view(-1, of_token.shape[2])[slice(*heads)] = of_token.sum(0)
    return gradient


# What the rule sees of a token: unit query and key, values, g and beta, side by side, [T, h, 2 K + r V + 2 r].


class _Tokens(NamedTuple):
    """
    mixed:    [T, h, 2 K + r V], out of the convolution, before its silu
    scales:   [T, h, 1] what makes the query a unit over sqrt(K), and the key a unit
    step:     [T, h, r], what softplus is taken of
    features: as above
    """

    mixed: Tensor
    scales: tuple[Tensor, Tensor]
    step: Tensor
    features: Tensor


def _tokens(mixed: Tensor, rates: Tensor, weights: Weights, layer: DeltaLayer, heads: Range) -> _Tokens:
    a_log, dt_bias = weights.rates(layer, heads)
    b, a = rates.float().chunk(2, -1)
    q, k, v = _apart(F.silu(mixed), layer)
    of_q, of_k = ((x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    of_q *= layer.key_dim**-0.5
    step = a + dt_bias
    g = -a_log.exp() * F.softplus(step)
    return _Tokens(mixed, (of_q, of_k), step, torch.cat([q * of_q, k * of_k, v, g, b.sigmoid()], -1))


def _tokens_backward(
    d: Tensor, tokens: _Tokens, weights: Weights, layer: DeltaLayer, heads: Range
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """From the gradient ``d`` of the features: those of ``mixed``, of the rates, and at each token of ``a_log`` and
    ``dt_bias``."""
    a_log, _ = weights.rates(layer, heads)
    qkv, g, beta = _of_features(tokens.features, layer)
    d, dg, dbeta = _of_features(d, layer)
    unit, parts = _apart(qkv, layer), list(_apart(d, layer))
    for at, over in enumerate((layer.key_dim, 1)):
        along = (parts[at] * unit[at]).sum(-1, keepdim=True) * over
        parts[at] = tokens.scales[at] * (parts[at] - unit[at] * along)
    dmixed = torch.ops.aten.silu_backward(torch.cat(parts, -1), tokens.mixed)
    dstep = -a_log.exp() * torch.sigmoid(tokens.step) * dg
    return dmixed, torch.cat([dbeta * beta * (1 - beta), dstep], -1), dg * g, dstep


def _apart(x: Tensor, layer: DeltaLayer) -> tuple[Tensor, ...]:
    """Query, key and values."""
    return x.split(layer.mixed, -1)


def _of_features(x: Tensor, layer: DeltaLayer) -> tuple[Tensor, ...]:
    """Query, key and values; g; beta."""
    return x.split([sum(layer.mixed), layer.values, layer.values], -1)


# The rule within chunks.


class _Chunks:
    """n chunks of C tokens, as far as they do not depend on the states with which they begin.

    What a token writes to the state is u = beta (v - S^T k), S being the state that it finds: that with which the chunk
    begins, faded, and what the tokens before it wrote. So ``(1 + L) u = beta v - beta exp(G) k S``, with L strictly
    lower triangular and G the sum of g from the beginning of the chunk; hence ``u = U - W S`` (arXiv 2412.06464,
    section 3.3).
    """

    def __init__(self, features: Tensor, index: Tensor, layer: DeltaLayer) -> None:
        """``features`` [T + 1, h, F], the last of them zeros; ``index`` [n, C]."""
        chosen = features.index_select(0, index.flatten()).unflatten(0, index.shape).transpose(1, 2)
        qkv, g, beta = _of_features(chosen, layer)
        q, k, v = _apart(qkv, layer)
        self.q, self.k = q.unsqueeze(2), k.unsqueeze(2)  # [n, h, 1, C, K], for all r value heads
        self.v = v.unflatten(-1, (layer.values, layer.value_dim)).transpose(2, 3)  # [n, h, r, C, V]
        self.beta = beta.mT.unsqueeze(-1)  # [n, h, r, C, 1]
        # In float64, for small differences of large sums.
        total = g.mT.cumsum(-1, dtype=torch.float64)  # [n, h, r, C]
        later = torch.ones(index.shape[1], index.shape[1], dtype=torch.bool, device=index.device).triu(1)
        # Masked before the exponential, which would overflow there.
        self.fade = (total.unsqueeze(-1) - total.unsqueeze(-2)).float().masked_fill_(later, -torch.inf).exp_()
        self.entering = total.float().exp().unsqueeze(-1)  # how much of the first state is left
        self.leaving = (total[..., -1:] - total).float().exp().unsqueeze(-1)  # of what is written, at the end
        self.through = self.entering[..., -1:, :]
        self.similar = (self.k @ self.k.mT) * self.fade
        self.system = self.beta * self.similar  # 1 + L, of which the solver takes the part below the diagonal
        self.scores = (self.q @ self.k.mT) * self.fade
        self.strength = self.beta * self.entering
        right = torch.cat([self.beta * self.v, self.strength * self.k], -1)
        solved = torch.linalg.solve_triangular(self.system, right, upper=False, unitriangular=True)
        self.u, self.w = solved.split([self.v.shape[-1], self.k.shape[-1]], -1)
        self.queries, self.keys = self.entering * self.q, self.leaving * self.k

    def written(self, states: Tensor, chunks: slice = slice(None)) -> Tensor:
        """What each token of some chunks writes, [n, h, r, C, V], given the first states [n, h, r, K, V]."""
        return self.u[chunks] - self.w[chunks] @ states

    def output(self, states: Tensor) -> Tensor:
        """[n, h, r, C, V]."""
        return self.queries @ states + self.scores @ self.written(states)

    def of_round(self, chunks: slice, states: Tensor) -> Tensor:
        """The last states of some of the chunks."""
        return self.through[chunks] * states + self.keys[chunks].mT @ self.written(states, chunks)

    def state_gradient(self, dout: Tensor) -> Tensor:
        """Of the first states, as far as it comes from the output."""
        return self.queries.mT @ dout - self.w.mT @ (self.scores.mT @ dout)

    def of_round_backward(self, chunks: slice, dlast: Tensor) -> Tensor:
        """Of the first states of some of the chunks, as far as it comes from the last."""
        return self.through[chunks] * dlast - self.w[chunks].mT @ (self.keys[chunks] @ dlast)

    def backward(self, states: Tensor, dout: Tensor, dlast: Tensor) -> Tensor:
        """The gradient of the chosen features, [n, C, h, F], given that of the output and of the last states."""
        u = self.written(states)
        du = self.scores.mT @ dout + self.keys @ dlast
        dqueries, dkeys, dscores = dout @ states.mT, u @ dlast.mT, dout @ u.mT
        right = torch.cat([du, -(du @ states.mT)], -1)
        solved = torch.linalg.solve_triangular(self.system.mT, right, upper=True, unitriangular=True)
        dv, dk_strong = solved.split([u.shape[-1], self.k.shape[-1]], -1)
        dsystem = -(dv @ self.u.mT + dk_strong @ self.w.mT).tril(-1)
        strong = (dk_strong * self.k).sum(-1, keepdim=True)
        # A token's g is in the exponents of what faded from tokens before it to it or to later ones, ...
        exponents = dscores * self.scores + dsystem * self.system
        dg = (exponents.new_ones(exponents.shape[-2:]).triu() @ exponents).tril(-1).sum(-1)
        # ... from the first state to those, ...
        entered = (dqueries * self.queries).sum(-1) + (strong * self.strength).squeeze(-1)
        dg += entered.flip(-1).cumsum(-1).flip(-1)
        # ... and from tokens before it, or from the first state, to the last.
        left = (dkeys * self.keys).sum(-1)
        dg[..., 1:] += left.cumsum(-1)[..., :-1]
        dg += (dlast * states * self.through).sum((-1, -2)).unsqueeze(-1)
        dbeta = (dv * self.v).sum(-1) + (strong * self.entering).squeeze(-1) + (dsystem * self.similar).sum(-1)
        dscores = (dscores * self.fade).sum(2, keepdim=True)
        dsimilar = (dsystem * self.beta * self.fade).sum(2, keepdim=True)
        dq = dscores @ self.k + (self.entering * dqueries).sum(2, keepdim=True)
        dk = dscores.mT @ self.q + (dsimilar + dsimilar.mT) @ self.k
        dk += (self.leaving * dkeys + self.strength * dk_strong).sum(2, keepdim=True)
        values = (self.beta * dv).transpose(2, 3).flatten(-2)
        return torch.cat([dq.squeeze(2), dk.squeeze(2), values, dg.mT, dbeta.mT], -1).transpose(1, 2)


# The rule over the row.


def _tiles(tiling: _Tiling) -> list[tuple[Tensor, Tensor | None]]:
    """The whole chunks, and then what remains of segments, each with the segments it is of."""
    return [(tiling.chunks, None), *zip(tiling.rest, tiling.segments, strict=True)]


def _rounds(tiling: _Tiling) -> list[tuple[int, slice]]:
    """The whole chunks that are computed at the same time: of how many segments, and which."""
    stops = list(accumulate(tiling.counts))
    return [(count, slice(stop - count, stop)) for count, stop in zip(tiling.counts, stops, strict=True)]


def _scan(features: Tensor, tiling: _Tiling, layer: DeltaLayer) -> tuple[Tensor, list[Tensor], Tensor]:
    """The output [T, h, r, V], the state with which each chunk begins, a tensor for each of the tiles, and the state
    after each segment, [segments, h, r, K, V]."""
    tokens, heads, _ = features.shape
    shape = heads, layer.values, layer.key_dim, layer.value_dim
    features = torch.cat([features, features.new_zeros(1, *features.shape[1:])])
    state = features.new_zeros(len(tiling.order), *shape)
    out, begun = features.new_empty(tokens + 1, heads, layer.values, layer.value_dim), []
    for index, segments in _tiles(tiling):
        chunks = _Chunks(features, index, layer)
        if segments is None:
            first = state.new_empty(len(index), *shape)
            for count, now in _rounds(tiling):
                first[now] = state[:count]
                state[:count] = chunks.of_round(now, first[now])
        else:
            first = state[segments]
            state[segments] = chunks.of_round(slice(None), first)
        begun.append(first)
        out.index_copy_(0, index.flatten(), chunks.output(first).permute(0, 3, 1, 2, 4).flatten(0, 1))
    return out[:-1], begun, state


def _scan_backward(
    dout: Tensor, features: Tensor, begun: Sequence[Tensor], tiling: _Tiling, layer: DeltaLayer
) -> Tensor:
    """The gradient of the features."""
    dout, features = (torch.cat([x, x.new_zeros(1, *x.shape[1:])]) for x in (dout, features))
    dfeatures = torch.empty_like(features)
    dstate = begun[0].new_zeros(len(tiling.order), *begun[0].shape[1:])
    for (index, segments), first in reversed(list(zip(_tiles(tiling), begun, strict=True))):
        chunks = _Chunks(features, index, layer)
        own = dout.index_select(0, index.flatten()).unflatten(0, index.shape).permute(0, 2, 3, 1, 4)
        dfirst, dlast = chunks.state_gradient(own), torch.zeros_like(first)
        if segments is None:
            for count, now in reversed(_rounds(tiling)):
                dlast[now] = dstate[:count]
                dstate[:count] = dfirst[now] + chunks.of_round_backward(now, dlast[now])
        else:
            dstate[segments] = dfirst
        dfeatures.index_copy_(0, index.flatten(), chunks.backward(first, own, dlast).flatten(0, 1))
    return dfeatures[:-1]


def _few_heads(x: Tensor, layer: DeltaLayer, heads: Range) -> Iterator[tuple[slice, Range]]:
    """Key heads of ``x`` [T, h, ...] to compute at a time, and which of the weights' they are. They have nothing to do
    with each other; all at once, the tiles of a long row would be many times what is kept of it."""
    of_head = len(x) * layer.values * delta_bytes(layer.key_dim, layer.value_dim)
    most = max(1, WORKING_BYTES // max(1, of_head))
    for start in range(0, max(x.shape[1], 1), most):
        stop = min(start + most, x.shape[1])
        yield slice(start, stop), (heads[0] + start, heads[0] + stop)


class _GatedDeltaRule(torch.autograd.Function):
    """Convolution and rule as one node, so that nothing between them is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rates: Tensor, *rest: Any) -> Tensor:
        *own, layer, lengths, heads = rest
        weights = Weights(*own)
        tiling = _tiling(lengths, weights.kernel, x.device)
        outputs, begun = [], []
        for some, which in _few_heads(x, layer, heads):
            mixed = _convolve(x[:, some], weights.taps(layer, which), tiling)
            out, first, _ = _scan(_tokens(mixed, rates[:, some], weights, layer, which).features, tiling, layer)
            outputs.append(out)
            begun += first
        ctx.save_for_backward(x, rates, *begun)
        ctx.weights, ctx.layer, ctx.tiling, ctx.heads = weights, layer, tiling, heads
        return torch.cat(outputs, 1).flatten(1, 2).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, rates, *begun = ctx.saved_tensors
        weights, layer, tiling, heads = ctx.weights, ctx.layer, ctx.tiling, ctx.heads
        dout, tiles, parts = dout.unflatten(1, (x.shape[1], layer.values)), len(_tiles(tiling)), []
        for number, (some, which) in enumerate(_few_heads(x, layer, heads)):
            mixed = _convolve(x[:, some], weights.taps(layer, which), tiling)
            tokens = _tokens(mixed, rates[:, some], weights, layer, which)
            first = begun[number * tiles : (number + 1) * tiles]
            dfeatures = _scan_backward(dout[:, some].float(), tokens.features, first, tiling, layer)
            parts.append(_tokens_backward(dfeatures, tokens, weights, layer, which))
        dmixed, drates, *of_rates = (torch.cat(of_heads, 1) for of_heads in zip(*parts, strict=True))
        computed = [
            partial(_kernel_gradient, d, part, tiling, like, heads)
            for d, part, like in zip(_apart(dmixed, layer), _apart(x, layer), weights, strict=False)
        ]
        computed += [partial(_rate_gradient, d, like, heads) for d, like in zip(of_rates, weights[3:], strict=True)]
        each = zip(weights, computed, ctx.needs_input_grad[2:7], strict=True)
        gradients = [weight_gradient(of, compute) if needed else None for of, compute, needed in each]
        dx = _convolve_backward(dmixed, weights.taps(layer, heads), tiling).to(x.dtype)
        return (dx, drates.to(rates.dtype), *gradients, None, None, None)


# Decoding, without gradients.


def prefill(
    x: Tensor, rates: Tensor, weights: Weights, layer: DeltaLayer, lengths: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """The rule's output, and for ``step`` the last kernel - 1 inputs of the convolution of each segment, [segments,
    kernel - 1, h, F] float32, and its state [segments, h, r, K, V]."""
    heads, kernel = (0, x.shape[1]), weights.kernel
    tiling = _tiling(lengths, kernel, x.device)
    mixed = _convolve(x, weights.taps(layer, heads), tiling)
    out, _, last = _scan(_tokens(mixed, rates, weights, layer, heads).features, tiling, layer)
    state = torch.empty_like(last).index_copy_(0, tiling.order, last)
    ends = torch.tensor(lengths, device=x.device).cumsum(0) - 1
    back = torch.arange(kernel - 1, device=x.device) - (kernel - 2)
    window = _spread(x, tiling, kernel)[tiling.behind[ends][:, None] + back]
    return out.flatten(1, 2).to(x.dtype), window, state


def step(
    x: Tensor, rates: Tensor, weights: Weights, layer: DeltaLayer, window: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The same for one more token of each segment."""
    heads = 0, x.shape[1]
    window = torch.cat([window, x[:, None].float()], 1)
    mixed = (window * weights.taps(layer, heads)).sum(1)
    qkv, g, beta = _of_features(_tokens(mixed, rates, weights, layer, heads).features, layer)
    q, k, v = _apart(qkv, layer)
    state = state * g.exp()[..., None, None]
    found = (k[:, :, None, None] @ state).squeeze(-2)
    written = beta[..., None] * (v.unflatten(-1, (layer.values, layer.value_dim)) - found)
    state = state + k[:, :, None, :, None] * written[..., None, :]
    out = (q[:, :, None, None] @ state).squeeze(-2)
    return out.flatten(1, 2).to(x.dtype), window[:, 1:], state
