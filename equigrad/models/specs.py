"""Every parameter of a decoder, from its configuration alone: name, global shape, role, initial spread.

Torch-free, so that planners and dry runs can use it. Names are those of Hugging Face checkpoints of the Llama, Qwen2
and Qwen3 families, which makes import and export a plain copy; only experts are stored otherwise there.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from equigrad.config.model import Experts, Model

Role = Literal["matrix", "experts", "embedding", "head", "vector", "state"]
"""``experts``: matrices of which a token uses some; ``state``: learned by a rule of its own and not by gradients."""


class Cut(NamedTuple):
    """A dimension that can be divided, and the number of equal units it consists of: heads are not cut in two."""

    dim: int
    units: int


@dataclass(frozen=True)
class Spec:
    """One parameter.

    std:    spread of its initial normal values; None: it starts as ``fill``
    tensor: how tensor parallelism divides it; None: every tensor rank has all of it, and a part of its gradient
    expert: how expert parallelism divides it; None: every expert rank has all of it
    """

    shape: tuple[int, ...]
    role: Role
    std: float | None = None
    fill: float = 0.0
    tensor: Cut | None = None
    expert: Cut | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def parameter_specs(config: Model) -> dict[str, Spec]:
    """All parameters in model order. Output projections of a block start smaller by sqrt(2 layers) (GPT-2)."""
    hidden, head = config.hidden_size, config.head_size
    std = config.initializer_range
    out_std = std / math.sqrt(2 * config.num_hidden_layers)
    groups, by_token = config.kv_heads, Cut(0, config.vocabulary)
    specs = {"model.embed_tokens.weight": Spec((config.vocabulary, hidden), "embedding", std, tensor=by_token)}

    def linear(name: str, rows: int, columns: int, spread: float, bias: bool, cut: Cut) -> None:
        specs[f"{name}.weight"] = Spec((rows, columns), "matrix", spread, tensor=cut)
        if bias:
            specs[f"{name}.bias"] = Spec((rows,), "vector", tensor=cut if cut.dim == 0 else None)

    def norm(name: str, width: int) -> None:
        specs[f"{name}.weight"] = Spec((width,), "vector", fill=1.0)

    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}"
        norm(f"{at}.input_layernorm", hidden)
        for which, heads in ("q", config.num_attention_heads), ("k", config.kv_heads), ("v", config.kv_heads):
            linear(f"{at}.self_attn.{which}_proj", heads * head, hidden, std, config.attention_bias, Cut(0, groups))
        if config.qk_norm:
            norm(f"{at}.self_attn.q_norm", head)
            norm(f"{at}.self_attn.k_norm", head)
        inputs = config.num_attention_heads * head
        linear(f"{at}.self_attn.o_proj", hidden, inputs, out_std, config.output_bias, Cut(1, groups))
        if config.attention_sinks:
            heads = config.num_attention_heads
            specs[f"{at}.self_attn.sinks"] = Spec((heads,), "vector", std, tensor=Cut(0, groups))
        norm(f"{at}.post_attention_layernorm", hidden)
        if config.is_sparse(layer):
            assert config.experts is not None
            specs |= _expert_specs(f"{at}.mlp", config.experts, hidden, std, out_std)
            inner, name = config.experts.shared_expert_intermediate_size, f"{at}.mlp.shared_expert"
        else:
            inner, name = config.intermediate_size, f"{at}.mlp"
        if inner:
            linear(f"{name}.gate_proj", inner, hidden, std, config.mlp_bias, Cut(0, inner))
            linear(f"{name}.up_proj", inner, hidden, std, config.mlp_bias, Cut(0, inner))
            linear(f"{name}.down_proj", hidden, inner, out_std, config.mlp_bias, Cut(1, inner))
    norm("model.norm", hidden)
    if not config.tie_word_embeddings:
        specs["lm_head.weight"] = Spec((config.vocabulary, hidden), "head", std, tensor=by_token)
    return specs


def _expert_specs(at: str, experts: Experts, hidden: int, std: float, out_std: float) -> dict[str, Spec]:
    """Router and routed experts of a layer, stacked: weights [experts, rows, columns] and biases [experts, rows]."""
    number, inner = experts.num_experts, experts.moe_intermediate_size
    into, out, whole = (number, inner, hidden), (number, hidden, inner), Cut(0, number)
    specs = {f"{at}.gate.weight": Spec((number, hidden), "matrix", std)}
    if experts.router_bias:
        specs[f"{at}.gate.bias"] = Spec((number,), "vector")
    if experts.router_bias_update_rate is not None:
        specs[f"{at}.gate.e_score_correction_bias"] = Spec((number,), "state")
    for which in "gate", "up":
        specs[f"{at}.experts.{which}_proj.weight"] = Spec(into, "experts", std, tensor=Cut(1, inner), expert=whole)
        if experts.bias:
            specs[f"{at}.experts.{which}_proj.bias"] = Spec(into[:2], "vector", tensor=Cut(1, inner), expert=whole)
    specs[f"{at}.experts.down_proj.weight"] = Spec(out, "experts", out_std, tensor=Cut(2, inner), expert=whole)
    if experts.bias:
        specs[f"{at}.experts.down_proj.bias"] = Spec(out[:2], "vector", expert=whole)
    if experts.shared_expert_gate:
        specs[f"{at}.shared_expert_gate.weight"] = Spec((1, hidden), "matrix", std)
    return specs


def parameter_count(config: Model) -> int:
    """Number of parameters, those of all experts included; a tied head counts once."""
    return sum(spec.numel for spec in parameter_specs(config).values() if spec.role != "state")


def flops_per_token(config: Model, context: float) -> float:
    """Floating-point operations of forward and backward per token: 6 per weight that multiplies it, plus attention.

    ``context`` is the mean number of keys that a query sees. The count that MFU conventionally uses (PaLM, appendix B):
    products only, recomputation not counted, an embedding look-up free.
    """
    return token_flops(config)(context)


def token_flops(config: Model) -> Callable[[float], float]:
    """``flops_per_token`` of one model, to be asked for many contexts."""
    specs = parameter_specs(config)
    weights: float = sum(s.numel for s in specs.values() if s.role in ("matrix", "head"))
    if config.experts is not None:
        share = config.experts.num_experts_per_tok / config.experts.num_experts
        weights += share * sum(s.numel for s in specs.values() if s.role == "experts")
    if config.tie_word_embeddings:
        weights += specs["model.embed_tokens.weight"].numel
    width = 12 * config.num_attention_heads * config.head_size
    windows = Counter(config.window(layer) or math.inf for layer in range(config.num_hidden_layers))
    return lambda context: 6 * weights + sum(width * n * min(context, window) for window, n in windows.items())
