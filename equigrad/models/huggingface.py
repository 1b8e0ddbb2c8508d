"""The mapping between our models and Hugging Face folders, for Llama, Qwen2, Qwen3, Qwen3-MoE, Qwen3-Next and gpt-oss:
what ``config.json`` says, and which stored tensor is which part of which parameters. Torch-free.
"""

import json
import math
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from equigrad.config.lora import Lora
from equigrad.config.model import LinearAttention, Model, RopeScaling
from equigrad.errors import UserError
from equigrad.models.specs import adapted_weights, parameter_specs
from equigrad.parallel.partition import Range

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
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
# What a file of this family means by what it leaves out, where that is not what it means in the other families.
_GPT_OSS = {
    "head_dim": 64, "attention_bias": True, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
    "rope_theta": 150000.0, "sliding_window": 128, "num_local_experts": 128, "num_experts_per_tok": 4,
    "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "router_aux_loss_coef": 0.001,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                     "original_max_position_embeddings": 4096},
}  # fmt: skip
# gpt-oss has these, whatever its file says.
_GPT_OSS_EXPERTS = {
    "bias": True, "router_bias": True, "activation": "clamped_swiglu", "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip
# As for gpt-oss.
_QWEN3_NEXT = {
    "head_dim": 256, "num_key_value_heads": 2, "max_position_embeddings": 32768, "partial_rotary_factor": 0.25,
    "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512, "norm_topk_prob": True,
    "shared_expert_intermediate_size": 512, "router_aux_loss_coef": 0.001, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
}  # fmt: skip


@dataclass(frozen=True)
class Piece:
    """Which part of a parameter something stored is.

    index:      of the parameter's first dimension; None: all of the parameter
    transposed: stored with the last two dimensions the other way round
    rows:       where it is in the first dimension of what is stored; None: everywhere in it
    """

    parameter: str
    index: int | None = None
    transposed: bool = False
    rows: Range | None = None


Pieces = tuple[Piece, ...]
"""What a stored tensor holds: one piece, or several, which have rows of their own, or else whose elements take turns in
its last dimension."""


def stored_pieces(config: Model) -> dict[str, Pieces]:
    """Every tensor of a Hugging Face folder of this model, in model order."""
    pieces: dict[str, Pieces] = {}
    # No family that we write has a place for multi-token prediction.
    for name, spec in parameter_specs(config.model_copy(update={"mtp_layers": 0})).items():
        if config.family == "gpt_oss" and ".mlp." in name:
            pieces |= _gpt_oss_pieces(name)
        elif name.endswith("_conv1d.weight"):
            pieces |= _kernel_pieces(name, config)
        elif spec.expert is not None:
            # Stacked here and apart there: ``experts.0.gate_proj.weight`` [N, K], ``experts.1.gate_proj.weight``, ...
            layer, _, matrix = name.partition(".experts.")
            pieces |= {f"{layer}.experts.{e}.{matrix}": (Piece(name, e),) for e in range(spec.shape[0])}
        else:
            pieces[name] = (Piece(name),)
    return pieces


def _gpt_oss_pieces(name: str) -> dict[str, Pieces]:
    """Experts are stacked as in ours, but input first: ``down_proj`` [E, K, N] and ``down_proj_bias`` [E, N]; gate and
    up are one, ``gate_up_proj`` [E, K, 2 N], in turns. The router is called so."""
    layer, _, own = name.partition(".mlp.")
    if not own.startswith("experts."):
        return {f"{layer}.mlp.{own.replace('gate', 'router')}": (Piece(name),)}
    _, matrix, kind = own.split(".")
    weight = kind == "weight"
    parts = [name.replace("gate_proj", p) for p in ("gate_proj", "up_proj")] if matrix == "gate_proj" else [name]
    if matrix == "up_proj":
        return {}  # told with its gate
    stored = matrix.replace("gate_proj", "gate_up_proj") + ("" if weight else "_bias")
    return {f"{layer}.mlp.experts.{stored}": tuple(Piece(part, transposed=weight) for part in parts)}


def _kernel_pieces(name: str, config: Model) -> dict[str, Pieces]:
    """Three here and one there, ``conv1d.weight``: kernels of all queries, of all keys, of all values."""
    layer, _, which = name.rpartition(".linear_attn.")
    if which[0] != "q":
        return {}  # told with the queries'
    assert config.linear_attention is not None
    of_head = config.linear_attention.mixed
    stops = list(accumulate(config.linear_attention.linear_num_key_heads * features for features in of_head))
    rows = pairwise([0, *stops])
    parts = (f"{layer}.linear_attn.{part}_conv1d.weight" for part in "qkv")
    kernels = tuple(Piece(part, rows=own) for part, own in zip(parts, rows, strict=True))
    return {f"{layer}.linear_attn.conv1d.weight": kernels}


def read_config(folder: Path) -> Model:
    """The model of a Hugging Face folder. ``UserError`` for families and features that we do not compute."""
    path = folder / "config.json"
    if path.exists() and not path.is_file():  # a pipe would never end
        raise UserError(f"{path} is not a file")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"no config.json in {folder}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path}: expected a JSON object")
    try:
        return from_huggingface(raw, str(path))
    except (TypeError, AttributeError, ValueError, KeyError) as error:
        raise UserError(f"{path}: a value is not what it should be: {error}") from None


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
    if raw.get("quantization_config"):
        method = dict(raw["quantization_config"]).get("quant_method", "of an unnamed kind")
        raise UserError(
            f"{where}: the weights are quantised ({method}), and quantised weights are not read; load them with"
            " transformers, dequantised to bfloat16, save that, and import the result"
        )
    if family == "gpt_oss":
        raw = _GPT_OSS | {key: value for key, value in raw.items() if value is not None or key == "sliding_window"}
    if family == "qwen3_next":
        raw = _QWEN3_NEXT | {key: value for key, value in raw.items() if value is not None}
    values = {key: raw[key] for key in _SAME if raw.get(key) is not None}
    values["tie_word_embeddings"] = bool(raw.get("tie_word_embeddings", False))
    biased = bool(raw.get("attention_bias", False))
    values |= {
        "family": family,
        "attention_bias": family == "qwen2" or biased,
        "output_bias": family != "qwen2" and biased,
        "mlp_bias": family == "llama" and bool(raw.get("mlp_bias", False)),
        "qk_norm": family in ("qwen3", "qwen3_moe", "qwen3_next"),
    }
    if family == "qwen3_moe":
        values["experts"] = _expert_values(raw)
    if family == "qwen3_next":
        values |= _qwen3_next_values(raw, where)
    if family == "gpt_oss":
        values |= {"attention_sinks": True, "experts": _gpt_oss_experts(raw)}
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
    if not raw.get("output_router_logits"):  # the coefficient is there, but not in use
        given["router_aux_loss_coef"] = 0.0
    if raw.get("num_local_experts") is not None:  # as transformers 5 calls it
        given["num_experts"] = raw["num_local_experts"]
    return defaults | given


