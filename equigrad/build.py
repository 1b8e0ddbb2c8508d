"""From a resolved job to a model that is ready to compute: op set, activation policy, compilation, sharding."""

from dataclasses import replace

import torch

from equigrad.config import Job
from equigrad.config.layout import Layout
from equigrad.config.lora import Lora
from equigrad.config.model import Model
from equigrad.memory import recompute
from equigrad.models.decoder import Decoder
from equigrad.models.grids import attach, grids
from equigrad.models.parts import EMBEDDING, Part, cut_into_parts
from equigrad.models.specs import parameter_specs
from equigrad.numerics.exact.channels import Grids
from equigrad.numerics.exact.elementary import check_subnormals
from equigrad.numerics.exact.fused import one_pass, run_fused
from equigrad.numerics.exact.grids import term_bits
from equigrad.numerics.exact.ops import ExactOps
from equigrad.numerics.native import NativeOps
from equigrad.numerics.ops import COMPUTE_DTYPES, Ops
from equigrad.parallel.collectives import ALONE, Axis
from equigrad.parallel.placement import Placement, whole
from equigrad.parallel.sharding import data_mesh, shard
from equigrad.parallel.world import World


def build_model(job: Job, world: World) -> Decoder:
    """The whole decoder on this rank's device, as ``build_parts`` makes it."""
    (model,) = build_parts(job, world).values()
    return model


def build_parts(job: Job, world: World) -> dict[int, Decoder]:
    """This rank's parts of the decoder, on its device, sharded as the layout says, not yet given values.

    By number: part ``p`` is on pipeline rank ``p % pp``.
    """
    pipe = world.axis("pp")
    parts = cut_into_parts(job.model, pipe.size * job.layout.pp_stages, job.data.context)
    exact = _grids(job, world, parts[pipe.rank]) if job.numerics.kind == "exact" else None
    return {number: _build(job, world, parts[number], exact) for number in range(pipe.rank, len(parts), pipe.size)}


def build_replica(job: Job, device: torch.device, tensor: Axis = ALONE) -> Decoder:
    """The whole decoder for sampling, on one rank or divided over the ranks of an axis, not sharded, not yet given
    values."""
    axes = {"tp": tensor} if tensor.size > 1 else {}
    world = World(Layout(tp=tensor.size), tensor.rank, tensor.size, 0, device, None, axes=axes)
    (part,) = cut_into_parts(job.model, 1, job.data.context)
    if job.numerics.kind == "exact":
        return _build(job, world, part, _grids(job, world, part))
    # Compiled blocks would be compiled again for nearly every number of sequences.
    return _build(
        job.model_copy(update={"numerics": job.numerics.model_copy(update={"compile": False})}), world, part, None
    )


def _grids(job: Job, world: World, part: Part) -> Grids:
    """All channel grids of the model."""
    specs, boxes = parameter_specs(job.model, job.lora), places(job.model, world, part, job.lora)
    return grids(job.model, specs, boxes, job.most_tokens, world.device)


def _ops(job: Job, world: World) -> Ops:
    dtype, budget = COMPUTE_DTYPES[job.numerics.dtype], job.memory.saved_logits_mb << 20
    if job.numerics.kind == "native":
        return NativeOps(dtype, budget)
    check_subnormals(world.device)
    run_fused(one_pass(world.device) if job.numerics.compile else "plain")
    return ExactOps(dtype, budget, job.model.max_position_embeddings, term_bits(job.most_tokens))


def _build(job: Job, world: World, part: Part, exact: Grids | None) -> Decoder:
    ops = _ops(job, world)
    sharded = data_mesh(world) is not None
    device, boxes = "meta" if sharded else world.device, places(job.model, world, part, job.lora)
    model = Decoder(job.model, ops, device, boxes, part, job.lora)
    blocks = model.blocks
    if exact is not None:
        attach(model, exact, boxes)
    if job.numerics.compile and isinstance(ops, NativeOps):
        # Coefficients are constants of the configuration; as inputs they would not reach functions inside a block.
        torch._dynamo.config.specialize_float = True
        # What these call depends on the lengths of a row's segments, on the choices of its tokens, or on how they lie
        # on the tensor ranks: compiled, it would serve no other row.
        apart = ["attention", "gated_delta_rule", "router", "dispatch", "expert_column_linears", "expert_row_linear"]
        apart += ["combine", *(["gather", "reduce_scatter"] if world.axis("tp").size > 1 else [])]
        for name in apart:
            setattr(ops, name, torch.compiler.disable(getattr(ops, name)))
        for block in blocks:
            block.forward = torch.compile(block.forward, dynamic=True)  # type: ignore[method-assign]
    recompute.apply(job.memory, blocks)
    shard(model, blocks, world, [p for n, p in model.named_parameters() if model.specs[n].expert is not None])
    return model.to_empty(device=world.device) if sharded else model


def places(model: Model, world: World, part: Part, lora: Lora | None = None) -> dict[str, Placement]:
    """The box of each parameter that this rank works with, before it is sharded over the data ranks."""
    tensor, expert, found = world.axis("tp"), world.axis("ep"), {}
    for name, spec in parameter_specs(model, lora).items():
        if spec.role == "state":  # it is not sharded: every rank has all of it
            found[name] = whole(name, spec.shape, replica=world.rank % (world.size // world.axis("pp").size))
            continue
        box = whole(name, spec.shape, replica=tensor.rank if spec.tensor is None else 0)
        for cut, axis in ((spec.tensor, tensor), (spec.expert, expert)):
            box = box if cut is None else box.part(*cut, axis.size, axis.rank)
        if is_second_copy(name, part, model.embedding_at_end):
            box = replace(box, replica=box.replica + tensor.size)
        found[name] = box
    return found


def is_second_copy(name: str, part: Part, both_ends: bool) -> bool:
    """Whether a parameter of this part is the copy of the embedding that the end of a pipeline works with."""
    return both_ends and name == EMBEDDING and part.last and not part.first
