"""Every parameter of a decoder, from its configuration alone: name, global shape, role, initial spread.

Torch-free, so that planners and dry runs can use it. Names are those of Hugging Face checkpoints of the Llama, Qwen2
and Qwen3 families, which makes import and export a plain copy; only experts and the kernels of convolutions are stored
otherwise there.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

from equigrad.config.lora import Lora
from equigrad.config.model import Experts, LinearAttention, Model
from equigrad.errors import UserError

Role = Literal["matrix", "experts", "embedding", "head", "vector", "state"]
"""``experts``: matrices of which a token uses some; ``state``: learned by a rule of its own and not by gradients."""


BLOCK = re.compile(r"model\.layers\.(\d+)\.")
"""How the names of a block's parameters begin."""


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
    def is_matrix(self) -> bool:
        """Whether it is a linear layer in a block, or a stack of experts' layers. The kernel of a convolution is as
        many vectors as it has channels."""
        return len(self.shape) == {"matrix": 2, "experts": 3}.get(self.role)

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
        specs[f"{name}.weight"] = Spec((width,), "vector", fill=0.0 if config.zero_centred_norm else 1.0)

    def attention(at: str) -> None:
        queries = config.num_attention_heads * head
        rows = {"q": queries * (1 + config.attn_output_gate), "k": groups * head, "v": groups * head}
        for which, number in rows.items():
            linear(f"{at}.{which}_proj", number, hidden, std, config.attention_bias, Cut(0, groups))
        if config.qk_norm:
            norm(f"{at}.q_norm", head)
            norm(f"{at}.k_norm", head)
        linear(f"{at}.o_proj", hidden, queries, out_std, config.output_bias, Cut(1, groups))
        if config.attention_sinks:
            specs[f"{at}.sinks"] = Spec((config.num_attention_heads,), "vector", std, tensor=Cut(0, groups))

    for layer in range(config.all_layers):
        at = f"model.layers.{layer}"
        if layer >= config.num_hidden_layers:
            # Each tensor rank has all of it and computes tokens of its own.
            specs[f"{at}.eh_proj.weight"] = Spec((hidden, 2 * hidden), "matrix", std)
            for which in "enorm", "hnorm", "shared_head.norm":
                norm(f"{at}.{which}", hidden)
        norm(f"{at}.input_layernorm", hidden)
        if config.is_linear(layer):
            assert config.linear_attention is not None
            specs |= _linear_attention_specs(f"{at}.linear_attn", config.linear_attention, hidden, std, out_std)
        else:
            attention(f"{at}.self_attn")
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


def _linear_attention_specs(
    at: str, linear: LinearAttention, hidden: int, std: float, out_std: float
) -> dict[str, Spec]:
    """All of it lies key head after key head, and is cut between them: of a key head, its rows in the projections are
    query, key, values and gates of the values, and for the rates those of beta and of the decay."""
    groups, values, taps = linear.linear_num_key_heads, linear.values_per_key, linear.linear_conv_kernel_dim
    (_, key, value), cut = linear.mixed, Cut(0, groups)
    specs = {
        f"{at}.in_proj_qkvz.weight": Spec((groups * (2 * key + 2 * value), hidden), "matrix", std, tensor=cut),
        f"{at}.in_proj_ba.weight": Spec((groups * 2 * values, hidden), "matrix", std, tensor=cut),
    }
    for which, width in zip("qkv", linear.mixed, strict=True):
        # The spread that PyTorch gives a convolution.
        kernel = Spec((groups * width, 1, taps), "matrix", 1 / math.sqrt(3 * taps), tensor=cut)
        specs[f"{at}.{which}_conv1d.weight"] = kernel
    # States fade by exp(-exp(A_log) softplus(.. + 1)) a token: at rates about 1, some ten times slower or faster.
    specs[f"{at}.A_log"] = Spec((groups * values,), "vector", 1.0, tensor=cut)
    specs[f"{at}.dt_bias"] = Spec((groups * values,), "vector", fill=1.0, tensor=cut)
    specs[f"{at}.norm.weight"] = Spec((linear.linear_value_head_dim,), "vector", fill=1.0)
    specs[f"{at}.out_proj.weight"] = Spec((hidden, groups * value), "matrix", out_std, tensor=Cut(1, groups))
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
            found |= {m for m in linears if specs[weights[m]].role == "matrix"}
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
            what = f"{target!r} names {module}, one of those layers that take no adapter"
            raise UserError(f"lora.targets: {what}; {_known(linears)}")
        found |= set(hits)
    return [weights[m] for m in linears if m in found]


