"""The shape of the decoder. Field names are those of Hugging Face ``config.json``."""

from typing import Literal

from pydantic import Field, model_validator

from equigrad.config.base import Section


class RopeScaling(Section):
    """How rotary frequencies are stretched to longer contexts; names and meaning as in ``transformers``."""

    kind: Literal["linear", "dynamic", "yarn", "llama3"]
    """Which rule."""
    factor: float = Field(1.0, ge=1.0)
    """How many times longer than the original context."""
    original_max_position_embeddings: int | None = Field(None, ge=1)
    """Context before scaling (``yarn``, ``llama3``)."""
    low_freq_factor: float = 1.0
    """``llama3``: wavelengths above original / low_freq_factor are divided by ``factor``."""
    high_freq_factor: float = 4.0
    """``llama3``: wavelengths below original / high_freq_factor stay."""
    beta_fast: float = 32.0
    """``yarn``: rotations above which a dimension is not interpolated."""
    beta_slow: float = 1.0
    """``yarn``: rotations below which a dimension is fully interpolated."""
    attention_factor: float | None = None
    """``yarn``: scale of the rotary table; by default 0.1 ln(factor) + 1."""
    mscale: float | None = None
    """``yarn``: numerator term of the default attention factor."""
    mscale_all_dim: float | None = None
    """``yarn``: denominator term of the default attention factor."""
    truncate: bool = True
    """``yarn``: round the correction range to whole dimensions."""


class Experts(Section):
    """Mixture of experts: in sparse layers each token passes through a few of many feed-forward blocks.

    Nothing is dropped, however uneven the loads. Names are those of Qwen, DeepSeek and gpt-oss in ``transformers``.
    """

    num_experts: int = Field(8, ge=1)
    """Feed-forward blocks that the router chooses from."""
    num_experts_per_tok: int = Field(2, ge=1)
    """How many of them a token passes through."""
    moe_intermediate_size: int = Field(352, ge=1)
    """Width inside one of them."""
    shared_expert_intermediate_size: int = Field(0, ge=0)
    """Width of the shared expert, which every token passes through; 0: none. Several of them are one of their summed
    width."""
    shared_expert_gate: bool = False
    """Scale the shared expert's output by the sigmoid of a projection of the token (Qwen2-MoE: true)."""
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    """What turns the router's logits into scores (DeepSeek-V3: sigmoid)."""
    norm_topk_prob: bool = True
    """Divide the scores of the chosen experts by their sum; with softmax, that is the softmax over the chosen."""
    bias: bool = False
    """Bias on the projections of every expert that is chosen from (gpt-oss: true)."""
    router_bias: bool = False
    """Bias on the router's logits, trained like any other (gpt-oss: true)."""
    activation: Literal["swiglu", "clamped_swiglu"] = "swiglu"
    """Between an expert's projections: ``silu(gate) * up``, or, with gate and up clamped,
    ``gate * sigmoid(swiglu_alpha * gate) * (up + 1)`` (gpt-oss)."""
    swiglu_alpha: float = 1.702
    """``clamped_swiglu``: factor inside the sigmoid."""
    swiglu_limit: float = Field(7.0, gt=0)
    """``clamped_swiglu``: gate is at most this, up lies within plus and minus this."""
    routed_scaling_factor: float = Field(1.0, gt=0)
    """Factor on the weights of the chosen experts."""
    decoder_sparse_step: int = Field(1, ge=1)
    """One layer in so many is sparse; the others have a feed-forward block of intermediate_size."""
    mlp_only_layers: list[int] = []
    """Layers that are not sparse in any case."""
    router_aux_loss_coef: float = Field(0.0, ge=0)
    """Coefficient of the load-balancing term, with the loads of the step before; a uniform router has the term
    num_experts_per_tok. 0: none."""
    router_bias_update_rate: float | None = Field(None, ge=0)
    """Balance without a loss (arXiv 2408.15664): a bias on each expert's score, for the choice alone, which after every
    step moves by so much towards even loads. None: no bias."""

    @model_validator(mode="after")
    def _shapes_fit(self) -> "Experts":
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok {self.num_experts_per_tok} is more than num_experts {self.num_experts}"
            )
        if self.shared_expert_gate and not self.shared_expert_intermediate_size:
            raise ValueError("shared_expert_gate needs a shared expert: set shared_expert_intermediate_size")
        return self


