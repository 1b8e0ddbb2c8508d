"""The mapping between our models and Hugging Face folders, for Llama, Qwen2, Qwen3 and Qwen3-MoE: what ``config.json``
says, and which stored tensor is which part of which parameter. Torch-free.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from equigrad.config.lora import Lora
from equigrad.config.model import Model, RopeScaling
from equigrad.errors import UserError
from equigrad.models.specs import adapted_weights, parameter_specs

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
_SAME = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "tie_word_embeddings", "rms_norm_eps", "max_position_embeddings",
    "initializer_range",
)  # fmt: skip
# What each kind of rotary scaling takes besides its factor.
_ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "linear": (),
    "dynamic": ("original_max_position_embeddings",),
    "yarn": (
        "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
        "truncate",
    ),
    "llama3": ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}  # fmt: skip


_EXPERTS = (
    "num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step",
    "mlp_only_layers", "router_aux_loss_coef",
)  # fmt: skip


@dataclass(frozen=True)
class Piece:
    """Which part of a parameter a stored tensor is: all of it, or one index of its first dimension."""

    parameter: str
    index: int | None = None


def stored_pieces(config: Model) -> dict[str, Piece]:
    """Every tensor of a Hugging Face folder of this model, in model order. Experts are stacked in ours and apart there:
    ``mlp.experts.gate_proj.weight`` [E, N, K] is ``mlp.experts.0.gate_proj.weight`` [N, K], ``mlp.experts.1. ...``"""
    pieces: dict[str, Piece] = {}
    # No family that we write has a place for multi-token prediction.
    for name, spec in parameter_specs(config.model_copy(update={"mtp_layers": 0})).items():
        if spec.role == "experts":
            layer, _, matrix = name.partition(".experts.")
            pieces |= {f"{layer}.experts.{e}.{matrix}": Piece(name, e) for e in range(spec.shape[0])}
        else:
            pieces[name] = Piece(name)
    return pieces


def read_config(folder: Path) -> Model:
    """The model of a Hugging Face folder. ``UserError`` for families and features that we do not compute."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"no config.json in {folder}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path}: expected a JSON object")
    return from_huggingface(raw, str(path))


def from_huggingface(raw: dict[str, Any], where: str) -> Model:
    """Translate a ``config.json`` tree; ``where`` names it in errors."""
    family = raw.get("model_type")
    if family not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise UserError(f"{where}: model_type is {family!r}; the families that can be imported are {known}")
    if raw.get("hidden_act", "silu") != "silu":
        raise UserError(f"{where}: hidden_act {raw['hidden_act']!r} is not supported; these families use silu")
    if raw.get("attention_dropout"):
        raise UserError(f"{where}: attention_dropout {raw['attention_dropout']} is not supported")
    values = {key: raw[key] for key in _SAME if raw.get(key) is not None}
    values["tie_word_embeddings"] = bool(raw.get("tie_word_embeddings", False))
    biased = bool(raw.get("attention_bias", False))
    values |= {
        "family": family,
        "attention_bias": family == "qwen2" or biased,
        "output_bias": family != "qwen2" and biased,
        "mlp_bias": family == "llama" and bool(raw.get("mlp_bias", False)),
        "qk_norm": family in ("qwen3", "qwen3_moe"),
    }
    if family == "qwen3_moe":
        values["experts"] = _expert_values(raw)
    if family == "qwen3":
        values.setdefault("head_dim", 128)
    values |= _rope_values(raw, where) | _window_values(raw, family)
    try:
        return Model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "config"
        raise UserError(f"{where}: {key}: {first['msg']}") from None


def _expert_values(raw: dict[str, Any]) -> dict[str, Any]:
    """The experts of a Qwen3-MoE; what the file leaves out is what the family's configuration has."""
    defaults = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False,
                "router_aux_loss_coef": 0.001}  # fmt: skip
    given = {key: raw[key] for key in _EXPERTS if raw.get(key) is not None}
    if raw.get("num_local_experts") is not None:  # as transformers 5 calls it
        given["num_experts"] = raw["num_local_experts"]
    return defaults | given