def _qwen3_next_values(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """What only a Qwen3-Next has. Its file lists the kind of every layer, or has a rule for them."""
    rope = raw.get("rope_parameters") or {}
    linear = {key: raw[key] for key in LinearAttention.model_fields}
    values: dict[str, Any] = {
        "attn_output_gate": True,
        "zero_centred_norm": True,
        "partial_rotary_factor": rope.get("partial_rotary_factor") or raw["partial_rotary_factor"],
        "linear_attention": linear,
    }
    if (kinds := raw.get("layer_types")) is not None:
        unknown = sorted(set(kinds) - {"linear_attention", "full_attention"})
        if unknown or len(kinds) != raw.get("num_hidden_layers"):
            what = f"layers of the kind {unknown[0]!r}" if unknown else f"{len(kinds)} layer_types"
            raise UserError(f"{where}: {what} do not make {raw.get('num_hidden_layers')} layers of a Qwen3-Next")
        full = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
        every = (full[0] + 1) if full else 0
        if every and full == list(range(every - 1, len(kinds), every)):
            linear["full_attention_interval"] = every
        else:
            linear["full_attention_interval"], values["full_attention_layers"] = 0, full
    if raw["num_experts"]:
        shared = {"shared_expert_gate": True, "shared_expert_intermediate_size": raw["shared_expert_intermediate_size"]}
        values["experts"] = _expert_values(raw) | shared
    return values


def _gpt_oss_experts(raw: dict[str, Any]) -> dict[str, Any]:
    """The experts of a gpt-oss. Its file names a coefficient even where it is not in use."""
    return _GPT_OSS_EXPERTS | {
        "num_experts": raw["num_local_experts"],
        "num_experts_per_tok": raw["num_experts_per_tok"],
        "moe_intermediate_size": raw.get("intermediate_size", 2880),
        "swiglu_alpha": raw["swiglu_alpha"],
        "swiglu_limit": raw["swiglu_limit"],
        "router_aux_loss_coef": raw["router_aux_loss_coef"] if raw.get("output_router_logits") else 0.0,
    }


def _rope_values(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """Rotary base and scaling, from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling``."""
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = rope.pop("rope_theta", None) or raw.get("rope_theta") or 10000.0
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    rope.pop("type", None)
    if raw["model_type"] == "qwen3_next":
        rope.pop("partial_rotary_factor", None)
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
    if family in ("llama", "qwen3_next") or window is None or not raw.get("use_sliding_window", family == "gpt_oss"):
        return {}
    kinds = raw.get("layer_types")
    if family == "gpt_oss" and kinds is None:
        kinds = [("sliding_attention", "full_attention")[i % 2] for i in range(layers)]
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
    kinds = ["full_attention" if config.window(i) is None else "sliding_attention"
             for i in range(config.num_hidden_layers)]  # fmt: skip
    if config.family == "llama":
        raw |= {"attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias}
    elif config.family == "gpt_oss":
        assert config.experts is not None
        experts = config.experts
        raw |= {"attention_bias": config.attention_bias, "sliding_window": config.sliding_window, "layer_types": kinds,
                "intermediate_size": experts.moe_intermediate_size, "num_local_experts": experts.num_experts,
                "num_experts_per_tok": experts.num_experts_per_tok, "swiglu_alpha": experts.swiglu_alpha,
                "swiglu_limit": experts.swiglu_limit, "router_aux_loss_coef": experts.router_aux_loss_coef,
                "output_router_logits": experts.router_aux_loss_coef > 0}  # fmt: skip
    elif config.family == "qwen3_next":
        raw |= _qwen3_next_raw(config)
        raw["rope_parameters"] |= {"partial_rotary_factor": config.partial_rotary_factor}
    elif config.experts is not None:
        raw |= {key: getattr(config.experts, key) for key in _EXPERTS}
        window = config.sliding_window
        raw |= {"attention_bias": config.attention_bias, "use_sliding_window": window is not None,
                "sliding_window": window, "output_router_logits": config.experts.router_aux_loss_coef > 0}  # fmt: skip
    else:
        raw |= {"use_sliding_window": config.sliding_window is not None, "sliding_window": config.sliding_window,
                "layer_types": kinds, "max_window_layers": kinds.count("full_attention")}  # fmt: skip
    if config.family == "qwen3":
        raw["attention_bias"] = config.attention_bias
    return raw


def _qwen3_next_raw(config: Model) -> dict[str, Any]:
    """What only the ``config.json`` of a Qwen3-Next has."""
    linear, experts = config.linear_attention, config.experts
    assert linear is not None
    kinds = ["linear_attention" if config.is_linear(i) else "full_attention" for i in range(config.num_hidden_layers)]
    raw = linear.model_dump()
    raw |= {"attention_bias": config.attention_bias, "partial_rotary_factor": config.partial_rotary_factor,
            "layer_types": kinds, "num_experts": 0}  # fmt: skip
    if experts is not None:
        raw["output_router_logits"] = experts.router_aux_loss_coef > 0
        raw |= {key: getattr(experts, key) for key in (*_EXPERTS, "shared_expert_intermediate_size")}
    return raw


def to_peft(config: Model, lora: Lora, base: str | None) -> dict[str, Any]:
    """The ``adapter_config.json`` of adapters, as PEFT reads it; ``base``: where the weights under them are.

    Raises ``UserError`` for a shape that the family, or adapters that PEFT, cannot express.
    """
    _check_family(config)
    specs, stacks = parameter_specs(config), adapted_stacks(config, lora)
    if stacks and config.family == "gpt_oss" and config.experts is not None and config.experts.num_experts == 1:
        raise UserError(
            "PEFT takes a single expert for a plain linear layer, which those of a gpt-oss are not: export the adapters"
            " merged (without --adapter)"
        )
    # In these families PEFT takes modules of such names for routed experts, wherever they are, but not parameters.
    qwen = config.family in ("qwen3_moe", "qwen3_next")
    taken = tuple(f".{which}_proj.weight" for which in ("gate", "up", "down")) if qwen else ()
    plain = [name for name in adapted_weights(specs, lora) if specs[name].role != "experts"]
    modules = [name.removesuffix(".weight") for name in plain if not name.endswith(taken)]
    # By the ends of their names where these mean no others, which is how most who read this file want it.
    ends = sorted({m.rpartition(".")[2] for m in modules})
    others = {n.removesuffix(".weight") for n in specs if n.endswith(".weight")} - set(modules)
    targets = modules if any(m.rpartition(".")[2] in ends for m in others) else ends
    # Two projections in one have both ranks; what their products are multiplied by stays.
    pairs = [name for name, weights in stacks.items() if len(weights) == 2 and all(weights)]
    if pairs and all(map(all, stacks.values())):
        pairs = ["gate_up_proj"]
    alpha = lora.alpha * (math.sqrt(2) if lora.rslora else 2)
    return {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": lora.rank,
            "lora_alpha": lora.alpha, "use_rslora": lora.rslora, "target_modules": targets,
            "target_parameters": [*stacks, *(name for name in plain if name.endswith(taken))] or None,
            "rank_pattern": dict.fromkeys(pairs, 2 * lora.rank), "alpha_pattern": dict.fromkeys(pairs, alpha),
            "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False, "init_lora_weights": True,
            "inference_mode": True}  # fmt: skip


def adapted_stacks(config: Model, lora: Lora) -> dict[str, tuple[str | None, ...]]:
    """What ``transformers`` calls each parameter of routed experts with adapters (``model.layers.0.mlp.experts.
    gate_up_proj``), and the weights of ours that are in it, None for one without an adapter."""
    specs, stacks = parameter_specs(config), dict[str, tuple[str | None, ...]]()
    adapted = [name for name in adapted_weights(specs, lora) if specs[name].role == "experts"]
    for at in dict.fromkeys(name.rsplit(".", 2)[0] for name in adapted):
        for parameter, matrices in ("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",)):
            weights = [f"{at}.{matrix}.weight" for matrix in matrices]
            if not set(weights).isdisjoint(adapted):
                stacks[f"{at}.{parameter}"] = tuple(name if name in adapted else None for name in weights)
    return stacks


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
    rules["gpt_oss"] = {"qk_norm": False, "output_bias": config.attention_bias}
    rules["qwen3_next"] = rules["qwen3"] | {"sliding_window": None}
    recurrent = family == "qwen3_next"
    rule = rules[family] | {"attention_sinks": family == "gpt_oss", "attn_output_gate": recurrent,
                            "zero_centred_norm": recurrent}  # fmt: skip
    if not recurrent:
        rule["partial_rotary_factor"] = 1.0
    wrong = [f"{key} = {getattr(config, key)}" for key, value in rule.items() if getattr(config, key) != value]
    if (config.linear_attention is not None) != recurrent:
        wrong.append("linear_attention" if config.linear_attention is not None else "model without linear_attention")
    if not recurrent and (config.experts is not None) != (family in ("qwen3_moe", "gpt_oss")):
        wrong.append("experts" if config.experts is not None else "model without experts")
    elif config.experts is not None:
        width = config.experts.shared_expert_intermediate_size if recurrent else 0
        only = {"scoring_func": "softmax", "routed_scaling_factor": 1.0, "shared_expert_intermediate_size": width,
                "router_bias_update_rate": None, "shared_expert_gate": recurrent}  # fmt: skip
        of_qwen = {"bias": False, "router_bias": False, "activation": "swiglu"}
        only |= _GPT_OSS_EXPERTS if family == "gpt_oss" else of_qwen
        wrong += [f"experts.{key} = {getattr(config.experts, key)}" for key, value in only.items()
                  if getattr(config.experts, key) != value]  # fmt: skip
    if wrong:
        raise UserError(f"model.family {family!r} has no {', '.join(wrong)}; choose the family that does, to export")