class LinearAttention(Section):
    """Layers with a recurrent state in place of attention: the gated delta rule (arXiv 2412.06464) behind a short
    convolution. Both begin anew in every sample. Names are those of Qwen3-Next in ``transformers``."""

    linear_num_key_heads: int = Field(2, ge=1)
    """Query and key heads."""
    linear_num_value_heads: int = Field(4, ge=1)
    """Value heads, each with a state of its own; consecutive ones share a query and a key head."""
    linear_key_head_dim: int = Field(64, ge=1)
    """Width of a query or key head."""
    linear_value_head_dim: int = Field(64, ge=1)
    """Width of a value head."""
    linear_conv_kernel_dim: int = Field(4, ge=1)
    """The convolution sees this many latest tokens, the present one included."""
    full_attention_interval: int = Field(4, ge=0)
    """One layer in so many, the last of them, has attention, as those of full_attention_layers have; 0: only those."""

    @property
    def values_per_key(self) -> int:
        """Value heads that share a key head."""
        return self.linear_num_value_heads // self.linear_num_key_heads

    @property
    def mixed(self) -> tuple[int, int, int]:
        """Features of a key head that are convolved: of its query, its key and its values."""
        return self.linear_key_head_dim, self.linear_key_head_dim, self.values_per_key * self.linear_value_head_dim

    @model_validator(mode="after")
    def _shapes_fit(self) -> "LinearAttention":
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise ValueError(
                f"linear_num_value_heads {self.linear_num_value_heads} is not a multiple of"
                f" linear_num_key_heads {self.linear_num_key_heads}"
            )
        return self


