"""The decoder against ``transformers``, and the properties of initial weights and of the op set's seam."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from equigrad.config.model import Model
from equigrad.models import decoder as decoder_module
from equigrad.models.decoder import Decoder
from equigrad.models.huggingface import from_huggingface, to_huggingface
from equigrad.models.specs import flops_per_token, parameter_count, parameter_specs
from equigrad.numerics.native import NativeOps
from equigrad.numerics.ops import Ops
from equigrad.numerics.row import Row

TINY: dict[str, Any] = dict(
    vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128,
)  # fmt: skip
LLAMA3 = dict(kind="llama3", factor=4.0, original_max_position_embeddings=32, low_freq_factor=1.0, high_freq_factor=4.0)
GPT_OSS_EXPERTS = dict(
    num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, bias=True, router_bias=True,
    activation="clamped_swiglu",
)  # fmt: skip
GPT_OSS: dict[str, Any] = dict(
    family="gpt_oss", head_dim=16, attention_bias=True, output_bias=True, attention_sinks=True, sliding_window=8,
    full_attention_layers=[1], rope_theta=150000.0,
    rope_scaling=dict(kind="yarn", factor=4.0, original_max_position_embeddings=32, truncate=False),
    experts=GPT_OSS_EXPERTS,
)  # fmt: skip
MODELS = {
    "llama": dict(family="llama"),
    "llama-tied-biased": dict(
        family="llama", attention_bias=True, output_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "llama-head-dim": dict(family="llama", head_dim=20),
    "llama-linear": dict(family="llama", rope_scaling=dict(kind="linear", factor=2.0)),
    "llama-dynamic": dict(family="llama", rope_scaling=dict(kind="dynamic", factor=2.0), max_position_embeddings=32),
    "llama-llama3": dict(family="llama", rope_scaling=LLAMA3),
    "llama-yarn": dict(family="llama", rope_scaling=dict(kind="yarn", factor=4.0, original_max_position_embeddings=32)),
    "qwen2": dict(family="qwen2", attention_bias=True, rope_theta=1e6),
    "qwen2-window": dict(
        family="qwen2", attention_bias=True, sliding_window=8, full_attention_layers=[0], tie_word_embeddings=True
    ),
    "qwen3": dict(family="qwen3", qk_norm=True, head_dim=16, rope_theta=1e6),
    "qwen3-moe": dict(
        family="qwen3_moe",
        qk_norm=True,
        head_dim=16,
        experts=dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, mlp_only_layers=[1]),
    ),
    "qwen3-moe-window": dict(
        family="qwen3_moe",
        qk_norm=True,
        sliding_window=8,
        tie_word_embeddings=True,
        experts=dict(
            num_experts=5, num_experts_per_tok=2, moe_intermediate_size=18, norm_topk_prob=False, decoder_sparse_step=2
        ),
    ),
    "gpt-oss": dict(GPT_OSS, experts=dict(GPT_OSS_EXPERTS, swiglu_limit=0.5)),
    "gpt-oss-other": dict(
        GPT_OSS,
        attention_bias=False,
        output_bias=False,
        tie_word_embeddings=True,
        full_attention_layers=[],
        rope_scaling=None,
        experts=dict(GPT_OSS_EXPERTS, num_experts=5, moe_intermediate_size=20, swiglu_alpha=1.3, swiglu_limit=7.0),
    ),
}

QWEN3_NEXT: dict[str, Any] = dict(
    family="qwen3_next", qk_norm=True, attn_output_gate=True, zero_centred_norm=True, head_dim=16,
    partial_rotary_factor=0.25, rope_theta=1e6, initializer_range=0.05,
    linear_attention=dict(
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=12,
        full_attention_interval=2,
    ),
    experts=dict(
        num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, mlp_only_layers=[1],
        shared_expert_intermediate_size=20, shared_expert_gate=True,
    ),
)  # fmt: skip
MODELS |= {
    "qwen3-next": QWEN3_NEXT,
    "qwen3-next-dense": dict(
        QWEN3_NEXT,
        experts=None,
        attention_bias=True,
        output_bias=True,
        tie_word_embeddings=True,
        partial_rotary_factor=0.5,
        full_attention_layers=[0],
        linear_attention=dict(
            linear_num_key_heads=3,
            linear_num_value_heads=3,
            linear_key_head_dim=6,
            linear_value_head_dim=4,
            linear_conv_kernel_dim=2,
            full_attention_interval=0,
        ),
    ),
}

TRAINED = ["llama-tied-biased", "qwen2-window", "qwen3", "qwen3-moe", "qwen3-moe-window", "gpt-oss", "gpt-oss-other"]
TRAINED += ["qwen3-next", "qwen3-next-dense"]


def make(name: str) -> Model:
    return Model.model_validate(TINY | {"tie_word_embeddings": False} | MODELS[name])


def build(config: Model, seed: int = 1, dtype: torch.dtype = torch.float32) -> Decoder:
    model = Decoder(config, NativeOps(dtype))
    model.to_empty(device="cpu")
    model.initialize(seed)
    with torch.no_grad():  # vectors start at 0 and 1, which would hide mistakes
        for name, parameter in model.named_parameters():
            if model.specs[name].role == "vector":
                parameter += torch.linspace(-0.3, 0.3, parameter.numel()).view_as(parameter)
    return model


def reference(config: Model, model: Decoder) -> Any:
    """The model that ``transformers`` builds from our exported configuration, with our weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = to_huggingface(config, None, None, "float32")
    family = raw.pop("model_type")
    wanted = AutoConfig.for_model(family, **raw)
    wanted._experts_implementation = "eager"
    hf = AutoModelForCausalLM.from_config(wanted, attn_implementation="eager")
    missing, unexpected = hf.load_state_dict(in_their_names(model.state_dict(), family), strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    return hf.eval()


def in_their_names(tensors: Mapping[str, Tensor], family: str) -> dict[str, Tensor]:
    """As ``transformers`` holds them in memory: experts stacked, gate above up, or in turns with it."""
    if family == "gpt_oss":
        return in_gpt_oss_names(tensors)
    named = dict(tensors)
    for name in [n for n in named if n.endswith(".q_conv1d.weight")]:
        kernels = [named.pop(name.replace("q_conv1d", f"{which}_conv1d")) for which in "qkv"]
        named[name.replace("q_conv1d", "conv1d")] = torch.cat(kernels)
    for name in [n for n in named if ".experts." in n]:
        value, at = named.pop(name), name.removesuffix(".weight")
        if "gate_proj" in name:
            value = torch.cat([value, tensors[name.replace("gate_proj", "up_proj")]], 1)
        if "up_proj" not in name:
            named[at.replace("gate_proj", "gate_up_proj")] = value
    return named


def in_gpt_oss_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    named = {n.replace("mlp.gate.", "mlp.router."): t for n, t in tensors.items() if ".experts." not in n}
    for name in tensors:
        if name.endswith(".experts.gate_proj.weight"):
            at = name.removesuffix(".gate_proj.weight")
            for kind, ending in ("weight", ""), ("bias", "_bias"):
                gate, up, down = (tensors[f"{at}.{p}_proj.{kind}"] for p in ("gate", "up", "down"))
                both = torch.stack([gate, up], 2).flatten(1, 2)  # rows in turns
                named[f"{at}.gate_up_proj{ending}"] = both.mT if kind == "weight" else both
                named[f"{at}.down_proj{ending}"] = down.mT if kind == "weight" else down
    return named


@pytest.mark.parametrize("name", MODELS)
def test_logits_match_transformers_packed_or_not(name: str) -> None:
    config = make(name)
    model = build(config)
    hf = reference(config, model)
    lengths = (7, 1, 50, 50, 3)
    ids = torch.randint(0, 97, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        packed = model(ids, Row.of(lengths))
        for part, logits in zip(ids.split(lengths), packed.split(lengths), strict=True):
            alone = model(part, Row.of([len(part)]))
            right = hf(part[None]).logits[0]
            torch.testing.assert_close(alone, right, rtol=0, atol=1e-5)
            torch.testing.assert_close(logits, right, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", TRAINED)
def test_gradients_match_transformers(name: str) -> None:
    config = make(name)
    model = build(config)
    hf = reference(config, model)
    ids = torch.randint(0, 97, (31,), generator=torch.Generator().manual_seed(0))
    model(ids[:-1], Row.of([30]), ids[1:]).mean().backward()
    hf(ids[None], labels=ids[None]).loss.backward()
    theirs = dict(hf.named_parameters())
    # A key bias moves all scores of a query alike, so its gradient is zero up to rounding: hence the floor.
    floor = 1e-4 * max(p.grad.abs().max().item() for p in theirs.values())
    for name, gradient in in_their_names({n: p.grad for n, p in model.named_parameters()}, config.family).items():
        scale = max(floor, theirs[name].grad.abs().max().item())
        torch.testing.assert_close(gradient, theirs[name].grad, rtol=0, atol=2e-5 * scale)


@pytest.mark.parametrize("name", MODELS)
def test_configuration_survives_the_round_trip_through_transformers(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    config = make(name)
    raw = to_huggingface(config, 1, 2, "float32")
    family = raw.pop("model_type")
    AutoConfig.for_model(family, **raw).save_pretrained(tmp_path)
    import json

    back = from_huggingface(json.loads((tmp_path / "config.json").read_text()), "config.json")
    model, again = build(config), build(back)
    ids, row = torch.arange(40), Row.of([40])
    with torch.no_grad():
        assert torch.equal(model(ids, row), again(ids, row))


def test_initial_weights_depend_on_seed_and_name_only() -> None:
    config = make("llama")
    first, same, other = (build(config, seed).state_dict() for seed in (1, 1, 2))
    deeper = build(config.model_copy(update={"num_hidden_layers": 5}), 1).state_dict()
    for name in first:
        assert torch.equal(first[name], same[name])
        if first[name].ndim == 2:
            assert not torch.equal(first[name], other[name])
    assert torch.equal(first["model.embed_tokens.weight"], deeper["model.embed_tokens.weight"])
    assert not torch.equal(
        first["model.layers.0.self_attn.k_proj.weight"], first["model.layers.0.self_attn.v_proj.weight"]
    )


def test_a_row_without_tokens_gives_zero_gradients_for_every_parameter() -> None:
    for name in TRAINED:
        model = build(make(name))
        empty = torch.zeros(0, dtype=torch.int64)
        model(empty, Row.of([]), empty).sum().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            assert not parameter.grad.any()


def test_counts_match_the_model() -> None:
    for name in MODELS:
        config = make(name)
        model = Decoder(config, NativeOps())
        shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
        assert shapes == {n: s.shape for n, s in parameter_specs(config).items()}
        assert parameter_count(config) == sum(p.numel() for p in model.parameters())
    config = make("llama")
    products = sum(s.numel for s in parameter_specs(config).values() if s.role in ("matrix", "head"))
    assert flops_per_token(config, 0) == 6 * products
    assert flops_per_token(config, 10) - flops_per_token(config, 0) == 12 * 48 * 10 * 3


def test_a_token_costs_the_experts_it_chooses() -> None:
    config = make("qwen3-moe")
    assert config.experts is not None
    expert = 3 * 48 * 24  # gate, up and down
    other = flops_per_token(config, 0) - 2 * 6 * 3 * expert  # two sparse layers, three choices
    more = config.experts.model_copy(update={"num_experts": 80})
    assert flops_per_token(config.model_copy(update={"experts": more}), 0) == other + 6 * (2 * 72 * 48 + 2 * 3 * expert)


def test_states_cost_the_same_at_any_context() -> None:
    config = make("qwen3-next-dense")  # one layer with attention, two without
    products = sum(s.numel for s in parameter_specs(config).values() if s.role == "matrix") + 97 * 48
    assert flops_per_token(config, 0) == 6 * products + 2 * 18 * 3 * 6 * 4
    assert flops_per_token(config, 10) - flops_per_token(config, 0) == 12 * 4 * 16 * 10


SHAPE_ONLY = {"unflatten", "flatten", "view", "reshape", "__get__"}


class _OnlyOps(TorchFunctionMode):
    """Fails on any torch function that is called outside an op, but for changes of shape."""

    inside = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        assert self.inside or name in SHAPE_ONLY, f"the model calls {resolve_name(func) or name} outside the op set"
        return func(*args, **(kwargs or {}))


SHARED = {"shared_expert_intermediate_size": 20, "shared_expert_gate": True, "router_bias_update_rate": 0.1}


@pytest.mark.parametrize(
    ("name", "experts"),
    [("qwen3", None), ("qwen3-moe", {}), ("qwen3-moe", SHARED), ("gpt-oss", None), ("qwen3-next", None)],
)
def test_the_model_calls_nothing_but_ops(name: str, experts: dict[str, Any] | None) -> None:
    config = make(name)
    if experts is not None:
        assert config.experts is not None
        config = config.model_copy(update={"experts": config.experts.model_copy(update=experts)})
    model = build(config)
    guard = _OnlyOps()

    class Guarded:
        def __getattr__(self, name: str) -> Any:
            def call(*args: Any) -> Any:
                guard.inside += 1
                try:
                    return getattr(NativeOps(), name)(*args)
                finally:
                    guard.inside -= 1

            return call

    ids = torch.arange(9)
    row, wanted = Row.of([4, 5]), model(ids, Row.of([4, 5]), ids)
    model.ops = Guarded()
    for block in model.blocks:
        block.ops = model.ops
    table = model.rotary_table(row)
    model.rotary_table = lambda row: table  # its frequencies are constants of the configuration
    with guard:
        loss = model(ids, row, ids)
    assert loss.shape == wanted.shape
    with guard, pytest.raises(AssertionError, match="outside the op set"):
        ids + ids


def test_native_implements_the_whole_op_set() -> None:
    wanted = {n: inspect.signature(f) for n, f in vars(Ops).items() if inspect.isfunction(f) and n[0] != "_"}
    assert len(wanted) >= 11
    for name, signature in wanted.items():
        assert list(inspect.signature(getattr(NativeOps, name)).parameters) == list(signature.parameters)
    assert "nn.functional" not in inspect.getsource(decoder_module)


def test_bfloat16_is_near_float32() -> None:
    config = make("qwen3")
    ids, row = torch.arange(64) % 97, Row.of([64])
    full, low = (build(config, dtype=d)(ids, row, ids) for d in (torch.float32, torch.bfloat16))
    assert low.dtype == torch.float32
    torch.testing.assert_close(full, low, rtol=0.05, atol=0.1)


def greedy_without_cache(model: Decoder, prompt: list[int], steps: int) -> list[int]:
    ids = list(prompt)
    for _ in range(steps):
        logits: Tensor = model(torch.tensor(ids), Row.of([len(ids)]))
        ids.append(int(logits[-1].argmax()))
    return ids[len(prompt) :]
