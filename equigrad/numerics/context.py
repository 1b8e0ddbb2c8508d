"""Attention and the gated delta rule over a row whose tokens are divided over context ranks. Only real tokens are sent,
however uneven.

``ulysses``: ranks exchange tokens for heads, attend to whole segments with the heads they have, and exchange back
(Jacobs et al., arXiv 2309.14509); any number of heads will do, and a rank may have none.
``ring``: queries stay, keys and values travel from rank to rank (Liu et al., arXiv 2310.01889). Those that no further
rank sees travel no further, and their gradients return home from there.

The order of sums. A query's output is merged, in float32, over the keys of its own rank first, then of the rank before
it, and on round the ring. The gradient of a key is added up in float32 likewise: what its own rank has for it, then the
rank behind it, and on round the ring; that of a query in the order of its output. None depends on when a message
arrives. With ``ulysses`` each head is computed on one rank as if there were no other, and the gradients of a key head
that several ranks hold are added in the order of the ranks.

The gated delta rule goes through all tokens of a segment one after another, so whatever the strategy ranks exchange
tokens for heads as in ``ulysses``: a key head with its value heads is computed on one rank as if there were no other.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from equigrad.numerics.attention import (
    Attended,
    add_gradients,
    add_sinks,
    attend,
    attend_backward,
    merge,
    packed_attention,
    sink_gradient,
)
from equigrad.numerics.delta import Weights, gated_delta_rule
from equigrad.numerics.ops import DeltaLayer
from equigrad.numerics.row import Row
from equigrad.numerics.tiles import RingTiles, ring_tiles
from equigrad.parallel.collectives import Split, heads_to_tokens, tokens_to_heads
from equigrad.parallel.partition import part_of
from equigrad.parallel.ring import GRADIENTS, KEYS, Transfer


def context_attention(
    q: Tensor, k: Tensor, v: Tensor, row: Row, window: int | None, sinks: Tensor | None = None
) -> Tensor:
    """As ``packed_attention`` of the whole row: own tokens of ``q``, ``k`` and ``v`` -> own tokens of the output."""
    split = row.context
    assert split is not None
    if not row.tokens:
        return packed_attention(q, k, v, (), window, sinks)
    if row.strategy == "ulysses":
        return _ulysses(q, k, v, row.lengths, split, window, sinks)
    return _Ring.apply(q, k, v, sinks, split, ring_tiles(row.lengths, split.partition, split.rank, window))


def _ulysses(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], split: Split, window: int | None, sinks: Tensor | None
) -> Tensor:
    heads, kv_heads, ranks = q.shape[1], k.shape[1], len(split.partition.ranges)
    group = heads // kv_heads
    own_queries = [tuple(range(*part_of(heads, ranks, rank))) for rank in range(ranks)]
    own_keys = [sorted({head // group for head in own}) for own in own_queries]
    # Queries, keys and values are one message, so that there is but one backward exchange to order among the ranks.
    wanted = tuple(
        (*queries, *(heads + key for key in keys), *(heads + kv_heads + key for key in keys))
        for queries, keys in zip(own_queries, own_keys, strict=True)
    )
    queries, keys = own_queries[split.rank], own_keys[split.rank]
    whole = tokens_to_heads(torch.cat([q, k, v], 1), split, wanted)
    q, k, v = whole.split([len(queries), len(keys), len(keys)], 1)
    sizes = [sum(head // group == key for head in queries) for key in keys]
    if len(set(sizes)) > 1:  # groups cut by a border between ranks: the kernel knows equal ones only
        k, v = _Repeat.apply(k, sizes), _Repeat.apply(v, sizes)
    out = packed_attention(q, k, v, lengths, window, sinks, queries[0] if queries else 0)
    return heads_to_tokens(out, split, tuple(own_queries))


def context_delta_rule(x: Tensor, rates: Tensor, weights: Weights, layer: DeltaLayer, row: Row) -> Tensor:
    """As ``gated_delta_rule`` of the whole row: own tokens of ``x`` and ``rates`` -> own tokens of the output."""
    split, heads = row.context, x.shape[1]
    assert split is not None
    if not row.tokens or not heads:  # which all context ranks know
        return gated_delta_rule(x, rates, weights, layer, (len(x),) if len(x) else ())
    ranks = len(split.partition.ranges)
    own = tuple(tuple(range(*part_of(heads, ranks, rank))) for rank in range(ranks))
    # One message, so that there is but one backward exchange to order among the ranks.
    whole = tokens_to_heads(torch.cat([x, rates], -1), split, own)
    x, rates = whole.split([x.shape[-1], rates.shape[-1]], -1)
    out = gated_delta_rule(x, rates, weights, layer, row.lengths, part_of(heads, ranks, split.rank))
    grouped = out.view(len(out), x.shape[1], layer.values * layer.value_dim)
    return heads_to_tokens(grouped, split, own).view(-1, heads * layer.values, layer.value_dim)


class _Repeat(torch.autograd.Function):
    """Each head as often as it is wanted; its gradients are added in that order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int]) -> Tensor:
        ctx.sizes = sizes
        return torch.cat([x[:, head : head + 1].expand(-1, size, -1) for head, size in enumerate(sizes)], 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return torch.stack([part.sum(1) for part in dy.split(ctx.sizes, 1)], 1), None


class _Ring(torch.autograd.Function):
    """The whole way round as one autograd node, so that all ranks meet in one order forward and one backward."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, split: Split, plan: RingTiles
    ) -> Tensor:
        out = total = q  # step 0 makes them
        for step, (keys, values) in enumerate(_travel(k, v, split, plan)):
            if step == 0:
                out, total = attend(q, keys, values, plan.steps[0])
                out = out.float() if plan.merges else out
            else:
                merge(out, total, q, keys, values, plan.steps[step].rest)
        out, total = add_sinks(out, total, sinks, 0)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, total)
        ctx.sinks, ctx.split, ctx.plan = sinks, split, plan
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, total = ctx.saved_tensors
        plan, home = ctx.plan, _Home(k, ctx.split, ctx.plan)
        dq = q  # step 0 makes it
        for step, (keys, values) in enumerate(_travel(k, v, ctx.split, plan)):
            gradient, tiles = None, plan.steps[step]
            known = Attended(dout, q, keys, values, out, total)
            if step == 0:
                dq, *own = attend_backward(known, tiles)
                dq = dq.float() if plan.merges else dq
                gradient = torch.stack(own).float()
            elif tiles.rest:
                gradient = torch.zeros(2, *keys.shape, dtype=torch.float32, device=k.device)
                add_gradients((dq, gradient[0], gradient[1]), known, tiles.rest)
            home.add(step, gradient)
        dk, dv = home.arrived()
        dsinks = sink_gradient(ctx.sinks, 0, Attended(dout, q, k, v, out, total))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None, None


def _travel(k: Tensor, v: Tensor, split: Split, plan: RingTiles) -> Iterator[Iterable[Tensor]]:
    """At each step, the keys and values that are here then: those of the rank that many places before this one, without
    tokens if they have stopped before. The next are on their way while this step computes."""
    lengths, rank = split.partition.lengths, split.rank
    ranks = len(lengths)
    nothing = (k[:0], v[:0])
    here: Iterable[Tensor] = (k, v)
    packed = torch.stack([k, v]) if plan.last[rank] else None
    for step in range(ranks):
        owner, behind = (rank - step) % ranks, (rank - step - 1) % ranks
        sent = [(packed, (rank + 1) % ranks)] if packed is not None and step < plan.last[owner] else []
        coming = k.new_empty(2, lengths[behind], *k.shape[1:]) if step < plan.last[behind] else None
        transfer = Transfer(sent, [] if coming is None else [(coming, (rank - 1) % ranks)], split.group, KEYS)
        yield here
        transfer.wait()
        packed = coming
        here = nothing if coming is None else coming


class _Home:
    """Gradients of keys and values, [2, tokens, kv_heads, D] float32, on their way home: they follow the keys, each
    rank adds its part, and the last one sends them straight to where they belong."""

    def __init__(self, k: Tensor, split: Split, plan: RingTiles) -> None:
        self._like, self._split, self._last = k, split, plan.last
        self._transfer: Transfer | None = None
        self._coming: Tensor | None = None
        self._own: Tensor | None = None

    def add(self, step: int, gradient: Tensor | None) -> None:
        """This rank's part for the keys that are here at this step; None: it does not see them."""
        rank, ranks = self._split.rank, len(self._last)
        owner, behind = (rank - step) % ranks, (rank - step - 1) % ranks
        self._wait()
        total = self._coming
        if gradient is not None:
            total = gradient if total is None else total.add_(gradient)
        sent, received = [], []
        if step == self._last[owner] == 0:
            self._own = total
        elif step <= self._last[owner]:
            assert total is not None
            sent.append((total, owner if step == self._last[owner] else (rank + 1) % ranks))
        self._coming = self._empty(behind) if step < self._last[behind] else None
        if self._coming is not None:
            received.append((self._coming, (rank - 1) % ranks))
        if step and step == self._last[rank]:
            self._own = self._empty(rank)
            received.append((self._own, (rank + step) % ranks))
        self._transfer = Transfer(sent, received, self._split.group, GRADIENTS)

    def arrived(self) -> Tensor:
        """The whole gradient of this rank's keys and values."""
        self._wait()
        assert self._own is not None
        return self._own

    def _wait(self) -> None:
        if self._transfer is not None:
            self._transfer.wait()

    def _empty(self, rank: int) -> Tensor:
        shape = (2, self._split.partition.lengths[rank], *self._like.shape[1:])
        return torch.empty(shape, dtype=torch.float32, device=self._like.device)
