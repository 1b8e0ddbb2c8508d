"""Every parameter of a decoder, from its configuration alone: name, global shape, role, initial spread.

Torch-free, so that planners and dry runs can use it. Names are those of Hugging Face checkpoints of the Llama, Qwen2
and Qwen3 families, which makes import and export a plain copy; only experts are stored otherwise there.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from equigrad.config.lora import Lora
from equigrad.config.model import Experts, Model
from equigrad.errors import UserError

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
    frozen: it stays as it is given: no gradient, no state of an optimizer
    """

    shape: tuple[int, ...]
    role: Role
    std: float | None = None
    fill: float = 0.0
    tensor: Cut | None = None
    expert: Cut | None = None
    frozen: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def trained(self) -> bool:
        """Whether gradients change it."""
        return not self.frozen and self.role != "state"


def parameter_specs(config: Model, lora: Lora | None = None) -> dict[str, Spec]:
    """All parameters in model order; ``lora``: the model's own frozen, and adapters after the weights they are for.

    Raises ``UserError`` for targets of adapters that are none.
    """
    specs = _model_specs(config)
    if lora is None:
        return specs
    if config.mtp_layers:
        raise UserError(
            "[lora] trains no modules for multi-token prediction: start from a model without them, as `equigrad export`"
            " writes it"
        )
    adapted, together = set(adapted_weights(specs, lora)), dict[str, Spec]()
    for name, spec in specs.items():
        together[name] = replace(spec, frozen=spec.role != "state")
        if name in adapted:
            together |= _adapter_specs(name, spec, lora)
    return together


def _model_specs(config: Model) -> dict[str, Spec]:
    """Output projections of a block start smaller by sqrt(2 layers) (GPT-2)."""
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

    for layer in range(config.all_layers):
        at = f"model.layers.{layer}"
        if layer >= config.num_hidden_layers:
            # Each tensor rank has all of it and computes tokens of its own.
            specs[f"{at}.eh_proj.weight"] = Spec((hidden, 2 * hidden), "matrix", std)
            for which in "enorm", "hnorm", "shared_head.norm":
                norm(f"{at}.{which}", hidden)
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


ADAPTER_PARTS = ("lora_A.weight", "lora_B.weight")
"""What the names of an adapter's matrices have in place of the ``weight`` that it is for."""


def is_adapter(name: str) -> bool:
    """Whether a parameter is of an adapter."""
    return name.endswith(ADAPTER_PARTS)


def adapted_weights(specs: Mapping[str, Spec], lora: Lora) -> list[str]:
    """The names of the weights that get an adapter, in model order.

    Raises ``UserError`` for a target that is no linear layer, or nothing at all.
    """
    weights = {n.removesuffix(".weight"): n for n in specs if n.endswith(".weight")}
    linears = [m for m, name in weights.items() if _takes_adapter(specs[name])]
    found: set[str] = set()
    for target in lora.targets:
        if target == "all-linear":
            found |= {m for m in linears if specs[weights[m]].role != "head"}
            continue
        try:
            hits = [m for m in weights if m == target or m.endswith(f".{target}") or re.fullmatch(target, m)]
        except re.error as error:
            raise UserError(f"lora.targets: {target!r} is no name and no regular expression: {error}") from None
        if not hits and target == "lm_head":
            raise UserError("lora.targets: the head is the embedding here (tie_word_embeddings): it takes no adapter")
        if not hits:
            raise UserError(f"lora.targets: {target!r} is no layer of this model; {_known(linears)}")
        for module in sorted(set(hits) - set(linears)):
            what = "experts" if specs[weights[module]].role == "experts" else "one of those layers"
            raise UserError(f"lora.targets: {target!r} names {module}, {what} that take no adapter; {_known(linears)}")
        found |= set(hits)
    return [weights[m] for m in linears if m in found]


def _takes_adapter(spec: Spec) -> bool:
    """Whether it is the weight of a column or row linear or of the head; a router's is not divided."""
    return spec.role in ("matrix", "head") and spec.tensor is not None


def _known(linears: Collection[str]) -> str:
    ends = dict.fromkeys(m.rpartition(".")[2] for m in linears)
    return f"adapters are for {', '.join(ends)}"


def _adapter_specs(name: str, weight: Spec, lora: Lora) -> dict[str, Spec]:
    """Down to the rank and up again, ``x A^T B^T``; starts at nothing, for B is zero, with the spread of PEFT's A.

    Each is divided where it shares a dimension with the weight.
    """
    rows, columns = weight.shape
    cut = weight.tensor
    a, b = (name.removesuffix("weight") + part for part in ADAPTER_PARTS)
    std = 1 / math.sqrt(3 * columns)
    return {
        a: Spec((lora.rank, columns), "matrix", std, tensor=cut if cut and cut.dim == 1 else None),
        b: Spec((rows, lora.rank), "matrix", tensor=cut if cut and cut.dim == 0 else None),
    }


def parameter_count(config: Model, lora: Lora | None = None, trained: bool = False) -> int:
    """Number of parameters (``trained``: of those that gradients change), those of all experts included; a tied head
    counts once."""
    return sum(spec.numel for spec in parameter_specs(config, lora).values() if spec.trained or not trained)


def flops_per_token(config: Model, context: float, lora: Lora | None = None) -> float:
    """Floating-point operations of forward and backward per token: 6 per weight that multiplies it (4 where it is
    frozen), plus attention.

    ``context`` is the mean number of keys that a query sees. The count that MFU conventionally uses (PaLM, appendix B):
    products only, recomputation not counted, an embedding look-up free.
    """
    return token_flops(config, lora)(context)


def token_flops(config: Model, lora: Lora | None = None) -> Callable[[float], float]:
    """``flops_per_token`` of one model, to be asked for many contexts."""
    specs = parameter_specs(config, lora)

    def operations(spec: Spec) -> int:
        return spec.numel * (4 if spec.frozen else 6)

    heads = 1 + config.mtp_layers  # times that the head is used
    weights: float = sum(operations(s) * (heads if s.role == "head" else 1) for s in specs.values()
                         if s.role in ("matrix", "head"))  # fmt: skip
    if config.experts is not None:
        share = config.experts.num_experts_per_tok / config.experts.num_experts
        weights += share * sum(operations(s) for s in specs.values() if s.role == "experts")
    if config.tie_word_embeddings:
        weights += operations(specs["model.embed_tokens.weight"]) * heads
    width = 12 * config.num_attention_heads * config.head_size
    windows = Counter(config.window(layer) or math.inf for layer in range(config.all_layers))
    return lambda context: weights + sum(width * n * min(context, window) for window, n in windows.items())
