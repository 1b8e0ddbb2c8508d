"""Exchanges of real tokens between the ranks of a group: uneven, with gradients, and with nothing padded.

All of them stand on one primitive, an all-to-all of pieces of known sizes. Where pieces are added they are added in the
order of the ranks, so that a sum has the same bits whatever the backend does. A rank may hold no tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from equigrad.parallel.partition import Partition, Range, part_of


@dataclass(frozen=True)
class Axis:
    """One dimension of the device mesh, as this rank sees it. With one rank there is no group and nothing is sent."""

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1

    def add(self, values: Tensor) -> Tensor:
        """Sums over the ranks, element by element, in place."""
        if self.group is not None and values.numel():
            dist.all_reduce(values, group=self.group)
        return values

    def largest(self, values: Tensor) -> Tensor:
        """Replaces each entry by the largest one of the ranks."""
        if self.group is not None and values.numel():
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return values

    def split(self, partition: Partition) -> "Split | None":
        """This rank's part of what is divided over the axis; None where one rank has it all."""
        return None if self.group is None else Split(partition, self.group, self.rank)


ALONE = Axis()


@dataclass(frozen=True)
class Split:
    """Tokens divided over a process group, and which part is this rank's."""

    partition: Partition
    group: dist.ProcessGroup
    rank: int

    @property
    def length(self) -> int:
        """Tokens on this rank."""
        return self.partition.lengths[self.rank]

    def share(self, total: int) -> Range:
        """This rank's part of something else that the same ranks divide evenly."""
        return part_of(total, len(self.partition.ranges), self.rank)

    def take(self, x: Tensor) -> Tensor:
        """This rank's part of a whole stream [T, ...]."""
        parts = [x[start:stop] for start, stop in self.partition.ranges[self.rank]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def exchange(parts: Sequence[Tensor], shapes: Sequence[Sequence[int]], group: dist.ProcessGroup) -> list[Tensor]:
    """Sends ``parts[r]`` to rank r; returns what each rank sent here, in rank order, of the ``shapes`` agreed on."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    sent = torch.cat([part.reshape(-1) for part in parts])
    received = sent.new_empty(sum(sizes))
    dist.all_to_all_single(received, sent, sizes, [part.numel() for part in parts], group)
    return [flat.view(torch.Size(shape)) for flat, shape in zip(received.split(sizes), shapes, strict=True)]


def all_to_all(x: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """The first ``sent[0]`` tokens of ``x`` [sum(sent), ...] to rank 0, the next ``sent[1]`` to rank 1, ...; returns
    ``received[r]`` tokens from each rank r, in rank order. The gradient goes the way back."""
    return _AllToAll.apply(x, sent, received, group)


def exchanged_tokens(x: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """``all_to_all`` without a gradient."""
    y = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(y, x.contiguous(), list(received), list(sent), group)
    return y


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
        ctx.back = (received, sent, group)
        return exchanged_tokens(x, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return exchanged_tokens(dy, *ctx.back), None, None, None


def join(parts: Sequence[Tensor], partition: Partition) -> Tensor:
    """The row, from every rank's part."""
    if partition.in_rank_order:
        return torch.cat(list(parts))
    read, pieces = [0] * len(parts), []
    for rank, (start, stop) in partition.order:
        pieces.append(parts[rank][read[rank] : read[rank] + stop - start])
        read[rank] += stop - start
    return torch.cat(pieces) if pieces else torch.cat(list(parts))


def gather(x: Tensor, split: Split | None) -> Tensor:
    """Every rank's tokens: [own tokens, ...] -> [all tokens, ...]. The gradient is ``reduce_scatter`` of it."""
    return x if split is None else _Gather.apply(x, split)


def reduce_scatter(x: Tensor, split: Split | None) -> Tensor:
    """Adds the ranks' tensors, each keeping its own tokens: [all tokens, ...] -> [own tokens, ...]. The gradient is
    ``gather`` of it."""
    return x if split is None else _ReduceScatter.apply(x, split)


def gathered(x: Tensor, split: Split | None) -> Tensor:
    """``gather`` without a gradient, as functions that write out their own need it."""
    if split is None:
        return x
    partition = split.partition
    if not partition.total:
        return x
    if len(set(partition.lengths)) == 1:
        flat = x.new_empty(partition.total, *x.shape[1:])
        dist.all_gather_single(flat, x.contiguous(), split.group)
        parts = list(flat.split(split.length))
        return flat if partition.in_rank_order else join(parts, partition)
    shapes = [(length, *x.shape[1:]) for length in partition.lengths]
    return join(exchange([x] * len(shapes), shapes, split.group), partition)


def reduce_scattered(x: Tensor, split: Split | None) -> Tensor:
    """``reduce_scatter`` without a gradient."""
    if split is None:
        return x
    partition = split.partition
    if not partition.total:
        return x
    theirs = [Split(partition, split.group, rank).take(x) for rank in range(len(partition.lengths))]
    return add_in_order(exchange(theirs, [theirs[split.rank].shape] * len(theirs), split.group))


def add_in_order(parts: Sequence[Tensor]) -> Tensor:
    """Their sum, from the first to the last; the first is overwritten."""
    total, *rest = parts
    for part in rest:
        total += part
    return total


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split: Split) -> Tensor:
        ctx.split = split
        return gathered(x, split)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return reduce_scattered(dy, ctx.split), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split: Split) -> Tensor:
        ctx.split = split
        return reduce_scattered(x, split)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return gathered(dy, ctx.split), None


