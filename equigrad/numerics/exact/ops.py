"""The exact op set: the same bits however the tokens are packed, divided or ordered, on any machine with IEEE
arithmetic.

Three steps make a reduction exact (``exact.grids``): its operands are rounded to a grid that depends on nothing that a
layout can change; float64 products, sums and collectives then add without rounding, in whatever order; and the result
is rounded once, to the value type. Between reductions everything is elementwise and made of IEEE operations
(``exact.elementary``). Parameters and their gradients are float64; values and their gradients are of the value type,
the residual stream float32, as in native numerics.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from equigrad.config.model import Experts
from equigrad.numerics.delta import Weights
from equigrad.numerics.exact import attention as attending
from equigrad.numerics.exact import delta
from equigrad.numerics.exact.cross_entropy import CrossEntropy, Distribution, Head, Logits, adapted, at_tokens
from equigrad.numerics.exact.elementary import cos_sin, exp, log
from equigrad.numerics.exact.elementwise import ClampedGated, Gated, GatedNorm, Norm, OutputGate, Rotary
from equigrad.numerics.exact.experts import Combined, ExpertLinears, Sent, TokenGate, route
from equigrad.numerics.exact.grids import MANTISSA, fixed
from equigrad.numerics.exact.layers import grids_of
from equigrad.numerics.exact.linear import ColumnLinears, Embedding, RowLinear
from equigrad.numerics.experts import plan_dispatch
from equigrad.numerics.native import Fork, rotary_angles
from equigrad.numerics.ops import AttentionLayer, DeltaLayer, Layer, RotaryTable
from equigrad.numerics.routing import Dispatch, Routes
from equigrad.numerics.row import Row
from equigrad.parallel.collectives import gather, reduce_scatter
from equigrad.parallel.partition import Partition


class ExactOps:
    """See ``equigrad.numerics.ops.Ops`` for shapes and meaning."""

    parameter_dtype = torch.float64

    def __init__(self, dtype: torch.dtype, saved_logits_bytes: int, context: int, token_bits: int) -> None:
        """
        context:    the longest segment that attention may see
        token_bits: of a term in a sum over the tokens of a step
        """
        self.dtype, self.saved_logits_bytes = dtype, saved_logits_bytes
        self._context, self._token_bits = context, token_bits

    def embedding(self, ids: Tensor, layer: Layer, vocabulary: int, row: Row) -> Tensor:
        grids = grids_of(layer)
        if row.tensor is None:
            return Embedding.apply(ids, None, layer.weight, grids)
        first, stop = row.tensor.share(vocabulary)
        known = (ids >= first) & (ids < stop)
        # Of each token one rank has its row and the others zeros: float32 adds them exactly.
        return reduce_scatter(Embedding.apply((ids - first).where(known, 0), known, layer.weight, grids), row.tensor)

    def column_linears(self, x: Tensor, layers: Sequence[Layer], row: Row) -> tuple[Tensor, ...]:
        return ColumnLinears.of(x, layers, row.tensor, self.dtype)

    def row_linear(self, x: Tensor, layer: Layer, row: Row) -> Tensor:
        return RowLinear.of(x, layer, row.tensor, self.dtype)

    def joined_linear(self, a: Tensor, b: Tensor, layer: Layer, row: Row) -> Tensor:
        return ColumnLinears.of(torch.cat([a, b], 1), [layer], None, self.dtype)[0].to(a.dtype)

    def norm(self, x: Tensor, layer: Layer, eps: float, row: Row, zero_centred: bool = False) -> Tensor:
        return Norm.apply(x, layer.weight, eps, zero_centred, grids_of(layer))

    def gated_norm(self, x: Tensor, gate: Tensor, layer: Layer, eps: float, row: Row) -> Tensor:
        return GatedNorm.apply(x, gate, layer.weight, eps, grids_of(layer))

    def split(self, x: Tensor, sizes: Sequence[int], row: Row) -> tuple[Tensor, ...]:
        return x.split(list(sizes), -1)

    def rotary_table(self, frequencies: Tensor, scale: float, row: Row) -> RotaryTable:
        cos, sin = cos_sin(rotary_angles(frequencies, row).double())
        return (cos * scale).float(), (sin * scale).float()

    def rotary(self, x: Tensor, table: RotaryTable, row: Row) -> Tensor:
        return Rotary.apply(x, *table)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, layer: AttentionLayer, row: Row, sinks: Tensor | None = None
    ) -> Tensor:
        if row.cache is not None:
            keys, values = row.cache.store(k, v, layer)[:, :, 1:]
            return attending.decode(q, keys, values, row, layer.window, sinks, self._context)
        return attending.Attention.apply(
            q, k, v, sinks, row, layer.window, self._context, (layer.grids or {}).get("self_attn.sinks")
        )

    def output_gate(self, x: Tensor, gate: Tensor, row: Row) -> Tensor:
        return OutputGate.apply(x, gate)

    def gated_delta_rule(
        self,
        x: Tensor,
        rates: Tensor,
        kernels: Sequence[Tensor],
        a_log: Tensor,
        dt_bias: Tensor,
        layer: DeltaLayer,
        row: Row,
    ) -> Tensor:
        query, key, value = kernels
        weights = Weights(query, key, value, a_log, dt_bias)
        if row.cache is not None:
            return row.cache.gated_delta_rule(delta, x, rates, weights, layer, row)
        return delta.GatedDeltaRule.apply(x, rates, *weights, layer, row)

    def gated(self, gate: Tensor, up: Tensor, row: Row) -> Tensor:
        return Gated.apply(gate, up)

    def clamped_gated(self, gate: Tensor, up: Tensor, alpha: float, limit: float, row: Row) -> Tensor:
        return ClampedGated.apply(gate, up, alpha, limit)

    def router(self, x: Tensor, layer: Layer, correction: Tensor | None, experts: Experts, row: Row) -> Routes:
        return route(x, layer, correction, experts, self._token_bits)

    def dispatch(self, x: Tensor, routes: Routes, row: Row) -> tuple[Tensor, Dispatch]:
        chosen = gather(routes.experts, row.tensor)
        at = plan_dispatch(chosen, len(routes.load.counts), row.experts)
        return Sent.apply(x, at, row.experts, row.tensor, self.dtype), at

    def expert_column_linears(self, x: Tensor, layers: Sequence[Layer], at: Dispatch, row: Row) -> tuple[Tensor, ...]:
        return ExpertLinears.of(x, layers, at, row.tensor, False)

    def expert_row_linear(self, x: Tensor, layer: Layer, at: Dispatch, row: Row) -> Tensor:
        return ExpertLinears.of(x, [layer], at, row.tensor, True)[0]

    def combine(self, x: Tensor, routes: Routes, at: Dispatch, row: Row) -> Tensor:
        return Combined.apply(x, routes.weights, at, row.experts, row.tensor)

    def token_gate(self, x: Tensor, layer: Layer, y: Tensor, row: Row) -> Tensor:
        return TokenGate.apply(x, layer.weight, y, grids_of(layer))

    def add(self, a: Tensor, b: Tensor, row: Row) -> Tensor:
        return a + b

    def fork(self, x: Tensor, row: Row) -> tuple[Tensor, Tensor]:
        return Fork.apply(x)

    def logits(self, x: Tensor, layer: Layer, at: Tensor | None, vocabulary: int, row: Row) -> Tensor:
        head = self._head(x, layer, row)
        a, b, _ = layer.adapter or (None, None, 0.0)
        x = at_tokens(x, at, head)
        y = Logits(x, layer.weight, adapted(x, a, head), b, head)(slice(None))
        if row.tensor is None:
            return y
        columns = Partition.contiguous(vocabulary, len(row.tensor.partition.ranges))
        return gather(y.t().contiguous(), replace(row.tensor, partition=columns)).t()

    def cross_entropy(
        self,
        x: Tensor,
        layer: Layer,
        labels: Tensor,
        at: Tensor | None,
        vocabulary: int,
        row: Row,
        temperature: float = 1.0,
    ) -> Tensor:
        a, b, _ = layer.adapter or (None, None, 0.0)
        return CrossEntropy.apply(x, layer.weight, labels, at, self._head(x, layer, row, temperature), a, b)

    def distribution(self, logits: Tensor, temperature: Tensor) -> Distribution:
        return Distribution(logits, temperature)

    def total(self, terms: Tensor, most: int) -> Tensor:
        return _Total.apply(terms, MANTISSA - most)

    def exp(self, x: Tensor) -> Tensor:
        return exp(x)

    def power(self, base: Tensor, exponent: Tensor) -> Tensor:
        return exp(exponent.double() * log(base.double())).float()

    def _head(self, x: Tensor, layer: Layer, row: Row, temperature: float = 1.0) -> Head:
        budget = self.saved_logits_bytes if torch.is_grad_enabled() else -1
        scale = 1.0 if layer.adapter is None else layer.adapter.scale
        return Head(self.dtype, budget, len(x), row.tensor, scale, grids_of(layer), temperature)


class _Total(torch.autograd.Function):
    """The sum of terms, each rounded to a multiple of 2^-bits."""

    @staticmethod
    def forward(ctx: Any, terms: Tensor, bits: int) -> Tensor:
        ctx.like = terms
        return fixed(terms.double(), bits).sum() + 0.0

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
        return d.to(ctx.like.dtype).expand_as(ctx.like), None
