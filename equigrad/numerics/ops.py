"""The op set: all that a model may call. Numerics is the choice of the object that implements it.

Tensors are those of one row: ``T`` tokens flat in the first dimension, no batch dimension; ``T`` may be 0. Each op
gets the row, because under parallelism an op is where the collectives of that row's process groups happen.

A value that is used twice passes through ``fork``, and several projections of one value are one ``linears``: so the
order in which their gradients are added is decided here and never by autograd.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from equigrad.numerics.row import Row

RotaryTable = tuple[Tensor, Tensor]


class AttentionLayer:
    """What an attention op knows of its layer.

    index:  its place in ``row.cache``, if there is one
    window: a query sees this many latest tokens, itself included; None: all of its segment

    Blocks pass it on unopened, so that one compiled block serves every layer.
    """

    def __init__(self, index: int, window: int | None) -> None:
        self.index, self.window = index, window


class Ops(Protocol):
    """What ``native`` implements now and ``exact`` will.

    dtype: operands of matrix products and attention
    """

    dtype: torch.dtype

    def embedding(self, ids: Tensor, weight: Tensor, row: Row) -> Tensor:
        """Rows of ``weight`` [V, H] at ``ids`` [T] int64 -> [T, H]."""
        ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, row: Row) -> Tensor:
        """``x`` [T, K] times ``weight`` [N, K] transposed, plus ``bias`` [N] -> [T, N]."""
        ...

    def linears(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], row: Row
    ) -> tuple[Tensor, ...]:
        """Several projections of one input; its gradient is their sum in the order given."""
        ...

    def norm(self, x: Tensor, weight: Tensor, eps: float, row: Row) -> Tensor:
        """RMSNorm over the last dimension: ``x / sqrt(mean(x^2) + eps) * weight``; ``x`` [..., D], ``weight`` [D]."""
        ...

    def rotary_table(self, frequencies: Tensor, scale: float, row: Row) -> RotaryTable:
        """Cosine and sine, each [T, D/2] float32, of position times ``frequencies``, times ``scale``.

        ``frequencies`` is [D/2], or [segments, D/2] where each segment has its own.
        """
        ...

    def rotary(self, x: Tensor, table: RotaryTable, row: Row) -> Tensor:
        """Rotate the two halves of each head of ``x`` [T, heads, D] by the table (Llama convention)."""
        ...

    def attention(self, q: Tensor, k: Tensor, v: Tensor, layer: "AttentionLayer", row: Row) -> Tensor:
        """Causal attention inside each segment. ``q`` [T, heads, D], ``k`` and ``v`` [T, kv_heads, D] -> like ``q``.

        Query heads share key heads in consecutive groups.
        """
        ...

    def gated(self, gate: Tensor, up: Tensor, row: Row) -> Tensor:
        """SwiGLU: ``silu(gate) * up``."""
        ...

    def add(self, a: Tensor, b: Tensor, row: Row) -> Tensor:
        """Residual addition."""
        ...

    def fork(self, x: Tensor, row: Row) -> tuple[Tensor, Tensor]:
        """One value for two uses; the gradient is the sum of the two, the first use's first."""
        ...

    def select(self, x: Tensor, index: Tensor, row: Row) -> Tensor:
        """Tokens ``index`` [n] int64, each at most once, of ``x`` [T, H] -> [n, H]."""
        ...

    def cross_entropy(self, x: Tensor, weight: Tensor, labels: Tensor, row: Row) -> Tensor:
        """``-log softmax(x weight^T)[label]`` per token, float32 [T]: ``x`` [T, H], ``weight`` [V, H], ``labels`` [T].

        Never holds more logits than a budget, whatever T and V are.
        """
        ...


COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
