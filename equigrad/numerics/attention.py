"""Causal attention over packed segments with no pad token, and no token seeing another segment.

All of it is tiles (``numerics.tiles``), each one call of a flash kernel that also returns the log-sum-exp of its
scores. Tiles of one query are merged by that. Backward, each runs with the merged output and log-sum-exp, and what it
gives are exact parts of the gradients (Liu et al., ring attention, arXiv 2310.01889). Runs of equal-length segments are
one tile; the tiles of a sliding window follow it, so that their cost grows with the window. On CUDA in half precision a
whole row is one call of the variable-length kernel. Knows lengths only: no positions, no model, no other rank.
"""

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from equigrad.numerics.deferred import weight_gradient
from equigrad.numerics.tiles import Tile, Tiles, segment_tiles

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# Scores that the portable kernel holds at a time (64 MB).
_SCORES = 1 << 24


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    window: int | None,
    sinks: Tensor | None = None,
    first_head: int = 0,
) -> Tensor:
    """``q`` [T, heads, D], ``k``/``v`` [T, kv_heads, D], ``sum(lengths) == T`` -> [T, heads, D].

    A query sees the keys of its own segment up to itself; with ``window``, the latest ``window`` of them. ``sinks`` are
    logits, one for each query head, that take part in the softmax and carry no value (OpenAI, gpt-oss); head 0 of ``q``
    has the one at ``first_head``.
    """
    lengths = tuple(lengths)
    if q.device.type != "cpu" and sinks is None and q.numel():
        if q.device.type == "cuda" and _has_cuda_flash(q):
            return _varlen(q, k, v, lengths, window)
        return per_tile(q, k, v, segment_tiles(lengths, window))
    return _Packed.apply(q, k, v, sinks, first_head, segment_tiles(lengths, window))


class _Packed(torch.autograd.Function):
    """All tiles of a row as one autograd node."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, first_head: int, tiles: Tiles
    ) -> Tensor:
        out, log_sum = attend(q, k, v, tiles)
        out, log_sum = add_sinks(out, log_sum, sinks, first_head)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, log_sum)
        ctx.sinks, ctx.first_head, ctx.tiles = sinks, first_head, tiles
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        known = Attended(dout, *ctx.saved_tensors)
        dq, dk, dv = attend_backward(known, ctx.tiles)
        dsinks = sink_gradient(ctx.sinks, ctx.first_head, known)
        return dq.to(known.q.dtype), dk.to(known.k.dtype), dv.to(known.v.dtype), dsinks, None, None


class Attended(NamedTuple):
    """What gradients are made of.

    dout:  gradient of the output
    q:     the queries; with them, whichever keys ``k`` and values ``v`` a tile is of
    out:   the final output
    total: the final log-sum-exp [T, heads] float32
    """

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    total: Tensor


Gradients = tuple[Tensor, Tensor, Tensor]
"""Of q, k and v."""


def attend(q: Tensor, k: Tensor, v: Tensor, tiles: Tiles) -> tuple[Tensor, Tensor]:
    """Output [T, heads, D], in float32 where several tiles were merged, and log-sum-exp [T, heads] float32 of tiles of
    which the first hold every query once."""
    parts, sums = [], []
    for tile in tiles.first if q.numel() else ():
        part, log_sum = tile_forward(q, k, v, tile)
        parts.append(_tokens_first(part))
        sums.append(_tokens_first(log_sum))
    out = joined(parts, q)
    total = joined(sums, q[..., 0])
    if tiles.rest:
        out = out.float()
        merge(out, total, q, k, v, tiles.rest)
    return out, total


def merge(out: Tensor, total: Tensor, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile]) -> None:
    """Adds tiles to an output and its log-sum-exp, both float32, in place."""
    for tile in tiles if q.numel() else ():
        part, log_sum = tile_forward(q, k, v, tile)
        out_view, total_view = tile.q_view(out), tile.q_view(total)
        new = torch.logaddexp(total_view, log_sum)
        before, here = ((log - new).exp_()[..., None] for log in (total_view, log_sum))
        out_view.mul_(before).addcmul_(part.to(out.dtype), here)
        total_view.copy_(new)


def attend_backward(known: Attended, tiles: Tiles) -> Gradients:
    """The gradients of ``attend``, in float32 where several tiles were added, in their order."""
    q, k, v = known.q, known.k, known.v
    if not q.numel():
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    if tiles.rest:
        sums = _zeros(q), _zeros(k), _zeros(v)
        add_gradients(sums, known, (*tiles.first, *tiles.rest))
        return sums
    parts = [tile_backward(known, tile) for tile in tiles.first]
    dqs, dks, dvs = zip(*parts, strict=True)
    dq = joined([_tokens_first(part) for part in dqs], q)
    if tiles.keys_once:
        dk, dv = (joined([_tokens_first(part) for part in each], x) for each, x in ((dks, k), (dvs, v)))
        return dq, dk, dv
    dk, dv = _zeros(k), _zeros(v)
    for tile, one, other in zip(tiles.first, dks, dvs, strict=True):
        tile.k_view(dk).add_(one)
        tile.k_view(dv).add_(other)
    return dq, dk, dv


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros(like.shape, dtype=torch.float32, device=like.device)


def add_gradients(sums: Gradients, known: Attended, tiles: Sequence[Tile]) -> None:
    """Adds the gradients of tiles, to sums in float32, in place."""
    for tile in tiles if known.q.numel() else ():
        dq, dk, dv = tile_backward(known, tile)
        tile.q_view(sums[0]).add_(dq)
        tile.k_view(sums[1]).add_(dk)
        tile.k_view(sums[2]).add_(dv)


def add_sinks(out: Tensor, total: Tensor, sinks: Tensor | None, first_head: int) -> tuple[Tensor, Tensor]:
    """The output and log-sum-exp of a softmax that has one more logit, with no value; ``out`` is overwritten."""
    if sinks is None:
        return out, total
    new = torch.logaddexp(total, _own_sinks(sinks, first_head, total))
    return out.mul_((total - new).exp_()[..., None]), new


def sink_gradient(sinks: Tensor | None, first_head: int, known: Attended) -> Tensor | None:
    """The gradient of the sinks, unless they are frozen: zero for heads that are not here."""
    if sinks is None or not sinks.requires_grad:
        return None
    return weight_gradient(sinks, partial(_sink_gradient, sinks, first_head, known.dout, known.out, known.total))


def _sink_gradient(sinks: Tensor, first_head: int, dout: Tensor, out: Tensor, total: Tensor) -> Tensor:
    gradient = torch.zeros_like(sinks)
    probability = (_own_sinks(sinks, first_head, total) - total).exp_()
    values = torch.einsum("thd,thd->th", dout.to(total.dtype), out.to(total.dtype))
    gradient[first_head : first_head + total.shape[1]] = probability.mul_(values).sum(0).neg_()
    return gradient


def _own_sinks(sinks: Tensor, first_head: int, total: Tensor) -> Tensor:
    return sinks.detach()[first_head : first_head + total.shape[1]].to(total.dtype)


def _tokens_first(part: Tensor) -> Tensor:
    """[count, heads, length, ...] -> [count * length, heads, ...]; a view where the kernel wrote in that order."""
    return part.transpose(1, 2).flatten(0, 1)


def joined(parts: list[Tensor], like: Tensor) -> Tensor:
    """The parts of a row one after another; without a copy if there is but one."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if parts else torch.zeros_like(like)


