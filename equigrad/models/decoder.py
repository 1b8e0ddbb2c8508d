"""A pre-norm decoder for Llama, Qwen2, Qwen3, Qwen3-MoE, Qwen3-Next and gpt-oss, written once on plain tensors and the
op set.

It knows its configuration and calls ops; it does not know how it is sharded, how rows are made or what the loss is
for. Everything a token's result depends on is in the arguments.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from equigrad.config.lora import Lora
from equigrad.config.model import Model
from equigrad.models.parts import Part
from equigrad.models.rope import frequencies
from equigrad.models.specs import Spec, parameter_specs
from equigrad.numerics.ops import Adapter, AttentionLayer, DeltaLayer, Layer, Ops, RotaryTable
from equigrad.numerics.random import fill_normal
from equigrad.numerics.routing import Load, Loads
from equigrad.numerics.row import Row
from equigrad.parallel.placement import Placed, Placement, place, whole


class Block(nn.Module):
    """Attention or the gated delta rule, and feed-forward, each behind a norm and added to the residual stream."""

    # Name spaces of parameters, attached by the decoder from the specs.
    self_attn: Any
    linear_attn: Any
    mlp: Any
    input_layernorm: Any
    post_attention_layernorm: Any

    def __init__(self, config: Model, ops: Ops, layer: int) -> None:
        super().__init__()
        self.config, self.ops = config, ops
        self.linear = config.linear_attention if config.is_linear(layer) else None
        self.layer: Any = AttentionLayer(layer, config.window(layer))
        if (linear := self.linear) is not None:
            widths = linear.linear_key_head_dim, linear.linear_value_head_dim
            self.layer = DeltaLayer(layer, *widths, linear.values_per_key)
        self.sparse = config.is_sparse(layer)

    def forward(self, x: Tensor, table: RotaryTable, row: Row) -> tuple[Tensor, Load | None]:
        """Residual stream [T, H] -> [T, H], and how its router spread the tokens, if it has one."""
        ops = self.ops
        x, branch = ops.fork(x, row)
        branch = self._norm(branch, self.input_layernorm, row)
        mixed = self._attend(branch, table, row) if self.linear is None else self._recur(branch, row)
        x, branch = ops.fork(ops.add(x, mixed, row), row)
        branch = self._norm(branch, self.post_attention_layernorm, row)
        if not self.sparse:
            return ops.add(x, self._feed(branch, self.mlp, row), row), None
        fed, load = self._feed_experts(branch, row)
        return ops.add(x, fed, row), load

    def _norm(self, x: Tensor, own: Any, row: Row) -> Tensor:
        return self.ops.norm(x, own, self.config.rms_norm_eps, row, self.config.zero_centred_norm)

    def _attend(self, x: Tensor, table: RotaryTable, row: Row) -> Tensor:
        ops, config, own = self.ops, self.config, self.self_attn
        width, gate = config.head_size, None
        q, k, v = ops.column_linears(x, (own.q_proj, own.k_proj, own.v_proj), row)
        q, k, v = q.unflatten(-1, (-1, width * (1 + config.attn_output_gate))), *_heads(width, k, v)
        if config.attn_output_gate:
            q, gate = ops.split(q, (width, width), row)
        if config.qk_norm:
            q, k = self._norm(q, own.q_norm, row), self._norm(k, own.k_norm, row)
        q, k = ops.rotary(q, table, row), ops.rotary(k, table, row)
        mixed = ops.attention(q, k, v, self.layer, row, own.sinks)
        if gate is not None:
            mixed = ops.output_gate(mixed, gate, row)
        return ops.row_linear(mixed.flatten(1), own.o_proj, row)

    def _recur(self, x: Tensor, row: Row) -> Tensor:
        ops, own, linear, layer = self.ops, self.linear_attn, self.linear, self.layer
        assert linear is not None
        features, rates = ops.column_linears(x, (own.in_proj_qkvz, own.in_proj_ba), row)
        sizes = sum(linear.mixed), linear.mixed[-1]
        mixed, gate = ops.split(features.unflatten(-1, (-1, sum(sizes))), sizes, row)
        (rates,) = _heads(2 * linear.values_per_key, rates)
        kernels = [conv.weight for conv in (own.q_conv1d, own.k_conv1d, own.v_conv1d)]
        read = ops.gated_delta_rule(mixed, rates, kernels, own.A_log, own.dt_bias, layer, row)
        read = ops.gated_norm(read, gate, own.norm, self.config.rms_norm_eps, row)
        return ops.row_linear(read.flatten(1), own.out_proj, row)

    def _feed(self, x: Tensor, own: Any, row: Row) -> Tensor:
        ops = self.ops
        gate, up = ops.column_linears(x, (own.gate_proj, own.up_proj), row)
        return ops.row_linear(ops.gated(gate, up, row), own.down_proj, row)

    def _feed_experts(self, x: Tensor, row: Row) -> tuple[Tensor, Load]:
        ops, own, experts = self.ops, self.mlp, self.config.experts
        assert experts is not None
        x, branch = ops.fork(x, row)
        routes = ops.router(branch, own.gate, own.gate.e_score_correction_bias, experts, row)
        shared = None
        if experts.shared_expert_intermediate_size:
            x, branch = ops.fork(x, row)
            shared = self._feed_shared(branch, experts.shared_expert_gate, row)
        sent, at = ops.dispatch(x, routes, row)
        gate, up = ops.expert_column_linears(sent, (own.experts.gate_proj, own.experts.up_proj), at, row)
        if experts.activation == "swiglu":
            inner = ops.gated(gate, up, row)
        else:
            inner = ops.clamped_gated(gate, up, experts.swiglu_alpha, experts.swiglu_limit, row)
        routed = ops.combine(ops.expert_row_linear(inner, own.experts.down_proj, at, row), routes, at, row)
        return routed if shared is None else ops.add(routed, shared, row), routes.load

    def _feed_shared(self, x: Tensor, gated: bool, row: Row) -> Tensor:
        ops, own = self.ops, self.mlp
        if not gated:
            return self._feed(x, own.shared_expert, row)
        x, branch = ops.fork(x, row)
        return ops.token_gate(branch, own.shared_expert_gate, self._feed(x, own.shared_expert, row), row)


class FurtherBlock(Block):
    """A module for multi-token prediction: from the residual stream and the tokens further ahead to the stream from
    which the head predicts the tokens after those (DeepSeek-V3, arXiv 2412.19437, section 2.2)."""

    enorm: Any
    hnorm: Any
    eh_proj: Any
    shared_head: Any

    def forward(  # type: ignore[override]
        self, x: Tensor, ahead: Tensor, table: RotaryTable, row: Row
    ) -> tuple[Tensor, Tensor, Load | None]:
        """Residual stream [T, H] and embeddings [T, H] of the tokens ahead -> the stream that the next module goes on
        from, the same as the head wants it, and the load of its router."""
        ops = self.ops
        ahead, x = self._norm(ahead, self.enorm, row), self._norm(x, self.hnorm, row)
        x, load = super().forward(ops.joined_linear(ahead, x, self.eh_proj, row), table, row)
        x, branch = ops.fork(x, row)
        return x, self._norm(branch, self.shared_head.norm, row), load


@dataclass(frozen=True)
class Ahead:
    """What a module for multi-token prediction is given of a row, and what it is to predict.

    ids:    [own tokens] int64, the token so many places further than each of the row
    labels: [n] int64, the tokens after those, where they are in the segment and in the loss
    at:     [n] int64, the own tokens that predict them
    """

    ids: Tensor
    labels: Tensor
    at: Tensor


class _Holder(nn.Module):
    """A name space for parameters; a bias, sinks or an adapter that the model lacks read as None."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    sinks: nn.Parameter | None
    e_score_correction_bias: Tensor | None
    lora_A: Any
    lora_B: Any
    grids: Any = None

    def __init__(self, scale: float) -> None:
        """``scale``: of adapters."""
        super().__init__()
        self.scale = scale
        self.register_parameter("bias", None)
        self.register_parameter("sinks", None)
        self.register_buffer("e_score_correction_bias", None)
        self.register_module("lora_A", None)
        self.register_module("lora_B", None)

    @property
    def adapter(self) -> Adapter | None:
        """What is added to the weight."""
        return None if self.lora_A is None else Adapter(self.lora_A.weight, self.lora_B.weight, self.scale)


