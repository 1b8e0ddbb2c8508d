"""A model's shape: its parameters, and the operations that its utilisation is counted by.

Wider than ``config.model``, for published tables have GPT, OPT and MPT models, with biases, learned positions and
feed-forward blocks without a gate.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from equigrad.config.model import Experts, Model
from equigrad.errors import UserError


class Layer(NamedTuple):
    """What tells layers apart: whether it has experts, and how many latest tokens a query sees (None: all)."""

    sparse: bool = False
    window: int | None = None


@dataclass(frozen=True)
class Shape:
    """A decoder.

    inner:     width inside a dense feed-forward block; ``gated`` ones have three matrices, others two
    biases:    on every linear layer and norm
    positions: rows of a learned table of positions
    """

    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    vocab: int
    layers: tuple[Layer, ...]
    gated: bool = True
    tied: bool = True
    biases: bool = False
    positions: int = 0
    experts: Experts | None = None

    @classmethod
    def gpt(cls, hidden: int, layers: int, heads: int, vocab: int, positions: int, inner: int | None = None) -> "Shape":
        """GPT-2's kind: as many key heads as query heads, no gate, biases, learned positions, tied embedding."""
        return cls(
            hidden, heads, heads, hidden // heads, inner or 4 * hidden, vocab, (Layer(),) * layers, gated=False,
            biases=True, positions=positions,
        )  # fmt: skip

    @classmethod
    def of(cls, model: Model) -> "Shape":
        """A model that equigrad trains. ``UserError`` for parts whose cost is not known here."""
        if model.linear_attention is not None or model.mtp_layers:
            raise UserError(
                "the cost model knows neither the gated delta rule nor multi-token prediction: leave"
                " model.linear_attention out and model.mtp_layers at 0"
            )
        layers = tuple(Layer(model.is_sparse(n), model.window(n)) for n in range(model.num_hidden_layers))
        return cls(
            model.hidden_size, model.num_attention_heads, model.kv_heads, model.head_size, model.intermediate_size,
            model.vocabulary, layers, tied=model.tie_word_embeddings, experts=model.experts,
        )  # fmt: skip

    @property
    def queries(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_size

    @property
    def projected(self) -> int:
        """Width of queries, keys and values together."""
        return (self.heads + 2 * self.kv_heads) * self.head_size

    def shared(self, layer: Layer) -> int:
        """Width inside the feed-forward block that every token passes through."""
        if layer.sparse and self.experts is not None:
            return self.experts.shared_expert_intermediate_size
        return self.inner

    def layer_parameters(self, layer: Layer) -> tuple[int, int]:
        """Parameters of a layer: those that every rank of expert parallelism has, and those of routed experts."""
        hidden, inner, matrices = self.hidden, self.shared(layer), 3 if self.gated else 2
        dense = hidden * (self.projected + self.queries) + 2 * hidden + matrices * hidden * inner
        if self.biases:
            dense += self.projected + hidden + (matrices - 1) * inner + hidden + 2 * hidden
        if not layer.sparse or self.experts is None:
            return dense, 0
        experts = self.experts
        dense += experts.num_experts * hidden + experts.shared_expert_gate * hidden
        return dense, experts.num_experts * 3 * hidden * experts.moe_intermediate_size

    @property
    def embedding_parameters(self) -> int:
        """Of the embedding and the table of positions."""
        return (self.vocab + self.positions) * self.hidden

    @property
    def head_parameters(self) -> int:
        """Of the last norm, and of a head that is not tied."""
        return (1 + self.biases) * self.hidden + (0 if self.tied else self.vocab * self.hidden)

    @cached_property
    def parameters(self) -> int:
        """Of the whole model; a tied head counts once."""
        return self.embedding_parameters + self.head_parameters + sum(map(sum, map(self.layer_parameters, self.layers)))

    def model_flops(self, sequence: int, causal: bool = False) -> float:
        """Floating-point operations per token of forward and backward, as MFU counts them: 6 for each weight that
        multiplies a token, and 12 for each channel of attention and key, where ``causal`` counts the keys that a query
        sees and the default, as PaLM's appendix B does, all of the sample's. Recomputation is not in it (HFU has it).
        """
        total = 6.0 * self.vocab * self.hidden
        for layer in self.layers:
            inner = self.shared(layer) * (3 if self.gated else 2)
            if layer.sparse and self.experts is not None:
                inner += 3 * self.experts.num_experts_per_tok * self.experts.moe_intermediate_size
                inner += self.experts.num_experts + self.experts.shared_expert_gate
            seen = seen_keys(sequence, layer.window) if causal else min(sequence, layer.window or sequence)
            total += 6.0 * self.hidden * (self.projected + self.queries + inner) + 12.0 * self.queries * seen
        return total


def seen_keys(sequence: int, window: int | None) -> float:
    """Mean number of keys that a query of a causal sample sees."""
    if window is None or window >= sequence:
        return (sequence + 1) / 2
    return window - window * (window - 1) / (2 * sequence)