def _rope_values(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """Rotary base and scaling, from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling``."""
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = rope.pop("rope_theta", None) or raw.get("rope_theta") or 10000.0
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    rope.pop("type", None)
    values: dict[str, Any] = {"rope_theta": float(theta)}
    if kind == "default":
        return values
    if kind not in _ROPE_KEYS:
        raise UserError(f"{where}: rope type {kind!r} is not supported; supported: {', '.join(sorted(_ROPE_KEYS))}")
    unknown = set(rope) - set(RopeScaling.model_fields)
    if unknown:
        raise UserError(f"{where}: rope parameters {sorted(unknown)} of type {kind!r} are not supported")
    values["rope_scaling"] = {"kind": kind} | {k: v for k, v in rope.items() if v is not None}
    return values


def _window_values(raw: dict[str, Any], family: str) -> dict[str, Any]:
    """The sliding window, where it is switched on, and the layers without it."""
    layers, window = raw.get("num_hidden_layers", 0), raw.get("sliding_window")
    if family == "llama" or window is None or not raw.get("use_sliding_window", False):
        return {}
    kinds = raw.get("layer_types")
    if family == "qwen3_moe":
        kinds = ["sliding_attention"] * layers
    if kinds is None:
        first = raw.get("max_window_layers", 28)
        kinds = ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
    full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    return {} if len(full) == layers else {"sliding_window": window, "full_attention_layers": full}


def to_huggingface(config: Model, bos_id: int | None, eos_id: int | None, dtype: str) -> dict[str, Any]:
    """The ``config.json`` of a model. ``UserError`` where its family cannot express the shape."""
    _check_family(config)
    raw: dict[str, Any] = {"architectures": [_ARCHITECTURES[config.family]], "model_type": config.family}
    raw |= {key: getattr(config, key) for key in _SAME}
    raw |= {"num_key_value_heads": config.kv_heads, "head_dim": config.head_size, "hidden_act": "silu",
            "attention_dropout": 0.0, "use_cache": True, "bos_token_id": bos_id, "eos_token_id": eos_id,
            "dtype": dtype, "torch_dtype": dtype, "rope_theta": config.rope_theta}  # fmt: skip
    rope: dict[str, Any] = {"rope_type": "default"}
    if config.rope_scaling is not None:
        given = config.rope_scaling.model_dump(exclude_none=True)
        rope = {"rope_type": given["kind"], "factor": given["factor"]}
        rope |= {key: given[key] for key in _ROPE_KEYS[given["kind"]] if key in given}
        raw["rope_scaling"] = rope
    raw["rope_parameters"] = rope | {"rope_theta": config.rope_theta}
    if config.family == "llama":
        raw |= {"attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias}
    elif config.experts is not None:
        raw |= {key: getattr(config.experts, key) for key in _EXPERTS}
        window = config.sliding_window
        raw |= {"attention_bias": config.attention_bias, "output_router_logits": False,
                "use_sliding_window": window is not None, "sliding_window": window}  # fmt: skip
    else:
        kinds = ["full_attention" if config.window(i) is None else "sliding_attention"
                 for i in range(config.num_hidden_layers)]  # fmt: skip
        raw |= {"use_sliding_window": config.sliding_window is not None, "sliding_window": config.sliding_window,
                "layer_types": kinds, "max_window_layers": kinds.count("full_attention")}  # fmt: skip
    if config.family == "qwen3":
        raw["attention_bias"] = config.attention_bias
    return raw


def to_peft(config: Model, lora: Lora, base: str | None) -> dict[str, Any]:
    """The ``adapter_config.json`` of adapters, as PEFT reads it; ``base``: where the weights under them are."""
    specs = parameter_specs(config)
    modules = [name.removesuffix(".weight") for name in adapted_weights(specs, lora)]
    ends = sorted({m.rpartition(".")[2] for m in modules})
    # By the ends of their names where these mean no others, which is how most who read this file want it.
    others = {n.removesuffix(".weight") for n in specs if n.endswith(".weight")} - set(modules)
    targets = modules if any(m.rpartition(".")[2] in ends for m in others) else ends
    return {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": lora.rank,
            "lora_alpha": lora.alpha, "use_rslora": lora.rslora, "target_modules": targets, "lora_dropout": 0.0,
            "bias": "none", "fan_in_fan_out": False, "init_lora_weights": True, "inference_mode": True}  # fmt: skip


def peft_name(name: str) -> str:
    """What an adapter's parameter is called in ``adapter_model.safetensors``."""
    return f"base_model.model.{name}"


def _check_family(config: Model) -> None:
    family = config.family
    rules: dict[str, dict[str, Any]] = {
        "llama": {"qk_norm": False, "output_bias": config.attention_bias, "sliding_window": None},
        "qwen2": {"qk_norm": False, "attention_bias": True, "output_bias": False, "mlp_bias": False},
        "qwen3": {"qk_norm": True, "output_bias": config.attention_bias, "mlp_bias": False},
    }
    rules["qwen3_moe"] = rules["qwen3"] | {"full_attention_layers": []}
    wrong = [f"{key} = {getattr(config, key)}" for key, value in rules[family].items() if getattr(config, key) != value]
    if (config.experts is not None) != (family == "qwen3_moe"):
        wrong.append("experts" if config.experts is not None else "model without experts")
    elif config.experts is not None:
        only = {"scoring_func": "softmax", "routed_scaling_factor": 1.0, "shared_expert_intermediate_size": 0,
                "router_bias_update_rate": None}  # fmt: skip
        wrong += [f"experts.{key} = {getattr(config.experts, key)}" for key, value in only.items()
                  if getattr(config.experts, key) != value]  # fmt: skip
    if wrong:
        raise UserError(f"model.family {family!r} has no {', '.join(wrong)}; choose the family that does, to export")