# Kernels of one tile. Forward: output [count, heads, queries, D] and log-sum-exp [count, heads, queries] float32.
# Backward: gradients of the tile's queries, keys and values.


def tile_forward(q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
    """One tile of ``q`` [T, heads, D], ``k`` and ``v`` [tokens, kv_heads, D]."""
    if q.device.type == "cpu":
        return _flash(*tile.split(q, k, v), 0.0, tile.causal, attn_mask=tile.mask(q))
    if q.device.type == "cuda" and _has_cuda_flash(q):
        return _cuda_forward(q, k, v, tile)
    return portable_forward(q, k, v, tile)


def tile_backward(known: Attended, tile: Tile) -> Gradients:
    """Its part of the gradients of its queries, keys and values."""
    dout, q, k, v, out, total = known
    if q.device.type == "cpu":
        views = (tile.q_view(dout), *tile.split(q, k, v), tile.q_view(out), tile.q_view(total))
        return _flash_backward(*views, 0.0, tile.causal, attn_mask=tile.mask(q))
    if q.device.type == "cuda" and _has_cuda_flash(q):
        return _cuda_backward(known, tile)
    return portable_backward(known, tile)


def portable_forward(q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
    """Any device and head size: matrix products in float32, some queries at a time."""
    queries, keys, values = _portable(q, k, v, tile)
    outs, sums = [], []
    for part in _query_blocks(queries, keys):
        scores = _scores(queries, keys, part, tile)
        total = scores.logsumexp(-1)
        outs.append((scores - total[..., None]).exp_() @ values)
        sums.append(total)
    return torch.cat(outs, 2).to(q.dtype), torch.cat(sums, 2)


def portable_backward(known: Attended, tile: Tile) -> Gradients:
    """The gradients of ``portable_forward``."""
    dout, q, k, v, out, total = known
    queries, keys, values = _portable(q, k, v, tile)
    upstream, own, log_sum = (tile.q_view(x).float() for x in (dout, out, total))
    mean = (upstream * own).sum(-1, keepdim=True)
    dqs, dk, dv = [], torch.zeros_like(keys), torch.zeros_like(values)
    for part in _query_blocks(queries, keys):
        weights = (_scores(queries, keys, part, tile) - log_sum[:, :, part, None]).exp_()
        dv += weights.mT @ upstream[:, :, part]
        errors = (upstream[:, :, part] @ values.mT - mean[:, :, part]) * weights / math.sqrt(q.shape[-1])
        dqs.append(errors @ keys)
        dk += errors.mT @ queries[:, :, part]
    dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2).to(k.dtype) for x in (dk, dv))
    return torch.cat(dqs, 2).to(q.dtype), dk, dv