def _takes_adapter(spec: Spec) -> bool:
    """Whether it is the weight of a column or row linear, of routed experts or of the head; a router's is not divided,
    and a kernel has three dimensions."""
    return spec.role == "experts" or (
        spec.role in ("matrix", "head") and spec.tensor is not None and len(spec.shape) == 2
    )


def _known(linears: Collection[str]) -> str:
    ends = dict.fromkeys(m.rpartition(".")[2] for m in linears)
    return f"adapters are for {', '.join(ends)}"


def _adapter_specs(name: str, weight: Spec, lora: Lora) -> dict[str, Spec]:
    """Down to the rank and up again, ``x A^T B^T``; starts at nothing, for B is zero, with the spread of PEFT's A. Of
    stacked experts each has its own.

    Each is divided where it shares a dimension with the weight.
    """
    *stack, rows, columns = weight.shape
    role: Role = "experts" if stack else "matrix"
    a, b = (name.removesuffix("weight") + part for part in ADAPTER_PARTS)

    def cut(own: int) -> Cut | None:
        return weight.tensor if weight.tensor and weight.tensor.dim == len(stack) + own else None

    std = 1 / math.sqrt(3 * columns)
    return {
        a: Spec((*stack, lora.rank, columns), role, std, tensor=cut(1), expert=weight.expert),
        b: Spec((*stack, rows, lora.rank), role, tensor=cut(0), expert=weight.expert),
    }


def parameter_count(config: Model, lora: Lora | None = None, trained: bool = False) -> int:
    """Number of parameters (``trained``: of those that gradients change), those of all experts included; a tied head
    counts once."""
    return sum(spec.numel for spec in parameter_specs(config, lora).values() if spec.trained or not trained)


def flops_per_token(config: Model, context: float, lora: Lora | None = None) -> float:
    """Floating-point operations of forward and backward per token: 6 per weight that multiplies it (4 where it is
    frozen), plus attention and recurrent states.

    ``context`` is the mean number of keys that a query sees where there is no window: (n + 1) / 2 for n tokens. The
    count that MFU conventionally uses (PaLM, appendix B): products only, recomputation not counted, an embedding
    look-up free.
    """
    return token_flops(config, lora)(context)


def token_flops(config: Model, lora: Lora | None = None) -> Callable[[float], float]:
    """``flops_per_token`` of one model, to be asked for many contexts."""
    layers, rest = layer_flops(config, lora)
    return lambda context: rest + sum(layer(context) for layer in layers)


def layer_flops(config: Model, lora: Lora | None = None) -> tuple[list[Callable[[float], float]], float]:
    """The same apart: of each layer, those of multi-token prediction included, and of the head at each of its uses."""
    specs = parameter_specs(config, lora)
    share = 0.0 if config.experts is None else config.experts.num_experts_per_tok / config.experts.num_experts
    shares = {"matrix": 1.0, "experts": share}
    weights, rest = [0.0] * config.all_layers, 0.0
    for name, spec in specs.items():
        operations = spec.numel * (4 if spec.frozen else 6)
        if found := BLOCK.match(name):
            weights[int(found[1])] += shares.get(spec.role, 0.0) * operations
        elif spec.role == "head" or (spec.role == "embedding" and config.tie_word_embeddings):
            rest += operations * (1 + config.mtp_layers)
        else:
            rest += shares.get(spec.role, 0.0) * operations
    return [partial(_layer_flops, config, layer, products) for layer, products in enumerate(weights)], rest


def _layer_flops(config: Model, layer: int, products: float, context: float) -> float:
    if config.is_linear(layer):
        linear = config.linear_attention
        assert linear is not None
        # A token reads its key's value, writes, and reads its query's value, in each of the states.
        state = linear.linear_key_head_dim * linear.linear_value_head_dim
        return products + 18 * linear.linear_num_value_heads * state
    seen, window, length = context, config.window(layer), 2 * context - 1
    if window is not None and length > window:
        seen = window - window * (window - 1) / (2 * length)  # the first of them see fewer
    return products + 12 * config.num_attention_heads * config.head_size * seen
