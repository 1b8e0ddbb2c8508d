"""What decoding keeps of earlier tokens: keys and values, or the states of the gated delta rule. One slot of the cache
is one sequence.

Sequences come and go, and stand in the first slots without a gap: so a step takes a view of the cache and copies none
of it. Knows nothing of sampling or of models; a layer has its room when it first asks for it.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from equigrad.numerics.attention import packed_attention
from equigrad.numerics.delta import Weights
from equigrad.numerics.ops import AttentionLayer, DeltaLayer
from equigrad.numerics.row import Row
from equigrad.parallel.collectives import ALONE, Axis
from equigrad.parallel.partition import Partition


class RecurrentRule(Protocol):
    """How a module computes the gated delta rule without gradients: the output, and of each sequence the window of the
    convolution and the state."""

    def prefill(
        self, x: Tensor, rates: Tensor, weights: Weights, layer: DeltaLayer, lengths: tuple[int, ...], /
    ) -> tuple[Tensor, Tensor, Tensor]:
        """From the beginning, for whole segments."""
        ...

    def step(
        self, x: Tensor, rates: Tensor, weights: Weights, layer: DeltaLayer, window: Tensor, state: Tensor, /
    ) -> tuple[Tensor, Tensor, Tensor]:
        """For one more token of each."""
        ...


class DecodingCache:
    """Room for ``slots`` x ``capacity`` tokens in each layer with attention.

    A row brings whole new sequences as segments (``prefill``), or one more token of every sequence (``step``). Its
    ``positions`` count on from what the cache holds. A row is to be computed before the next is made.

    lengths: tokens of each sequence, those of the present row included
    """

    def __init__(
        self,
        slots: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        tensor: Axis = ALONE,
        experts: Axis = ALONE,
    ) -> None:
        """``kv_heads``: those on this rank of the axis ``tensor``. ``experts``: the axis that shares the experts."""
        self._tensor, self._experts, self._slots, self._device = tensor, experts, slots, device
        # Before a sequence's tokens is a place that stays zero, as what a sink's logit belongs to.
        shape = (2, slots, 1 + capacity, kv_heads, head_dim)
        self._room = partial(torch.zeros, shape, dtype=dtype, device=device)
        self._stores: dict[int, Tensor] = {}
        self._recurrent: dict[int, tuple[Tensor, Tensor]] = {}
        self.lengths: list[int] = []
        self._at: tuple[Tensor, Tensor]  # of the row's tokens, their slots, and their places there
        self._longest, self._masks = 0, dict[int | None, Tensor]()
        self._aside = 0
        self._begin(0, [])

    @property
    def row_lengths(self) -> tuple[int, ...]:
        """Of the sequences of the present row."""
        return tuple(self.lengths[self._first :])

    def prefill(self, lengths: Sequence[int]) -> Row:
        """The row of whole sequences that are new. Each has at least one token."""
        self._begin(len(self.lengths), lengths)
        self.lengths += lengths
        row = Row.of(lengths, self._device, tensor=self._tensor, experts=self._experts)
        each = torch.tensor(row.lengths, device=self._device)
        slots = torch.arange(self._first, len(self.lengths), device=self._device).repeat_interleave(each)
        self._at = slots, row.positions + 1
        return replace(row, cache=self)

    def step(self) -> Row:
        """The row of one more token for every sequence."""
        self._begin(0, None)
        positions, count = torch.tensor(self.lengths, device=self._device), len(self.lengths)
        self._at = torch.arange(count, device=self._device), positions + 1
        self.lengths = [length + 1 for length in self.lengths]
        self._longest, self._masks = max(self.lengths, default=0), {}
        residual = self._tensor.split(Partition.contiguous(count, self._tensor.size))
        return Row((1,) * count, positions, self, tensor=residual, experts=self._experts)

    def _begin(self, first: int, prefilled: Sequence[int] | None) -> None:
        """A row of the sequences from slot ``first`` on; ``prefilled``: of the lengths of new ones."""
        self._first, self._prefilling = first, prefilled is not None
        stop = first + len(self.lengths if prefilled is None else prefilled)
        if stop > self._slots:
            raise ValueError(f"{stop} sequences in a cache of {self._slots}")

    def drop(self, sequences: Collection[int]) -> list[int]:
        """End sequences; the last ones move into their slots. Returns which sequence each slot has now, by its former
        slot."""
        left = [n for n in range(len(self.lengths)) if n not in sequences]
        now = list(range(len(left)))
        movers = [n for n in left if n >= len(left)]
        self._clear(sequences)
        for hole in sorted(n for n in sequences if n < len(left)):
            now[hole] = movers.pop()
            self._copy(now[hole], slice(hole, hole + 1))
            self._clear([now[hole]])
        self.lengths = [self.lengths[n] for n in now]
        return now

    def _clear(self, sequences: Collection[int]) -> None:
        """Else values that are no numbers would reach whoever has the slot next, though masked: times zero they are
        none."""
        for store in self._stores.values():
            for slot in sequences:
                store[:, slot, 1 : 1 + self.lengths[slot]] = 0

    def fork(self, sequence: int, times: int) -> None:
        """More sequences that go on from the same tokens as one."""
        self._append(sequence, self.lengths[sequence], times)

    def put_aside(self, sequence: int) -> None:
        """Keep the tokens of a sequence in the last slot, which then is no other's until ``resume``."""
        self._aside = self.lengths[sequence]
        self._copy(sequence, slice(self._slots - 1, self._slots))

    def resume(self, times: int) -> None:
        """New sequences that go on from what was put aside."""
        self._append(self._slots - 1, self._aside, times)

    def _append(self, slot: int, length: int, times: int) -> None:
        first = len(self.lengths)
        self._copy(slot, slice(first, first + times), length)
        self.lengths += [length] * times

    def _copy(self, slot: int, targets: slice, length: int | None = None) -> None:
        places = slice(1, 1 + (self.lengths[slot] if length is None else length))
        for store in self._stores.values():
            store[:, targets, places] = store[:, slot : slot + 1, places]
        for kept in self._recurrent.values():
            for tensor in kept:
                tensor[targets] = tensor[slot : slot + 1].clone()

    def store(self, k: Tensor, v: Tensor, layer: AttentionLayer) -> Tensor:
        """Keep the keys and values of the row; returns all there are of its sequences, [2, sequences, 1 + room,
        kv_heads, D], of which the first place is zero."""
        if layer.index not in self._stores:
            self._stores[layer.index] = self._room()
        store = self._stores[layer.index]
        store[0][self._at] = k
        store[1][self._at] = v
        return store[:, self._first : len(self.lengths)]

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer, row: Row, sinks: Tensor | None = None
    ) -> Tensor:
        """Store the keys and values of the row, then attend. Shapes as in ``Ops.attention``."""
        store = self.store(k, v, layer)
        if self._prefilling:
            return packed_attention(q, k, v, row.lengths, layer.window, sinks)
        first = int(sinks is None)
        keys, values = store[:, :, first : 1 + self._longest].transpose(2, 3)
        # The query heads of one key head stand as so many queries: no kernel need know of groups.
        grouped = q.unflatten(1, (keys.shape[1], -1))
        mask = self._mask(layer.window, q.dtype)
        if sinks is None:
            mask = mask[..., 1:]
        else:
            mask = mask.expand(*grouped.shape[:3], -1).clone()
            mask[..., 0] = sinks.view(1, *grouped.shape[1:3])
        return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask).flatten(1, 2)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """0 where the last token of a sequence sees a place, else -inf, [sequences, 1, 1, places]; one for all layers
        of a row."""
        if window not in self._masks:
            at, last = torch.arange(1 + self._longest, device=self._device), self._at[1][:, None]
            seen = at <= last
            if window is not None:
                seen &= at > last - window
            mask = torch.zeros(seen.shape, dtype=dtype, device=self._device).masked_fill_(~seen, -torch.inf)
            self._masks[window] = mask[:, None, None]
        return self._masks[window]

    def gated_delta_rule(
        self, rule: RecurrentRule, x: Tensor, rates: Tensor, weights: Weights, layer: DeltaLayer, row: Row
    ) -> Tensor:
        """Go on from the states of the sequences. Shapes as in ``Ops.gated_delta_rule``."""
        own = slice(self._first, len(self.lengths))
        if self._prefilling:
            out, *new = rule.prefill(x, rates, weights, layer, row.lengths)
        else:
            window, state = self._recurrent[layer.index]
            out, *new = rule.step(x, rates, weights, layer, window[own], state[own])
        if layer.index not in self._recurrent:
            window, state = (x.new_zeros(self._slots, *n.shape[1:], dtype=n.dtype) for n in new)
            self._recurrent[layer.index] = window, state
        for kept, now in zip(self._recurrent[layer.index], new, strict=True):
            kept[own] = now
        return out
