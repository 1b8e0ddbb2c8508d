"""What one step of training computes, and how its work is divided. No seconds here, and nothing of any device."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from equigrad.config.job import Job
from equigrad.config.layout import Layout
from equigrad.errors import UserError
from equigrad.memory.estimate import moments
from equigrad.models.parts import cut_into_parts
from equigrad.models.specs import parameter_specs
from equigrad.plan.shape import Layer, Shape

LOW = 2
"""Bytes of the type that products compute with (bfloat16)."""


class State(NamedTuple):
    """Bytes for each parameter.

    kept:     weights, as a rank keeps them between steps
    gathered: the copy that a layer computes with, where weights are sharded; 0: none
    gradient: its gradient
    moments:  what the optimizer keeps, a master copy of the weights included where it is not ``kept``
    wire:     a gradient while it travels
    residual: of an entry of the residual stream
    """

    kept: int
    gathered: int
    gradient: int
    moments: float
    wire: int
    residual: int = LOW


EQUIGRAD = State(kept=4, gathered=4, gradient=4, moments=8, wire=4, residual=4)
"""Float32 weights and residual stream, products in bfloat16 (``numerics.dtype``)."""
FSDP_PURE = State(kept=4, gathered=2, gradient=4, moments=8, wire=2)
"""PyTorch FSDP with bfloat16 parameters and reductions, what llm-foundry calls PURE."""
FSDP2 = State(kept=4, gathered=2, gradient=4, moments=8, wire=4)
"""The same with gradients reduced in float32, torchtitan's default."""
MEGATRON = State(kept=2, gathered=2, gradient=4, moments=12, wire=4)
"""Half-precision weights, float32 gradients and master weights: 18 bytes in all (arXiv 2104.04473)."""
DEEPSPEED = State(kept=2, gathered=0, gradient=2, moments=12, wire=2)
"""Half-precision weights and gradients: 16 bytes in all (arXiv 1910.02054)."""

Recompute = Literal["none", "selective", "alternate", "block"]
Attention = Literal["flash", "flash3", "unfused"]


ALONE = Layout()


@dataclass(frozen=True)
class Workload:
    """One step of a training job.

    micro_batch:       samples that a data lane computes at a time, each of ``sequence`` tokens
    micro_batches:     how many of them a data lane computes in a step
    recompute:         what is computed again in the backward pass. ``block``: all but the input of a layer;
                       ``selective``: the scores of unfused attention (arXiv 2205.05198); ``alternate``: elementwise
                       work and every second linear layer, half of them on average
    recompute_every:   ``block``: of every so many layers, one
    attention:         ``flash``: in tiles, no scores in memory, half of them never computed; ``flash3``: the same by
                       kernels that were made for the device; ``unfused``: all scores, in memory
    fused:             neighbouring elementwise work of a layer is one kernel (a compiler, or by hand)
    fused_loss:        so is that of the loss, and probabilities take the logits' place
    dropout:           masks are kept
    sequence_parallel: tensor ranks divide tokens where they do not divide features
    keeps_gathered:    with it, what a linear layer gathered is kept; otherwise it is gathered again, beside other work
    overlap:           sharded weights, gradients and the messages of a pipeline travel while ranks compute
    overlap_tensor:    what tensor ranks exchange travels in pieces, beside the product of the piece before
    offload:           moments lie in the host's memory, and the update is computed there
    fp8:               products of linear layers in 8-bit floating point
    cuts:              where each pipeline stage but the first begins; empty: stages as even as layers allow
    """

    shape: Shape
    sequence: int
    micro_batch: int
    micro_batches: int
    layout: Layout = ALONE
    state: State = EQUIGRAD
    recompute: Recompute = "none"
    recompute_every: int = 1
    attention: Attention = "flash"
    fused: bool = False
    fused_loss: bool = False
    dropout: bool = False
    sequence_parallel: bool = True
    keeps_gathered: bool = True
    overlap: bool = True
    overlap_tensor: bool = False
    offload: bool = False
    fp8: bool = False
    cuts: tuple[int, ...] = ()

    @classmethod
    def of(cls, job: Job) -> "Workload":
        """A job that equigrad runs, its rows full. ``UserError`` where it has no size yet or a part without a cost."""
        if job.batch.tokens is None:
            raise UserError("the cost model needs batch.tokens: how many tokens a step has")
        if job.numerics.kind != "native" or job.numerics.dtype != "bfloat16" or job.lora is not None:
            raise UserError(
                'the cost model knows native numerics in bfloat16 and no adapters: set numerics.kind = "native",'
                ' numerics.dtype = "bfloat16", and leave [lora] out'
            )
        shape, specs = Shape.of(job.model), parameter_specs(job.model).values()
        samples = max(1, job.batch.row_tokens // job.data.context)
        rows = -(-job.batch.tokens // (job.data.context * samples * job.layout.data_lanes))
        kept = 4 * sum(spec.numel * moments(job.optim, spec) for spec in specs) / shape.parameters
        parts = cut_into_parts(job.model, job.layout.pp * job.layout.pp_stages, job.data.context)
        return cls(
            shape, job.data.context, samples, rows, job.layout, EQUIGRAD._replace(moments=kept), job.memory.recompute,
            job.memory.recompute_every, fused=job.numerics.compile, cuts=tuple(part.start for part in parts[1:]),
        )  # fmt: skip

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.sequence * self.micro_batch * self.micro_batches * self.layout.data_lanes

    @property
    def row_tokens(self) -> int:
        """Tokens of a micro-batch on one context rank."""
        return -(-self.sequence * self.micro_batch // self.layout.cp)

    @property
    def norm_tokens(self) -> int:
        """Those of them that one tensor rank has where features are whole."""
        return -(-self.row_tokens // self.layout.tp) if self.sequence_parallel else self.row_tokens

    @property
    def local_heads(self) -> int:
        """Query heads of a tensor rank."""
        return -(-self.shape.heads // self.layout.tp)

    @property
    def shards(self) -> int:
        """Ranks over which weights are sharded."""
        return self.layout.dp_shard * self.layout.cp

    @property
    def stages(self) -> int:
        """Of all pipeline ranks."""
        return self.layout.pp * self.layout.pp_stages

    def stage(self, number: int) -> tuple[Layer, ...]:
        """The layers of a pipeline stage."""
        layers, count = self.shape.layers, self.stages
        if self.cuts:
            bounds = (0, *self.cuts, len(layers))
            return layers[bounds[number] : bounds[number + 1]]
        return layers[len(layers) * number // count : len(layers) * (number + 1) // count]

    def stage_parameters(self, number: int) -> tuple[int, int]:
        """Of a stage on one tensor rank, gathered: those that all expert ranks have, and this rank's experts."""
        shape, dense, routed = self.shape, 0, 0
        layers = self.stage(number)
        for layer in set(layers):
            own, experts = shape.layer_parameters(layer)
            dense, routed = dense + layers.count(layer) * own, routed + layers.count(layer) * experts
        if number == 0:
            dense += shape.embedding_parameters
        if number == self.stages - 1:
            dense += shape.head_parameters + (shape.vocab * shape.hidden if shape.tied and self.stages > 1 else 0)
        return -(-dense // self.layout.tp), -(-routed // (self.layout.tp * self.layout.ep))