def _heads(width: int, *features: Tensor) -> list[Tensor]:
    """[T, heads * width] -> [T, heads, width]."""
    return [x.unflatten(-1, (-1, width)) for x in features]


class Decoder(nn.Module):
    """The whole model, or one part of it, a stage of a pipeline. ``initialize`` or a checkpoint gives parameters their
    values; to be sharded before they take any memory, they are made on the meta device."""

    model: Any
    lm_head: Any

    def __init__(
        self,
        config: Model,
        ops: Ops,
        device: torch.device | str = "meta",
        places: Mapping[str, Placement] | None = None,
        part: Part | None = None,
        lora: Lora | None = None,
    ) -> None:
        """
        places: the box of each parameter that this rank works with; None: all of each
        part:   which blocks these are; None: all
        lora:   adapters beside frozen weights; None: weights that are trained
        """
        super().__init__()
        self.config, self.ops = config, ops
        self.grids: Any = None
        self.specs = parameter_specs(config, lora)
        scale = 0.0 if lora is None else lora.scale
        self.model = nn.Module()
        self.part = part or Part(0, config.num_hidden_layers, config.num_hidden_layers)
        layers = config.num_hidden_layers
        blocks = range(self.part.start, config.all_layers if self.part.last else self.part.stop)
        kinds = {i: Block if i < layers else FurtherBlock for i in blocks}
        self.model.layers = nn.ModuleDict({str(i): kind(config, ops, i) for i, kind in kinds.items()})
        self.places = places or {name: whole(name, spec.shape) for name, spec in self.specs.items()}
        for name, at in self.places.items():
            dtype = torch.float32 if self.specs[name].role == "state" else ops.parameter_dtype
            if self.part.holds(name, config.embedding_at_end):
                _attach(self, name, torch.empty(at.local_shape, dtype=dtype, device=device), self.specs[name], scale)

    def forward(
        self,
        ids: Tensor,
        row: Row,
        labels: Tensor | None = None,
        at: Tensor | None = None,
        x: Tensor | None = None,
        loads: Loads | None = None,
        ahead: Sequence[Ahead] = (),
        temperature: float = 1.0,
    ) -> Tensor | tuple[Tensor, ...]:
        """Per-token cross-entropy [n] float32 of ``labels`` [n] given ``ids`` [T]; without labels the logits [n, V].

        ``at`` [n] int64 says at which tokens they are wanted; None: at all T of them. A part that is not the first goes
        on from the residual stream ``x`` [T, H], and one that is not the last returns it. ``loads`` takes up how the
        routers spread the tokens. ``ahead``, one for each module for multi-token prediction: their losses follow that
        of ``labels``; without it they are ignored. Cross-entropies are those of the logits over ``temperature``; logits
        are returned as they are.
        """
        ops, vocabulary = self.ops, self.config.vocabulary
        if x is None:
            x = ops.embedding(ids, self.model.embed_tokens, vocabulary, row)
        table = self.rotary_table(row)
        loads = Loads() if loads is None else loads
        main, further = self.blocks[: self.part.stop - self.part.start], self.blocks[self.part.stop - self.part.start :]
        for block in main:
            x, load = block(x, table, row)
            if load is not None:
                loads[block.layer.index] = load
        if not self.part.last:
            return x
        branch = None
        if ahead:
            x, branch = ops.fork(x, row)
        x = ops.norm(x, self.model.norm, self.config.rms_norm_eps, row, self.config.zero_centred_norm)
        if labels is None:
            return ops.logits(x, self.head, at, vocabulary, row)
        losses = [ops.cross_entropy(x, self.head, labels, at, vocabulary, row, temperature)]
        if branch is None:
            return losses[0]
        for block, tokens in zip(further, ahead, strict=True):
            embedded = ops.embedding(tokens.ids, self.model.embed_tokens, vocabulary, row)
            branch, x, load = block(branch, embedded, table, row)
            if load is not None:
                loads[block.layer.index] = load
            losses.append(ops.cross_entropy(x, self.head, tokens.labels, tokens.at, vocabulary, row, temperature))
        return tuple(losses)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.parameters()).device

    @property
    def blocks(self) -> list[Block]:
        """The blocks, first to last, and after them the modules for multi-token prediction."""
        return list(self.model.layers.values())

    @property
    def head(self) -> Layer:
        """The output projection [V, H]."""
        return self.model.embed_tokens if self.config.tie_word_embeddings else self.lm_head

    def rotary_table(self, row: Row) -> RotaryTable:
        """The rotary table of a row, shared by all blocks."""
        scaling = self.config.rope_scaling
        if scaling is None or scaling.kind != "dynamic":
            values, scale = self._frequencies
        else:
            lengths = row.lengths if row.cache is None else row.cache.row_lengths
            values, scale = frequencies(self.config, lengths, self.ops.power)
        return self.ops.rotary_table(values.to(row.positions.device), scale, row)

    @cached_property
    def _frequencies(self) -> tuple[Tensor, float]:
        """Constants of the configuration, where they do not depend on the segments."""
        return frequencies(self.config, (), self.ops.power)

    def placed(self) -> dict[str, Placed]:
        """This rank's parameters, and what else is learned, in name order."""
        named = sorted([*self.named_parameters(), *self.named_buffers()])
        return {name: place(name, tensor, self.places[name]) for name, tensor in named}

    @torch.no_grad()
    def initialize(self, seed: int, given: Collection[str] = ()) -> None:
        """Initial weights, but of parameters that are ``given``: each value depends on the seed, the parameter's name
        and its global index alone."""
        for name, placed in self.placed().items():
            spec = self.specs[name]
            if name in given:
                continue
            if spec.std is None:
                placed.tensor.fill_(spec.fill)
            else:
                at = placed.placement
                fill_normal(placed.tensor, spec.std, seed, name, at.shape, at.offset)


def _attach(root: nn.Module, name: str, tensor: Tensor, spec: Spec, scale: float) -> None:
    """Register a parameter, or what has a rule of its own, under its dotted name, making the holders on the way."""
    *path, leaf = name.split(".")
    node = root
    for part in path:
        if getattr(node, part, None) is None:
            node.add_module(part, _Holder(scale))
        node = getattr(node, part)
    if spec.role == "state":
        node.register_buffer(leaf, tensor)
    else:
        node.register_parameter(leaf, nn.Parameter(tensor, requires_grad=spec.trained))
