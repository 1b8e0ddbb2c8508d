"""The mapping between our model configuration and Hugging Face ``config.json``, for Llama, Qwen2 and Qwen3.

Parameter names are the same on both sides, so the weights need no mapping. Torch-free.
"""

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from equigrad.config.model import Model, RopeScaling
from equigrad.errors import UserError

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
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
        "qk_norm": family == "qwen3",
    }
    if family == "qwen3":
        values.setdefault("head_dim", 128)
    values |= _rope_values(raw, where) | _window_values(raw, family)
    try:
        return Model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "config"
        raise UserError(f"{where}: {key}: {first['msg']}") from None


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
    else:
        kinds = ["full_attention" if config.window(i) is None else "sliding_attention"
                 for i in range(config.num_hidden_layers)]  # fmt: skip
        raw |= {"use_sliding_window": config.sliding_window is not None, "sliding_window": config.sliding_window,
                "layer_types": kinds, "max_window_layers": kinds.count("full_attention")}  # fmt: skip
    if config.family == "qwen3":
        raw["attention_bias"] = config.attention_bias
    return raw


def _check_family(config: Model) -> None:
    family = config.family
    rules: dict[str, dict[str, Any]] = {
        "llama": {"qk_norm": False, "output_bias": config.attention_bias, "sliding_window": None},
        "qwen2": {"qk_norm": False, "attention_bias": True, "output_bias": False, "mlp_bias": False},
        "qwen3": {"qk_norm": True, "output_bias": config.attention_bias, "mlp_bias": False},
    }
    wrong = [f"{key} = {getattr(config, key)}" for key, value in rules[family].items() if getattr(config, key) != value]
    if wrong:
        raise UserError(f"model.family {family!r} has no {', '.join(wrong)}; choose the family that does, to export")