def _portable(q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
    queries, keys, values = (x.float() for x in tile.split(q, k, v))
    group = q.shape[1] // k.shape[1]
    return queries, keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)


def _query_blocks(queries: Tensor, keys: Tensor) -> list[slice]:
    size = max(1, _SCORES // (len(keys) * keys.shape[1] * keys.shape[2]))
    return [slice(first, first + size) for first in range(0, queries.shape[2], size)]


def _scores(queries: Tensor, keys: Tensor, part: slice, tile: Tile) -> Tensor:
    scores = queries[:, :, part] @ keys.mT / math.sqrt(queries.shape[-1])
    if tile.full:
        return scores
    at = torch.arange(tile.queries, device=scores.device)[part, None] + tile.offset
    key = torch.arange(tile.keys, device=scores.device)
    hidden = key > at
    if tile.window is not None:
        hidden |= key <= at - tile.window
    return scores.masked_fill_(hidden, -torch.inf)


# What follows is for CUDA and not yet run on a GPU.


def _has_cuda_flash(q: Tensor) -> bool:
    return q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def _cuda_forward(q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
    flat = (_tokens_first(x) for x in tile.split(q, k, v))
    out, log_sum, *_ = torch.ops.aten._flash_attention_forward(
        *flat, *_blocks(tile, q.device), tile.queries, tile.keys, 0.0, False, False, **_flash_window(tile)
    )
    log_sum = log_sum.unflatten(1, (tile.count, tile.queries)).transpose(0, 1)
    return out.unflatten(0, (tile.count, tile.queries)).transpose(1, 2), log_sum


def _cuda_backward(known: Attended, tile: Tile) -> Gradients:
    dout, q, k, v, out, total = known
    upstream, *flat = (_tokens_first(x) for x in (tile.q_view(dout), *tile.split(q, k, v), tile.q_view(out)))
    log_sum = _tokens_first(tile.q_view(total)).t().contiguous()
    random = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the state of the dropout that there is not
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        upstream.contiguous(), *flat, log_sum, *_blocks(tile, q.device), tile.queries, tile.keys, 0.0, False,
        random, random.new_empty(0), **_flash_window(tile),
    )  # fmt: skip
    dq = dq.unflatten(0, (tile.count, tile.queries)).transpose(1, 2)
    dk, dv = (x.unflatten(0, (tile.count, tile.keys)).transpose(1, 2) for x in (dk, dv))
    return dq, dk, dv


def _blocks(tile: Tile, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where the blocks of a tile begin and end, for queries and keys."""
    return tuple(  # type: ignore[return-value]
        torch.arange(0, tile.count * n + 1, n, dtype=torch.int32, device=device) for n in (tile.queries, tile.keys)
    )


def _flash_window(tile: Tile) -> dict[str, int]:
    """The kernel counts from the diagonal that ends at the last query and the last key."""
    if tile.full:
        return {"window_size_left": -1, "window_size_right": -1}
    shift = tile.keys - tile.queries - tile.offset
    left = -1 if tile.window is None else tile.window - 1 + shift
    return {"window_size_left": left, "window_size_right": -shift}


def per_tile(q: Tensor, k: Tensor, v: Tensor, tiles: Tiles) -> Tensor:
    """Any device, through PyTorch's dispatcher and autograd, for tiles that hold each query once."""
    parts = []
    for tile in tiles.first:
        queries, keys, values = tile.split(q, k, v)
        if q.dtype == torch.float32 or tile.masked:  # else CUDA would fall back to kernels that hold all scores
            group = q.shape[1] // k.shape[1]
            keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
        mask, grouped = tile.mask(q), queries.shape[1] != keys.shape[1]
        part = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=tile.causal, enable_gqa=grouped
        )
        parts.append(_tokens_first(part))
    return torch.cat(parts) if parts else q * 1 + 0 * (k.sum() + v.sum())


def _varlen(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], window: int | None) -> Tensor:
    """Half precision: one call for the whole row."""
    from torch.nn.attention.varlen import varlen_attn

    ends, longest = _ends(lengths, q.device), max(lengths)
    reach = -1 if window is None else window - 1
    out = varlen_attn(q, k, v, ends, ends, longest, longest, window_size=(reach, 0), enable_gqa=True)
    assert isinstance(out, Tensor)  # it is a pair only where auxiliary outputs are asked for
    return out


@lru_cache(maxsize=16)
@torch.inference_mode(False)
def _ends(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Ends of the segments, made once for all layers of a row: the copy to the device waits for it."""
    return torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
