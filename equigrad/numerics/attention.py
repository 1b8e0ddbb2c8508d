"""Causal attention over packed segments with no pad token, and no token seeing another segment.

On CPU, runs of equal-length segments are one call of PyTorch's flash kernel each; sliding windows go block by block,
so that their cost grows with the window, not with the segment. On CUDA in half precision, one call of the
variable-length kernel. Knows lengths only: no positions, no model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def packed_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], window: int | None) -> Tensor:
    """``q`` [T, heads, D], ``k``/``v`` [T, kv_heads, D], ``sum(lengths) == T`` -> [T, heads, D].

    A query sees the keys of its own segment up to itself; with ``window``, the latest ``window`` of them.
    """
    if q.device.type == "cuda" and q.dtype != torch.float32:
        return _varlen(q, k, v, lengths, window)
    tiles = tuple(_tiles(lengths, window))
    if q.device.type == "cpu":
        return _PackedFlash.apply(q, k, v, tiles)
    return _per_tile(q, k, v, tiles)


@dataclass(frozen=True)
class _Tile:
    """Queries [q0, q0 + count*queries) against keys [k0, k0 + count*keys), as ``count`` independent blocks.

    ``offset`` is the distance from the first key to the first query. Without ``window`` and offset the block is
    plainly causal.
    """

    q0: int
    k0: int
    count: int
    queries: int
    keys: int
    window: int | None = None

    def split(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views [count, heads, length, D] of the tokens of this tile."""
        return self.q_view(q), self.k_view(k), self.k_view(v)

    def q_view(self, x: Tensor) -> Tensor:
        return x[self.q0 : self.q0 + self.count * self.queries].unflatten(0, (self.count, -1)).transpose(1, 2)

    def k_view(self, x: Tensor) -> Tensor:
        return x[self.k0 : self.k0 + self.count * self.keys].unflatten(0, (self.count, -1)).transpose(1, 2)

    def mask(self, like: Tensor) -> Tensor | None:
        """Additive mask [queries, keys], or None where the block is plainly causal."""
        if self.window is None:
            return None
        key = torch.arange(self.keys, device=like.device)
        query = torch.arange(self.queries, device=like.device)[:, None] + (self.q0 - self.k0)
        seen = (key <= query) & (key > query - self.window)
        return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(~seen, -torch.inf)


def _tiles(lengths: Sequence[int], window: int | None) -> Iterator[_Tile]:
    start = 0
    for length, run in groupby(lengths):
        count = len(list(run))
        if window is None or length <= window:
            yield _Tile(start, start, count, length, length)
            start += count * length
            continue
        block = max(window, 128)  # at least 128 queries a call, so that small windows do not mean many calls
        for _ in range(count):
            for first in range(0, length, block):
                low, high = max(0, first - window + 1), min(first + block, length)
                yield _Tile(start + first, start + low, 1, high - first, high - low, window)
            start += length


class _PackedFlash(torch.autograd.Function):
    """All tiles of a row as one autograd node; the kernels are the ones behind scaled_dot_product_attention."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, tiles: tuple[_Tile, ...]) -> Tensor:
        parts, sums = [], []
        for tile in tiles:
            part, log_sum = _flash(*tile.split(q, k, v), 0.0, tile.window is None, attn_mask=tile.mask(q))
            parts.append(_tokens_first(part))
            sums.append(log_sum)
        out = _joined(parts, q)
        ctx.save_for_backward(q, k, v, out, *sums)
        ctx.tiles = tiles
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, *sums = ctx.saved_tensors
        parts = []
        for tile, log_sum in zip(ctx.tiles, sums, strict=True):
            parts += _flash_backward(
                tile.q_view(dout),
                *tile.split(q, k, v),
                tile.q_view(out),
                log_sum,
                0.0,
                tile.window is None,
                attn_mask=tile.mask(q),
            )
        dqs, dks, dvs = parts[::3], parts[1::3], parts[2::3]
        dq = _joined([_tokens_first(part) for part in dqs], q)
        if all(tile.window is None for tile in ctx.tiles):  # each key belongs to one tile
            dk, dv = (_joined([_tokens_first(p) for p in ps], like) for ps, like in ((dks, k), (dvs, v)))
        else:
            dk, dv = torch.zeros_like(k), torch.zeros_like(v)
            for tile, one, other in zip(ctx.tiles, dks, dvs, strict=True):
                tile.k_view(dk).add_(one)
                tile.k_view(dv).add_(other)
        return dq, dk, dv, None


def _tokens_first(part: Tensor) -> Tensor:
    """[count, heads, length, D] -> [count * length, heads, D]; a view where the kernel wrote in that order."""
    return part.transpose(1, 2).flatten(0, 1)


def _joined(parts: list[Tensor], like: Tensor) -> Tensor:
    """The parts of a row one after another; without a copy if there is but one."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if parts else torch.zeros_like(like)


def _per_tile(q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[_Tile]) -> Tensor:
    """Any device, through PyTorch's dispatcher and autograd."""
    parts = [
        _tokens_first(
            torch.nn.functional.scaled_dot_product_attention(
                *tile.split(q, k, v), attn_mask=tile.mask(q), is_causal=tile.window is None, enable_gqa=True
            )
        )
        for tile in tiles
    ]
    return torch.cat(parts) if parts else q * 1 + 0 * (k.sum() + v.sum())


def _varlen(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], window: int | None) -> Tensor:
    """CUDA, half precision: one call for the whole row. Not yet measured on a GPU."""
    from torch.nn.attention.varlen import varlen_attn

    if not lengths:
        return _per_tile(q, k, v, ())
    ends = torch.tensor([0, *lengths], dtype=torch.int32, device=q.device).cumsum(0, dtype=torch.int32)
    longest = max(lengths)
    out = varlen_attn(
        q, k, v, ends, ends, longest, longest, window_size=(-1 if window is None else window - 1, 0), enable_gqa=True
    )
    assert isinstance(out, Tensor)  # it is a pair only where auxiliary outputs are asked for
    return out
