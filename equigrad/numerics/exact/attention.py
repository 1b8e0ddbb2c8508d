"""Exact causal attention over packed segments, also where context ranks divide the row.

A block of queries is taken with all keys that it sees (``exact.context``): so a maximum over a query's keys is at hand
before anything is rounded by it. What a query gets depends on the keys that it sees alone, on no later token and on no
neighbour in the row.

A row of q, k, v or of the output's gradient, one head of one token, is held as its ``unit``, below 1, times a power of
two. In a sum over keys that power goes to the other factor: a probability is rounded to a grid of its own, for it is at
most 1, and so is what it multiplies. *Budget.* Over keys, of which there are as many as the model's longest context,
and over queries times the heads that share a key: ``grids.operand_bits``.

The gradient of a key and of a value is a sum over queries, which may be on other ranks; its grid is the largest term
that any of them has for that key. So all terms are computed first, then the largest values are exchanged, and then they
are rounded and added up. They are kept for that while they fit the working memory, else computed again.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from equigrad.numerics.budget import WORKING_BYTES
from equigrad.numerics.deferred import weight_gradient
from equigrad.numerics.exact.context import Exchanged, Place, place_of, query_blocks
from equigrad.numerics.exact.elementary import exp, exponent, power_of_two
from equigrad.numerics.exact.fused import fused
from equigrad.numerics.exact.grids import (
    fixed,
    largest,
    length_bits,
    operand_bits,
    relative,
    sum_last,
    term_bits,
    value,
)
from equigrad.numerics.exact.layers import LayerGrids
from equigrad.numerics.exact.linear import scaled
from equigrad.numerics.row import Row
from equigrad.numerics.tiles import Tile


class Budget(NamedTuple):
    """
    width: [heads of a key] bits of both operands over the width of a head
    keys:  bits of a term and of what it multiplies, over keys
    terms: bits of a plain sum over keys
    queries: bits of a term and of what it multiplies, over queries and the heads that share a key
    """

    width: int
    keys: tuple[int, int]
    terms: int
    queries: tuple[int, int]

    @classmethod
    def of(cls, width: int, context: int, group: int) -> "Budget":
        """For heads of ``width``, at most ``context`` keys, and ``group`` query heads to a key head."""
        # A sink is one more term.
        return cls(
            operand_bits(width)[1],
            operand_bits(context, (53 - length_bits(context)) % 2),
            term_bits(context + 1) - 1,
            operand_bits(context * group, (53 - length_bits(context * group)) % 2),
        )


class _Units(NamedTuple):
    """Rows of [T, heads, D] as units on a grid, float64, and the power of two [T, heads] that each is to be multiplied
    by."""

    unit: Tensor
    power: Tensor

    def of_queries(self, tile: Tile, kv: int) -> tuple[Tensor, Tensor]:
        """[count, kv, group, queries, D] and [..., queries, 1]."""
        unit, power = tile.q_view(self.unit), tile.q_view(self.power)
        return unit.unflatten(1, (kv, -1)), power.unflatten(1, (kv, -1)).unsqueeze(-1)

    def of_keys(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """[count, kv, keys, D] and [count, kv, 1, 1, keys]."""
        return tile.k_view(self.unit), tile.k_view(self.power)[:, :, None, None]

    def coarser(self, bits: int) -> "_Units":
        """With fewer bits."""
        return _Units(_coarser(self.unit, bits), self.power)


@fused
def _unit(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    x = x.double()
    power = exponent(largest(x, -1))
    unit = x * power_of_two(-power)
    return fixed(unit, bits), power_of_two(power).squeeze(-1)


@fused
def _coarser(unit: Tensor, bits: int) -> Tensor:
    return fixed(unit, bits)


def _units(x: Tensor, bits: int) -> _Units:
    return _Units(*_unit(x, bits))


def _by_keys(queries: Tensor, keys: Tensor) -> Tensor:
    """[count, kv, group, queries, D] times [count, kv, keys, D] transposed -> [count, kv, group, queries, keys]."""
    flat = queries.flatten(2, 3) @ keys.transpose(-1, -2)
    return flat.unflatten(2, queries.shape[2:4])


def _over_keys(terms: Tensor, keys: Tensor) -> Tensor:
    """[count, kv, group, queries, keys] times [count, kv, keys, D] -> [count, kv, group, queries, D]."""
    return (terms.flatten(2, 3) @ keys).unflatten(2, terms.shape[2:4])


def _over_queries(terms: Tensor, queries: Tensor) -> Tensor:
    """[count, kv, group, queries, keys] and [count, kv, group, queries, D] -> [count, kv, keys, D]."""
    return terms.flatten(2, 3).transpose(-1, -2) @ queries.flatten(2, 3)


def _seen(product: Tensor, offset: int, window: int) -> Tensor:
    """[queries, keys], which key a query sees; ``window`` 0: all up to its own."""
    queries, keys = product.shape[-2:]
    place = torch.arange(queries, device=product.device)[:, None] + offset
    key = torch.arange(keys, device=product.device)
    seen = key <= place
    return seen & (key > place - window) if window else seen


def _scores(product: Tensor, powers: Tensor, scale: float) -> Tensor:
    """Rounded to float32."""
    return (product * powers * scale + 0.0).float()


@fused
def _attend(
    product: Tensor, q_power: Tensor, k_power: Tensor, v_power: Tensor, sinks: Tensor | None,
    scale: float, offset: int, window: int, terms: int, bits: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """What multiplies the values' units, [..., queries, keys]; and of each query, [..., queries, 1]: the largest score,
    the sum of the exponentials, and the largest power of the values that it sees."""
    seen = _seen(product, offset, window)
    scores = torch.where(seen, _scores(product, q_power * k_power, scale), -torch.inf)
    top = scores.amax(-1, keepdim=True)
    if sinks is not None:
        top = torch.maximum(top, sinks)
    weights = torch.where(seen, exp(scores.double() - top.double()), 0.0)
    total = fixed(weights, terms).sum(-1, keepdim=True)
    if sinks is not None:
        total = total + fixed(exp(sinks.double() - top.double()), terms)
    power = torch.where(seen, v_power, 0.0).amax(-1, keepdim=True)
    factor = torch.where(seen, weights * (v_power / power), 0.0)
    return fixed(factor, bits), top, total, power


@fused
def _finish(sums: Tensor, power: Tensor, total: Tensor, dtype: torch.dtype) -> Tensor:
    return (sums * power / total + 0.0).to(dtype)


@fused
def _terms(
    product: Tensor, dproduct: Tensor, q_power: Tensor, k_power: Tensor, v_power: Tensor, d_power: Tensor,
    top: Tensor, total: Tensor, delta: Tensor, scale: float, offset: int, window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Probabilities and the gradient of the scores, float32; and for each key the largest that they are times the
    power of a query, [count, kv, keys]."""
    seen = _seen(product, offset, window)
    scores = torch.where(seen, _scores(product, q_power * k_power, scale).double(), -torch.inf)
    weights = torch.where(seen, exp(scores - top.double()), 0.0)
    p = (weights / total).float()
    dp = (dproduct * (d_power * v_power)).float().double()
    ds = (p.double() * (dp - delta.double()).float().double()).float()
    of_p = (p.double() * d_power).amax((2, 3))
    of_ds = (ds.double().abs() * q_power).amax((2, 3))
    return p, ds, of_p, of_ds


