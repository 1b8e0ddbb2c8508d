"""How much memory a rank needs, by use. An estimate of what tensors take at the peak: what the allocator loses between
them, and what libraries keep for themselves, is not in it.

``memory.estimate`` answers the same for jobs of equigrad, from its own ops and parameters; this module answers for any
shape, precision and policy that a published run may have, and agrees with it where both can.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from equigrad.plan.ops import head_ops, kept, layer_ops
from equigrad.plan.shape import Layer
from equigrad.plan.workload import LOW, Workload
from equigrad.schedule.pipeline import PipelineKind, pipeline, simulate


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank.

    parameters:  as they are kept between steps
    gathered:    copies of sharded ones while layers compute with them
    gradients:   whole, where they are reduced once a step
    optimizer:   moments and master weights; 0 where they are offloaded
    activations: what the micro-batches in flight have left for their backward passes
    layer:       of the layer whose backward pass runs: what is computed again, and gradients of its largest op
    loss:        logits, probabilities and their gradient, of one micro-batch; gone when the first layer's turn comes
    buffers:     of communication: gradients of the layer that are being reduced
    """

    parameters: float
    gathered: float
    gradients: float
    optimizer: float
    activations: float
    layer: float
    loss: float
    buffers: float

    @property
    def total(self) -> float:
        return sum(vars(self).values()) - min(self.layer, self.loss)


def memory(work: Workload) -> Memory:
    """Of the pipeline rank that needs most."""
    left = what_is_left(work)
    return max((rank_memory(work, rank, left) for rank in range(work.layout.pp)), key=lambda found: found.total)


def exceeds(work: Workload, most: float) -> bool:
    """Whether some rank takes more than so many bytes, buffers not counted; asks no more ranks than it must."""
    layout, left = work.layout, what_is_left(work)
    held = in_flight(layout.pp_schedule, layout.pp, layout.pp_stages, work.micro_batches)[0]
    # Often told by what the first rank's activations take alone.
    if held * max(sum(left[one][0] for one in work.stage(stage)) for stage in range(0, work.stages, layout.pp)) > most:
        return True
    ranks = (rank_memory(work, rank, left) for rank in range(work.layout.pp))
    return any(found.total - found.buffers > most for found in ranks)