class Model(Section):
    """A pre-norm decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    weights: str | None = None
    """Start from these weights: a Hugging Face folder, a run folder or a checkpoint folder. The shape then comes from
    there, and shape fields given here as well must agree with it."""
    family: Literal["llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "gpt_oss"] = "llama"
    """Hugging Face family that imports and exports go by; it decides nothing about the shape."""
    vocab_size: int | None = Field(None, ge=2)
    """Rows of the embedding; by default the tokenizer's vocabulary."""
    hidden_size: int = Field(256, ge=1)
    """Width of the residual stream."""
    intermediate_size: int = Field(704, ge=1)
    """Width inside the feed-forward block."""
    num_hidden_layers: int = Field(4, ge=1)
    """Number of blocks."""
    num_attention_heads: int = Field(4, ge=1)
    """Query heads."""
    num_key_value_heads: int | None = Field(None, ge=1)
    """Key and value heads; by default as many as query heads."""
    head_dim: int | None = Field(None, ge=2)
    """Width of a head; by default hidden_size / num_attention_heads."""
    attention_bias: bool = False
    """Bias on the query, key and value projections (Qwen2: true)."""
    output_bias: bool = False
    """Bias on the attention output projection (Llama with ``attention_bias`` has it, Qwen2 has not)."""
    attention_sinks: bool = False
    """One more logit in every softmax of a head, learned, with no value behind it (gpt-oss: true)."""
    attn_output_gate: bool = False
    """Scale what attention gives, element by element, by the sigmoid of a second half of the query projection
    (Qwen3-Next: true)."""
    mlp_bias: bool = False
    """Bias on the feed-forward projections."""
    qk_norm: bool = False
    """RMSNorm on each query and key head (Qwen3: true)."""
    zero_centred_norm: bool = False
    """Norms multiply by 1 + weight (Qwen3-Next: true); the one behind the gated delta rule always by its weight."""
    linear_attention: LinearAttention | None = None
    """The gated delta rule in place of attention in most layers."""
    experts: Experts | None = None
    """Mixture of experts in place of feed-forward blocks."""
    mtp_layers: int = Field(0, ge=0)
    """Multi-token prediction (DeepSeek-V3, arXiv 2412.19437): so many modules after the last block, one after another,
    each of one block. The first predicts the token after the next, the second the one after that. They are for training
    alone: evaluation and decoding ignore them, and exports leave them out."""
    mtp_loss_coef: float = Field(0.3, ge=0)
    """Coefficient of their loss, which is the mean over the modules."""
    tie_word_embeddings: bool = True
    """Use the embedding as the output head."""
    rms_norm_eps: float = Field(1e-6, gt=0)
    """Added to the mean square before the root."""
    rope_theta: float = Field(10000.0, gt=0)
    """Base of the rotary frequencies."""
    partial_rotary_factor: float = Field(1.0, gt=0, le=1)
    """The part of each head, from its beginning, that is rotated (Qwen3-Next: 0.25)."""
    rope_scaling: RopeScaling | None = None
    """Long-context scaling of the rotary frequencies."""
    max_position_embeddings: int = Field(2048, ge=1)
    """Longest context the model allows."""
    sliding_window: int | None = Field(None, ge=1)
    """A query sees this many latest tokens (itself included) in sliding layers; none: full attention everywhere."""
    full_attention_layers: list[int] = []
    """Layers that keep full attention although ``sliding_window`` or ``linear_attention`` is set."""
    initializer_range: float = Field(0.02, gt=0)
    """Standard deviation of initial weights; output projections are divided by sqrt(2 num_hidden_layers)."""

    @property
    def kv_heads(self) -> int:
        """Key and value heads, the default applied."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """Width of a head, the default applied."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding in a resolved job."""
        if self.vocab_size is None:
            raise ValueError("model.vocab_size is not resolved yet: it comes from the tokenizer")
        return self.vocab_size

    @property
    def all_layers(self) -> int:
        """Number of blocks, those of multi-token prediction included, which come last."""
        return self.num_hidden_layers + self.mtp_layers

    @property
    def embedding_at_end(self) -> bool:
        """Whether the embedding is used behind the last block as well."""
        return self.tie_word_embeddings or self.mtp_layers > 0

    @property
    def rotary_size(self) -> int:
        """Width of the part of a head that is rotated."""
        return int(self.head_size * self.partial_rotary_factor)

    def is_linear(self, layer: int) -> bool:
        """Whether a layer has a recurrent state in place of attention; modules for multi-token prediction have not."""
        if self.linear_attention is None or layer >= self.num_hidden_layers or layer in self.full_attention_layers:
            return False
        interval = self.linear_attention.full_attention_interval
        return not interval or (layer + 1) % interval > 0

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer, or None for full attention."""
        return None if layer in self.full_attention_layers else self.sliding_window

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts."""
        experts = self.experts
        if experts is None or layer in experts.mlp_only_layers:
            return False
        return (layer + 1) % experts.decoder_sparse_step == 0

    @property
    def sparse_layers(self) -> list[int]:
        """The layers with experts."""
        return [layer for layer in range(self.all_layers) if self.is_sparse(layer)]

    @model_validator(mode="after")
    def _shapes_fit(self) -> "Model":
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads};"
                " set head_dim or change one of them"
            )
        if self.num_attention_heads % self.kv_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of"
                f" num_key_value_heads {self.kv_heads}"
            )
        if self.rotary_size % 2 or not self.rotary_size:
            of = f" x partial_rotary_factor {self.partial_rotary_factor}" if self.partial_rotary_factor < 1 else ""
            raise ValueError(f"rotary positions need an even head_dim{of}, not {self.rotary_size}")
        if any(not 0 <= layer < self.num_hidden_layers for layer in self.full_attention_layers):
            raise ValueError(f"full_attention_layers must lie in 0..{self.num_hidden_layers - 1}")
        if self.experts is not None and any(
            not 0 <= layer < self.num_hidden_layers for layer in self.experts.mlp_only_layers
        ):
            raise ValueError(f"experts.mlp_only_layers must lie in 0..{self.num_hidden_layers - 1}")
        if self.experts is not None and not self.sparse_layers:
            raise ValueError(
                f"experts: none of the {self.num_hidden_layers} layers is sparse with decoder_sparse_step"
                f" {self.experts.decoder_sparse_step} and mlp_only_layers {self.experts.mlp_only_layers}"
            )
        return self