@fused
def _of_query(ds: Tensor, k_power: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """``ds`` times the powers of the keys, in bits below the largest of a query, as units, and its power of two."""
    terms = ds.double() * k_power
    power = exponent(largest(terms, -1))
    units = terms * power_of_two(-power)
    return fixed(units, bits), power_of_two(power)


@fused
def _of_key(terms: Tensor, q_power: Tensor, size: Tensor, bits: int) -> Tensor:
    """``terms`` times the powers of the queries, in bits below a key's largest, ``size`` [count, kv, 1, 1, keys]."""
    return relative(terms.double() * q_power, bits, size)


@fused
def _scaled(sums: Tensor, power: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    return (sums * power * scale + 0.0).to(dtype)


@fused
def _delta(dout: Tensor, out: Tensor) -> Tensor:
    return sum_last(dout.double() * out.double()).float().squeeze(-1)


class _State(NamedTuple):
    """Of each query, [T, heads]: the largest score, float32, and the sum of exponentials, float64."""

    top: Tensor
    total: Tensor


def attend(
    q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile], sinks: Tensor | None, budget: Budget
) -> tuple[Tensor, _State]:
    """Output like ``q`` [T, heads, D] of ``k`` and ``v`` [keys, kv_heads, D], and what the backward pass needs."""
    scale, (a, b), kv = 1 / math.sqrt(q.shape[-1]), budget.keys, k.shape[1]
    qu, ku, vu = _units(q, budget.width), _units(k, budget.width), _units(v, b)
    out = torch.empty(*q.shape[:2], v.shape[-1], dtype=q.dtype, device=q.device)
    state = _State(*(torch.empty(q.shape[:2], dtype=t, device=q.device) for t in (torch.float32, torch.float64)))
    if sinks is not None:
        sinks = sinks.float().view(1, kv, -1, 1, 1)
    for tile in tiles:
        (queries, q_power), (keys, k_power), (values, v_power) = (
            qu.of_queries(tile, kv),
            ku.of_keys(tile),
            vu.of_keys(tile),
        )
        factors, top, total, power = _attend(
            _by_keys(queries, keys), q_power, k_power, v_power, sinks,
            scale, tile.offset, tile.window or 0, budget.terms, a,
        )  # fmt: skip
        found = _finish(_over_keys(factors, values), power, total, q.dtype)
        tile.q_view(out).unflatten(1, (kv, -1)).copy_(found)
        for kept, of_tile in zip(state, (top, total), strict=True):
            tile.q_view(kept).unflatten(1, (kv, -1)).copy_(of_tile.squeeze(-1))
    return out, state


class _Gradients:
    """The backward pass over some queries and keys, in two parts: the ``largest`` term of each key, and the sums."""

    def __init__(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        state: _State,
        tiles: Sequence[Tile],
        budget: Budget,
    ) -> None:
        self._budget, self._tiles, self._state, self._kv = budget, tiles, state, k.shape[1]
        self._scale = 1 / math.sqrt(q.shape[-1])
        self._q, self._k, self._v, self._d = (_units(x, budget.width) for x in (q, k, v, dout))
        self.delta = _delta(dout, out)
        self._dtype, pairs = q.dtype, sum(tile.count * tile.queries * tile.keys for tile in tiles) * q.shape[1]
        self._kept: dict[Tile, tuple[Tensor, Tensor]] | None = {} if 8 * pairs <= WORKING_BYTES else None
        self.largest = torch.zeros(2, *k.shape[:2], dtype=torch.float64, device=k.device)
        for tile in tiles:
            p, ds, *sizes = self._compute(tile)
            for known, size in zip(self.largest, sizes, strict=True):
                view = tile.k_view(known)
                torch.maximum(view, size, out=view)
            if self._kept is not None:
                self._kept[tile] = p, ds

    def _of_queries(self, x: Tensor, tile: Tile) -> Tensor:
        return tile.q_view(x).unflatten(1, (self._kv, -1)).unsqueeze(-1)

    def _compute(self, tile: Tile) -> tuple[Tensor, ...]:
        (queries, q_power), (dqueries, d_power) = (u.of_queries(tile, self._kv) for u in (self._q, self._d))
        (keys, k_power), (values, v_power) = (u.of_keys(tile) for u in (self._k, self._v))
        top, total, delta = (self._of_queries(x, tile) for x in (*self._state, self.delta))
        return _terms(
            _by_keys(queries, keys), _by_keys(dqueries, values), q_power, k_power, v_power, d_power,
            top, total, delta, self._scale, tile.offset, tile.window or 0,
        )  # fmt: skip

    def sums(self, sizes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradient of q, and these queries' exact parts of those of k and v, float64, the former not yet scaled:
        that would round it; ``sizes`` [2, keys, kv]: the largest terms of a key, of v and of k, on all ranks."""
        (a, b), (a_q, b_q) = self._budget.keys, self._budget.queries
        keys, (queries, douts) = self._k.coarser(b), (u.coarser(b_q) for u in (self._q, self._d))
        dq = torch.empty(*self._q.unit.shape, dtype=self._dtype, device=keys.unit.device)
        dk = torch.zeros_like(keys.unit)
        dv = torch.zeros(*keys.power.shape, douts.unit.shape[-1], dtype=torch.float64, device=keys.unit.device)
        for tile in self._tiles:
            p, ds = self._kept[tile] if self._kept is not None else self._compute(tile)[:2]
            of_key, k_power = keys.of_keys(tile)
            terms, power = _of_query(ds, k_power, a)
            found = _scaled(_over_keys(terms, of_key), power, self._scale, self._dtype)
            tile.q_view(dq).unflatten(1, (self._kv, -1)).copy_(found)
            of_v, of_k = (tile.k_view(size)[:, :, None, None] for size in sizes)
            for total, x, size, units in ((dk, ds, of_k, queries), (dv, p, of_v, douts)):
                unit, q_power = units.of_queries(tile, self._kv)
                view = tile.k_view(total)
                view += _over_queries(_of_key(x, q_power, size, a_q), unit)
        return dq, dk, dv


class Attention(torch.autograd.Function):
    """Saves q, k, v and the output as they lie on the ranks, and two numbers for each query."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, row: Row, window: int | None,
        context: int, grids: LayerGrids | None,
    ) -> Tensor:  # fmt: skip
        heads, kv_heads = q.shape[1], k.shape[1]
        if not row.tokens or not heads:  # which all context ranks know
            ctx.nothing = (q, k, v, sinks)
            return torch.zeros_like(q)
        place = place_of(row, window, heads, kv_heads)
        budget = Budget.of(q.shape[-1], context, heads // kv_heads)
        if max(row.lengths) > context:
            raise ValueError(f"a segment of {max(row.lengths)} tokens, where exact sums are made for {context} at most")
        own = place.enter(q, k, v)
        if not own[0].shape[1]:
            place = replace(place, tiles=())
        out, state = attend(*own, place.tiles, None if sinks is None else place.sinks(sinks), budget)
        # Of gathered keys only the own ones are kept: they are gathered again.
        kept = own if isinstance(place, Exchanged) else (q, k, v)
        ctx.save_for_backward(*kept, out, *state)
        ctx.place, ctx.budget, ctx.sinks, ctx.grids, ctx.nothing = place, budget, sinks, grids, None
        return place.leave(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.nothing is not None:
            q, k, v, sinks = ctx.nothing
            dsinks = None
            if ctx.needs_input_grad[3]:
                dsinks = weight_gradient(sinks, lambda: torch.zeros_like(sinks))
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), dsinks, None, None, None, None
        q, k, v, out, top, total = ctx.saved_tensors
        place: Place = ctx.place
        if not isinstance(place, Exchanged):
            q, k, v = place.enter(q, k, v)
        dout, sinks = place.enter_queries(dout), ctx.sinks
        work = _Gradients(dout, q, k, v, out, _State(top, total), place.tiles, ctx.budget)
        dq, dk, dv = work.sums(place.largest(work.largest))
        dk = scaled(place.home(dk), 1 / math.sqrt(q.shape[-1]), q.dtype)
        dv = value(place.home(dv), q.dtype)
        dsinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            terms = _sink_terms(place.sinks(sinks), top, total, work.delta)
            whole, grids = place.sink_terms(terms, len(sinks)), ctx.grids
            dsinks = weight_gradient(sinks, lambda: grids["sum"].round(whole).sum(0))
        return place.leave(dq), dk, dv, dsinks, None, None, None, None


@fused
def _sink_terms(sinks: Tensor, top: Tensor, total: Tensor, delta: Tensor) -> Tensor:
    """The gradient of the sinks at each query, [T, heads]."""
    p = (exp(sinks.float().double() - top.double()) / total).float()
    return -(p.double() * delta.double())


def decode(
    q: Tensor, keys: Tensor, values: Tensor, row: Row, window: int | None, sinks: Tensor | None, context: int
) -> Tensor:
    """Attention of the last tokens of sequences, ``q`` [T, heads, D], to all that a cache holds of each, [sequences,
    room, kv_heads, D]: the bits that they would have if all tokens were computed together."""
    out, place = torch.empty_like(q), 0
    budget = Budget.of(q.shape[-1], context, q.shape[1] // max(keys.shape[2], 1))
    for sequence, length in enumerate(row.lengths if q.shape[1] else ()):
        stop = int(row.positions[place + length - 1]) + 1
        tiles = query_blocks((stop,), ((stop - length, stop),), window)
        own = slice(place, place + length)
        out[own], _ = attend(q[own], keys[sequence, :stop], values[sequence, :stop], tiles, sinks, budget)
        place += length
    return out
