"""What decoding keeps of earlier tokens: keys and values, or the states of the gated delta rule. One slot of the cache
is one sequence of the row.

Knows nothing of sampling or of models; a layer has its room when it first asks for it.
"""

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
    """Room for ``sequences`` x ``capacity`` tokens in each layer with attention.

    A first row (``prefill``) carries whole prompts as segments; each later row (``step``) one token per sequence.
    ``row.positions`` counts on from what the cache holds.
    """

    def __init__(
        self,
        sequences: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        tensor: Axis = ALONE,
        experts: Axis = ALONE,
    ) -> None:
        """``kv_heads``: those on this rank of the axis ``tensor``. ``experts``: the axis that shares the experts."""
        self._tensor, self._experts = tensor, experts
        # One place more than there are tokens: it stays zero, as what a sink's logit belongs to.
        shape = (2, sequences, capacity + 1, kv_heads, head_dim)
        self._room = partial(torch.zeros, shape, dtype=dtype, device=device)
        self._stores: dict[int, Tensor] = {}
        self._recurrent: dict[int, tuple[Tensor, Tensor]] = {}
        self.lengths = torch.zeros(sequences, dtype=torch.int64, device=device)
        self._longest = 0
        self._prefilling = True

    def prefill(self, lengths: list[int]) -> Row:
        """The row of all prompts. Each has at least one token."""
        row = Row.of(lengths, self.lengths.device, tensor=self._tensor, experts=self._experts)
        self.lengths += torch.tensor(lengths, device=self.lengths.device)
        self._longest = max(lengths)
        return replace(row, cache=self)

    def step(self) -> Row:
        """The row of one more token for every sequence."""
        self._prefilling = False
        ones = Row.of((1,) * len(self.lengths), self.lengths.device, tensor=self._tensor, experts=self._experts)
        row = replace(ones, positions=self.lengths.clone(), cache=self)
        self.lengths += 1
        self._longest += 1
        return row

    def keep(self, sequences: Tensor) -> None:
        """Drop all but these sequences (indices, in their new order)."""
        self._stores = {layer: store[:, sequences] for layer, store in self._stores.items()}
        self._recurrent = {layer: (a[sequences], b[sequences]) for layer, (a, b) in self._recurrent.items()}
        self.lengths = self.lengths[sequences]
        self._longest = int(self.lengths.max()) if len(self.lengths) else 0

    def store(self, k: Tensor, v: Tensor, layer: AttentionLayer, row: Row) -> Tensor:
        """Keep the keys and values of the row; returns all there are, [2, sequences, room, kv_heads, D]."""
        lengths = torch.tensor(row.lengths, device=k.device)
        slot = torch.arange(len(row.lengths), device=k.device).repeat_interleave(lengths)
        if layer.index not in self._stores:
            self._stores[layer.index] = self._room()
        store = self._stores[layer.index]
        store[0, slot, row.positions] = k
        store[1, slot, row.positions] = v
        return store

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer, row: Row, sinks: Tensor | None = None
    ) -> Tensor:
        """Store the keys and values of the row, then attend. Shapes as in ``Ops.attention``."""
        store = self.store(k, v, layer, row)
        if self._prefilling:
            return packed_attention(q, k, v, row.lengths, layer.window, sinks)
        places = self._longest + (sinks is not None)
        keys, values = store[:, :, :places].transpose(2, 3)
        at = torch.arange(places, device=q.device)
        seen = at < self.lengths[:, None]
        if layer.window is not None:
            seen &= at >= self.lengths[:, None] - layer.window
        # The query heads of one key head stand as so many queries: no kernel need know of groups.
        grouped = q.unflatten(1, (keys.shape[1], -1))
        mask = seen[:, None, None]
        if sinks is not None:
            logits = torch.zeros(*grouped.shape[:3], places, dtype=q.dtype, device=q.device)
            mask = logits.masked_fill_(~mask, -torch.inf)
            mask[..., -1] = sinks.view(1, *grouped.shape[1:3])
        return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask).flatten(1, 2)

    def gated_delta_rule(
        self, rule: RecurrentRule, x: Tensor, rates: Tensor, weights: Weights, layer: DeltaLayer, row: Row
    ) -> Tensor:
        """Go on from the states of the sequences. Shapes as in ``Ops.gated_delta_rule``."""
        if self._prefilling:
            out, *kept = rule.prefill(x, rates, weights, layer, row.lengths)
        else:
            out, *kept = rule.step(x, rates, weights, layer, *self._recurrent[layer.index])
        self._recurrent[layer.index] = (kept[0], kept[1])
        return out
