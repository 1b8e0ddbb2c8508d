"""The op set: all that a model may call. Numerics is the choice of the object that implements it.

Tensors are those of one row: ``T`` tokens flat in the first dimension, no batch dimension; ``T`` may be 0. Each op
gets the row, because under parallelism an op is where the collectives of that row's process groups happen. Shapes are
given as if one rank did it all. Where there are several, ``T`` and ``n`` are this rank's tokens (see ``Row``), and what
lies between ``column_linears`` and ``row_linear`` (N of the one, K of the other, heads) is this rank's share, as are
the rows of an embedding and of a head: ``vocabulary`` is their number on all ranks together.

A value that is used twice passes through ``fork``, and several projections of one value are one ``column_linears``: so
the order in which their gradients are added is decided here and never by autograd.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from equigrad.config.model import Experts
from equigrad.numerics.routing import Dispatch, Routes
from equigrad.numerics.row import Row

RotaryTable = tuple[Tensor, Tensor]


class Adapter(NamedTuple):
    """What is added to a weight [N, K], as a product of two: ``scale`` times ``x`` times ``a`` [r, K] transposed times
    ``b`` [N, r] transposed. Of stacked experts [E, N, K] each has its own: ``a`` [E, r, K], ``b`` [E, N, r].

    Where tensor ranks divide the weight, they divide what shares the dimension with it and have the other whole: of
    that each rank has a part of the gradient.
    """

    a: Tensor
    b: Tensor
    scale: float


class Layer(Protocol):
    """The parameters of one layer, under its name.

    weight:  of the shape that each op says
    bias:    one number for each output, or none
    adapter: what is added to the weight, or nothing
    grids:   in exact numerics, what ``models.grids`` gave the layer
    """

    @property
    def weight(self) -> Tensor: ...

    @property
    def bias(self) -> Tensor | None: ...

    @property
    def adapter(self) -> Adapter | None: ...

    @property
    def grids(self) -> Any: ...


def operands(layers: Sequence[Layer], biased: bool = True) -> tuple[tuple[float, ...], list[Tensor | None]]:
    """The scales of the layers' adapters; and weight, bias and the adapter's two matrices of the first layer, then of
    the next, as an autograd function takes them. What a layer lacks is None, and so is a bias if not ``biased``."""
    scales: list[float] = []
    flat: list[Tensor | None] = []
    for layer in layers:
        *pair, scale = layer.adapter or (None, None, 1.0)
        flat += [layer.weight, layer.bias if biased else None, *pair]
        scales.append(scale)
    return tuple(scales), flat


class AttentionLayer:
    """What an attention op knows of its layer.

    index:  its place in ``row.cache``, if there is one
    window: a query sees this many latest tokens, itself included; None: all of its segment
    grids:  in exact numerics, of its sinks

    Blocks pass it on unopened, so that one compiled block serves every layer.
    """

    def __init__(self, index: int, window: int | None) -> None:
        self.index, self.window = index, window
        self.grids: Any = None


class DeltaLayer:
    """What the gated delta rule knows of its layer.

    index:     its place in ``row.cache``, if there is one
    key_dim:   width of a query or key head
    value_dim: width of a value head
    values:    value heads that share a key head
    grids:     in exact numerics, of its kernels and rates
    """

    def __init__(self, index: int, key_dim: int, value_dim: int, values: int) -> None:
        self.index, self.key_dim, self.value_dim, self.values = index, key_dim, value_dim, values
        self.grids: Any = None

    @property
    def mixed(self) -> tuple[int, int, int]:
        """Features of a key head that are convolved: of its query, its key and its values."""
        return self.key_dim, self.key_dim, self.values * self.value_dim


class Distribution(Protocol):
    """Of the next token, of n sequences, over the whole vocabulary and at their temperatures. Without gradients.

    terms: [n, V], e^(logit / temperature) over the largest: at most 1, and in proportion to the probabilities. In exact
           numerics they are rounded to one grid, so that their sums have no order; then what is less likely by 2^-36 or
           so, depending on V, is 0
    total: [n] float64, the sum of a row of ``terms``
    """

    terms: Tensor
    total: Tensor

    def log_probability(self, chosen: Tensor, mass: Tensor) -> Tensor:
        """[n] float32, of the tokens ``chosen`` [n], where ``mass`` [n] is the sum of the terms that may be chosen;
        ``total``: any may."""
        ...

    def entropy(self) -> Tensor:
        """[n] float32, in nats."""
        ...


class Ops(Protocol):
    """What ``native`` and ``exact`` implement.

    dtype:           operands of matrix products and attention
    parameter_dtype: parameters, and their gradients
    """

    dtype: torch.dtype
    parameter_dtype: torch.dtype

    def embedding(self, ids: Tensor, layer: Layer, vocabulary: int, row: Row) -> Tensor:
        """Rows of the weight [V, H] at ``ids`` [T] int64 -> [T, H]."""
        ...

    def column_linears(self, x: Tensor, layers: Sequence[Layer], row: Row) -> tuple[Tensor, ...]:
        """From the residual stream to features: ``x`` [T, K] times the weight [N, K] of each layer transposed, plus its
        bias and what its adapter adds -> [T, N] each. The gradient of ``x`` is the sum over the layers in the order
        given, an adapter's after its weight's."""
        ...

    def row_linear(self, x: Tensor, layer: Layer, row: Row) -> Tensor:
        """From features back to the residual stream: ``x`` [T, K] times the weight [N, K] transposed, plus bias and
        adapter -> [T, N]."""
        ...

    def joined_linear(self, a: Tensor, b: Tensor, layer: Layer, row: Row) -> Tensor:
        """In the residual stream: ``a`` and ``b`` [T, H], side by side, times the weight [N, 2H] transposed -> [T, N].

        Tensor ranks all have the weight whole, and each has a part of its gradient."""
        ...

    def norm(self, x: Tensor, layer: Layer, eps: float, row: Row, zero_centred: bool = False) -> Tensor:
        """RMSNorm over the last dimension: ``x / sqrt(mean(x^2) + eps) * weight``; ``x`` [..., D], weight [D].
        ``zero_centred``: times ``1 + weight``."""
        ...

    def gated_norm(self, x: Tensor, gate: Tensor, layer: Layer, eps: float, row: Row) -> Tensor:
        """``norm`` of ``x`` [T, heads, D] times ``silu(gate)``; ``gate`` has as many features in any shape [T, ...]."""
        ...

    def split(self, x: Tensor, sizes: Sequence[int], row: Row) -> tuple[Tensor, ...]:
        """The last dimension of ``x`` [..., sum(sizes)] in parts."""
        ...

    def rotary_table(self, frequencies: Tensor, scale: float, row: Row) -> RotaryTable:
        """Cosine and sine, each [T, D/2] float32, of position times ``frequencies``, times ``scale``.

        ``frequencies`` is [D/2], or [segments, D/2] where each segment has its own.
        """
        ...

    def rotary(self, x: Tensor, table: RotaryTable, row: Row) -> Tensor:
        """Rotate the two halves of each head of ``x`` [T, heads, D] by the table (Llama convention). Where the table is
        for fewer than D, what is beyond stays."""
        ...

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, layer: "AttentionLayer", row: Row, sinks: Tensor | None = None
    ) -> Tensor:
        """Causal attention inside each segment. ``q`` [T, heads, D], ``k`` and ``v`` [T, kv_heads, D] -> like ``q``.

        Query heads share key heads in consecutive groups. ``sinks`` [heads]: one more logit in every softmax of a head,
        with no value behind it.
        """
        ...

    def output_gate(self, x: Tensor, gate: Tensor, row: Row) -> Tensor:
        """``x * sigmoid(gate)``, both [T, heads, D]."""
        ...

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
        """A short causal convolution with silu, and behind it a recurrent state for each value head (Yang et al., arXiv
        2412.06464, equation 10): ``S <- exp(g) S``, then ``S <- S + beta k (v - S^T k)^T``, and out comes ``S^T q``.
        Both begin anew in every segment.

        x:       [T, key heads, 2 Dk + values Dv], of each key head its query, its key and its values
        rates:   [T, key heads, 2 values]: of each value head what becomes ``beta = sigmoid(b)``, then of each what
                 becomes ``g = -exp(a_log) softplus(a + dt_bias)``
        kernels: of queries, keys and values, [features, 1, kernel], the last for the token itself
        a_log:   [value heads], as is ``dt_bias``

        Queries and keys are divided by their Euclidean norm, queries by sqrt(Dk) too. Returns [T, value heads, Dv].
        """
        ...

    def gated(self, gate: Tensor, up: Tensor, row: Row) -> Tensor:
        """SwiGLU: ``silu(gate) * up``."""
        ...

    def clamped_gated(self, gate: Tensor, up: Tensor, alpha: float, limit: float, row: Row) -> Tensor:
        """SwiGLU of gpt-oss: ``gate * sigmoid(alpha * gate) * (up + 1)``, with ``gate`` first clamped to at most
        ``limit`` and ``up`` to within ``-limit .. limit``. What is clamped has no gradient."""
        ...

    def router(self, x: Tensor, layer: Layer, correction: Tensor | None, experts: Experts, row: Row) -> Routes:
        """Whom each token of ``x`` [T, H] chooses: scores of ``x`` times the weight [E, H] transposed, plus the bias
        [E], in float32, and of them the best k, or with ``correction`` [E] those that are best with it. Of equals the
        lower index is chosen."""
        ...

    def dispatch(self, x: Tensor, routes: Routes, row: Row) -> tuple[Tensor, Dispatch]:
        """Tokens ``x`` [T, H] to the experts of their choice -> [copies, H], those of one expert after another's.

        On a rank these are the copies, from all ranks that share the experts, for the experts that are here.
        """
        ...

    def expert_column_linears(self, x: Tensor, layers: Sequence[Layer], at: Dispatch, row: Row) -> tuple[Tensor, ...]:
        """Into the experts: dispatched ``x`` [copies, K] times their expert's matrix of each weight [E, N, K]
        transposed, plus its row of the bias [E, N] and what its adapter adds -> [copies, N] each. An expert without
        copies has zeros for gradients."""
        ...

    def expert_row_linear(self, x: Tensor, layer: Layer, at: Dispatch, row: Row) -> Tensor:
        """Out of the experts: ``x`` [copies, K], weight [E, N, K], bias [E, N], adapter -> [copies, N]. Where ranks
        share every expert's features, this is a rank's part of the sum that ``combine`` makes."""
        ...

    def combine(self, x: Tensor, routes: Routes, at: Dispatch, row: Row) -> Tensor:
        """The way back: ``x`` [copies, H] -> [T, H], the weighted sum of what a token's experts made of it, added in
        the order of its choices, whatever rank computed them."""
        ...

    def token_gate(self, x: Tensor, layer: Layer, y: Tensor, row: Row) -> Tensor:
        """``y`` [T, H] times the sigmoid of one number a token: ``x`` [T, H] times the weight [1, H] transposed."""
        ...

    def add(self, a: Tensor, b: Tensor, row: Row) -> Tensor:
        """Residual addition."""
        ...

    def fork(self, x: Tensor, row: Row) -> tuple[Tensor, Tensor]:
        """One value for two uses; the gradient is the sum of the two, the first use's first."""
        ...

    def logits(self, x: Tensor, layer: Layer, at: Tensor | None, vocabulary: int, row: Row) -> Tensor:
        """``x`` [T, H] times the weight [V, H] transposed, plus what its adapter adds, at the tokens ``at`` [n] int64
        (None: all) -> [n, V]."""
        ...

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
        """``-log softmax(logits / temperature)[label]`` for ``labels`` [n], float32 [n], with the logits of ``logits``.

        Never holds more logits than a budget, whatever n and V are.
        """
        ...

    def distribution(self, logits: Tensor, temperature: Tensor) -> Distribution:
        """What tokens are drawn from: softmax of ``logits`` [n, V] over a ``temperature`` for each [n] float64. Its
        log-probabilities are those of ``cross_entropy``, in exact numerics to the bit."""
        ...

    def total(self, terms: Tensor, most: int) -> Tensor:
        """The sum of ``terms``, a scalar; that of all ranks' terms is below 2^most."""
        ...

    def exp(self, x: Tensor) -> Tensor:
        """e to the ``x``, float64."""
        ...

    def power(self, base: Tensor, exponent: Tensor) -> Tensor:
        """Positive ``base`` to the ``exponent``, float32."""
        ...


COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
