"""Which channel grids exact ops need for a model's parameters, by name, and how each op gets at those of its layer."""

from collections.abc import Iterator, Mapping

import torch

from equigrad.config.model import Model
from equigrad.models.decoder import Decoder
from equigrad.models.parts import EMBEDDING
from equigrad.models.specs import ADAPTER_PARTS, Spec
from equigrad.numerics.exact.channels import Grids, Want
from equigrad.numerics.exact.cross_entropy import HEAD_EXTRA
from equigrad.numerics.exact.grids import operand_bits, term_bits
from equigrad.numerics.exact.layers import LayerGrids
from equigrad.parallel.placement import Placement

HEAD = "lm_head.weight"


def grids(
    config: Model, specs: Mapping[str, Spec], places: Mapping[str, Placement], tokens: int, device: torch.device
) -> Grids:
    """
    places: the box of each parameter that this rank would work with, be it on this rank or not
    tokens: the most that a step may have
    """
    wants = {f"{n}/{which}": want for n, at in places.items() for which, want in _wants(n, at, config, specs, tokens)}
    tied = [(f"{EMBEDDING}/in", f"{EMBEDDING}/loss", f"{EMBEDDING}/further")]
    return Grids(wants, device, tied if f"{EMBEDDING}/further" in wants else ())


def _wants(
    name: str, at: Placement, config: Model, specs: Mapping[str, Spec], tokens: int
) -> Iterator[tuple[str, Want]]:
    """The operands of one parameter's gradient."""
    spec = specs[name]
    uses = 1 + config.mtp_layers
    tied = config.tie_word_embeddings
    head = EMBEDDING if tied else HEAD
    if not spec.trained:
        if name == head and any(specs.get(name.removesuffix("weight") + part) for part in ADAPTER_PARTS):
            yield "loss", Want(1, operand_bits(tokens, HEAD_EXTRA)[0], (0, 1))
        return
    if name == head:
        errors, inputs = operand_bits(tokens * uses * (1 + tied), HEAD_EXTRA)
        yield "loss", Want(1, errors, (0, 1))
        yield "in", _want(at, -1, inputs)
        if tied:
            yield "further", _want(at, -1, inputs)
    elif name == EMBEDDING:
        yield "in", _want(at, -1, term_bits(tokens * uses))
    elif _is_contraction(name, spec):
        out, inputs = operand_bits(tokens, HEAD_EXTRA if name.startswith("lm_head.") else 0)
        yield "out", _want(at, -2, out)
        yield "in", _want(at, -1, inputs)
    elif not name.endswith(".bias"):  # a bias has the channels of its weight's outputs
        # A norm of heads has a term for each of them.
        yield "sum", _want(at, 0, term_bits(tokens * _most_heads(config)))


def _most_heads(config: Model) -> int:
    """That share a norm in any layer."""
    linear = config.linear_attention
    return max(config.num_attention_heads, 1 if linear is None else linear.linear_num_value_heads)


def _is_contraction(name: str, spec: Spec) -> bool:
    """Whether its gradient is a product of two factors at each token; the kernels of convolutions are sums."""
    return spec.role in ("matrix", "experts") and "conv1d" not in name


def _want(at: Placement, dim: int, bits: int) -> Want:
    start = at.offset[dim]
    return Want(at.shape[dim], bits, (start, start + at.local_shape[dim]))


def attach(model: Decoder, grids: Grids, places: Mapping[str, Placement]) -> None:
    """Give a decoder, or a part of it, the grids, and each of its layers its own."""
    model.grids = grids

    def of(name: str) -> LayerGrids:
        channels = {
            which: grids[f"{name}/{which}"]
            for which in ("out", "in", "sum", "loss", "further")
            if f"{name}/{which}" in grids
        }
        module = name.removesuffix("weight")
        for short, part in zip("ab", ADAPTER_PARTS, strict=True):
            names = {f"{short}.{which}": f"{module}{part}/{which}" for which in ("out", "in")}
            channels |= {which: grids[key] for which, key in names.items() if key in grids}
        return LayerGrids(places[name].shape, channels)

    for module_name, module in model.named_modules():
        if f"{module_name}.weight" in places and hasattr(module, "grids"):
            module.grids = of(f"{module_name}.weight")
    for block in model.blocks:
        at = f"model.layers.{block.layer.index}"
        names = ["self_attn.sinks", *(f"linear_attn.{x}_conv1d.weight" for x in "qkv")]
        names += ["linear_attn.A_log", "linear_attn.dt_bias"]
        block.layer.grids = {name: of(f"{at}.{name}") for name in names if f"{at}.{name}" in places}