Heads = tuple[tuple[int, ...], ...]
"""For each rank, the heads that it works on; a head may be wanted by several."""


def tokens_to_heads(x: Tensor, split: Split, heads: Heads) -> Tensor:
    """Own tokens of all heads -> all tokens of own heads: [own tokens, heads, D] -> [tokens, len(heads[rank]), D]."""
    return _TokensToHeads.apply(x, split, heads)


def heads_to_tokens(x: Tensor, split: Split, heads: Heads) -> Tensor:
    """The way back, where every head is on one rank: [tokens, len(heads[rank]), D] -> [own tokens, heads, D]."""
    return _HeadsToTokens.apply(x, split, heads)


def exchanged_to_heads(x: Tensor, split: Split, heads: Heads) -> Tensor:
    """``tokens_to_heads`` without a gradient."""
    own = len(heads[split.rank])
    parts = [x[:, list(wanted)] for wanted in heads]
    return join(exchange(parts, [(n, own, x.shape[-1]) for n in split.partition.lengths], split.group), split.partition)


def exchanged_to_tokens(x: Tensor, split: Split, heads: Heads) -> list[Tensor]:
    """The way back, without a gradient: own tokens of each rank's heads, in rank order."""
    parts = [Split(split.partition, split.group, rank).take(x) for rank in range(len(heads))]
    return exchange(parts, [(split.length, len(own), x.shape[-1]) for own in heads], split.group)


class _TokensToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split: Split, heads: Heads) -> Tensor:
        ctx.split, ctx.heads, ctx.count = split, heads, x.shape[1]
        return exchanged_to_heads(x, split, heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        dx = dy.new_zeros(ctx.split.length, ctx.count, dy.shape[-1])
        for own, part in zip(ctx.heads, exchanged_to_tokens(dy, ctx.split, ctx.heads), strict=True):
            dx[:, list(own)] += part  # no head twice in one part, and the parts in rank order
        return dx, None, None


class _HeadsToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split: Split, heads: Heads) -> Tensor:
        ctx.split, ctx.heads = split, heads
        order = [head for own in heads for head in own]
        whole = torch.cat(exchanged_to_tokens(x, split, heads), 1)
        return whole if order == sorted(order) else whole[:, torch.tensor(order).argsort()]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return exchanged_to_heads(dy, ctx.split, ctx.heads), None, None