def rank_memory(
    work: Workload, rank: int, left: Mapping[Layer, tuple[float, float]] | None = None, held: int | None = None
) -> Memory:
    """Of any rank at this place in the pipeline. ``left``: of ``what_is_left``, where it is known. ``held``: pairs of
    stage and micro-batch that wait for a backward pass, where it is not what the pipeline's schedule says."""
    left = left or what_is_left(work)
    layout, state = work.layout, work.state
    stages = range(rank, work.stages, layout.pp)
    here = [work.stage_parameters(stage) for stage in stages]
    dense, routed = sum(whole for whole, _ in here), sum(experts for _, experts in here)
    own = dense / work.shards + routed / max(1, work.shards // layout.ep)
    layers = [layer for stage in stages for layer in work.stage(stage)]
    largest = max((_layer_weights(work, layer) for layer in set(layers)), default=0.0)
    blocks = sum(_layer_weights(work, layer) * layers.count(layer) for layer in set(layers))
    sharded, whole = work.shards > 1, dense + routed
    # Two blocks at a time: one computes, the next is gathered. A pipeline keeps its stages from the first row to the
    # last.
    gathered: float = whole
    if layout.reshard_after_forward and layout.pp == 1:
        gathered = whole - blocks + min(blocks, 2 * largest)
    if held is None:
        held = in_flight(layout.pp_schedule, layout.pp, layout.pp_stages, work.micro_batches)[rank]
    # Of a rank's stages, the one whose layers leave most.
    activations = held * max(sum(left[layer][0] for layer in work.stage(stage)) for stage in stages)
    layer = max((left[one][1] for one in set(layers)), default=0.0)
    return Memory(
        parameters=state.kept * own,
        gathered=state.gathered * gathered if sharded else 0.0,
        gradients=state.gradient * (own if layout.reduce_every_round else whole),
        optimizer=0.0 if work.offload else state.moments * own,
        activations=activations,
        layer=layer,
        loss=loss_bytes(work) if work.stages - 1 in stages else 0.0,
        buffers=state.wire * largest if sharded and layout.reduce_every_round else 0.0,
    )


@lru_cache(maxsize=4096)
def in_flight(kind: PipelineKind, ranks: int, stages_per_rank: int, microbatches: int) -> tuple[int, ...]:
    """Of each pipeline rank, the most (stage, micro-batch) pairs that wait for a backward pass: what
    ``schedule.pipeline.simulate`` counts, in closed form, for thousands of pipelines are asked about."""
    if ranks == 1:
        return (1,)
    every = stages_per_rank * microbatches
    if kind == "gpipe":
        return (every,) * ranks
    if kind == "zero_bubble":
        enough = 2 * ranks + microbatches % ranks  # more change nothing
        return _simulated(ranks, stages_per_rank, min(microbatches, enough))
    # A rank's forwards before its first backward, and the one that it alternates with.
    group = ceil(microbatches / max(1, microbatches // ranks))
    ahead = [(stages_per_rank - 1) * group + (1 + (stages_per_rank > 1)) * (ranks - 1 - rank) for rank in range(ranks)]
    return tuple(min(every, warm_up + 1) for warm_up in ahead)


@lru_cache(maxsize=1024)
def _simulated(ranks: int, stages_per_rank: int, microbatches: int) -> tuple[int, ...]:
    return simulate(pipeline("zero_bubble", ranks, stages_per_rank, microbatches)).alive


def _layer_weights(work: Workload, layer: Layer) -> float:
    dense, routed = work.shape.layer_parameters(layer)
    return dense / work.layout.tp + routed / (work.layout.tp * work.layout.ep)


def what_is_left(work: Workload) -> dict[Layer, tuple[float, float]]:
    """Of each kind of layer: what it leaves for its backward pass, and what that pass takes beside."""
    kinds = set(work.shape.layers)
    return {one: (saved_bytes(work, one), _computed_again(work, one) + _gradients(work, one)) for one in kinds}


def saved_bytes(work: Workload, layer: Layer) -> float:
    """What a layer leaves for its backward pass, of one micro-batch on one rank; averaged over ``recompute_every``."""
    ops, share = layer_ops(work, layer), 1 / work.recompute_every
    return share * kept(work, ops) + (1 - share) * sum(op.saved for op in ops)


def _computed_again(work: Workload, layer: Layer) -> float:
    """What one layer has left when it has been computed again, beyond what was kept."""
    if work.recompute == "none":
        return 0.0
    ops = layer_ops(work, layer)
    whole = sum(op.saved for op in ops)
    return whole if work.recompute == "block" else max(0.0, whole - kept(work, ops))


def _gradients(work: Workload, layer: Layer) -> float:
    """The most that gradients of what enters and leaves an op take; scores have two, and one more under dropout."""
    scores = LOW * (2 + work.dropout) * work.row_tokens * work.sequence * work.local_heads
    ops = layer_ops(work, layer)
    most = max(LOW * (op.sizes[0] + op.sizes[2]) for op in ops)
    return max(most, scores) if any(op.name == "attention scores" for op in ops) else most


def loss_bytes(work: Workload) -> float:
    """At the peak of the loss: what the last norm and the head keep, logits, and, unless fused, their float32 copy,
    probabilities and gradient, and the gradient's cast."""
    tokens, columns = work.row_tokens, -(-work.shape.vocab // work.layout.tp)
    kept = sum(op.saved for op in head_ops(work) if op.name != "loss")
    return kept + tokens * columns * (LOW + 4 if work.fused_loss else LOW + 4 + 4 + 4 + LOW)
