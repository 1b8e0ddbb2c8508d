"""From a resolved job to a model that is ready to compute: op set, activation policy, compilation, sharding."""

import torch

from equigrad.config import Job
from equigrad.config.model import Model
from equigrad.memory import recompute
from equigrad.models.decoder import Decoder
from equigrad.models.specs import parameter_specs
from equigrad.numerics.native import NativeOps
from equigrad.numerics.ops import COMPUTE_DTYPES
from equigrad.parallel.placement import Placement, whole
from equigrad.parallel.sharding import data_mesh, shard
from equigrad.parallel.world import World


def build_model(job: Job, world: World) -> Decoder:
    """The decoder on this rank's device, sharded as the layout says, its parameters not yet given values."""
    ops = NativeOps(COMPUTE_DTYPES[job.numerics.dtype], job.memory.saved_logits_mb << 20)
    sharded = data_mesh(world) is not None
    model = Decoder(job.model, ops, "meta" if sharded else world.device, places(job.model, world))
    blocks = model.blocks
    if job.numerics.compile:
        # What attention calls depends on the lengths of a row's segments: compiled, it would serve no other row.
        ops.attention = torch.compiler.disable(ops.attention)  # type: ignore[method-assign]
        # And what experts compute on the choices of a row's tokens.
        for name in ("router", "dispatch", "expert_linears", "combine"):
            setattr(ops, name, torch.compiler.disable(getattr(ops, name)))
        for block in blocks:
            block.forward = torch.compile(block.forward, dynamic=True)  # type: ignore[method-assign]
    recompute.apply(job.memory, blocks)
    shard(model, blocks, world, [p for n, p in model.named_parameters() if model.specs[n].expert is not None])
    return model.to_empty(device=world.device) if sharded else model


def places(model: Model, world: World) -> dict[str, Placement]:
    """The box of each parameter that this rank works with, before it is sharded over the data ranks."""
    tensor, expert, found = world.axis("tp"), world.axis("ep"), {}
    for name, spec in parameter_specs(model).items():
        if spec.role == "state":  # it is not sharded: every rank has all of it
            found[name] = whole(name, spec.shape, replica=world.rank)
            continue
        box = whole(name, spec.shape, replica=tensor.rank if spec.tensor is None else 0)
        for cut, axis in ((spec.tensor, tensor), (spec.expert, expert)):
            box = box if cut is None else box.part(*cut, axis.size, axis.rank)
        found[name] = box
    return found
