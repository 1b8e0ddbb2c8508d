"""From a resolved job to a model that is ready to compute: op set, activation policy, compilation, sharding."""

import torch

from equigrad.config import Job
from equigrad.config.model import Model
from equigrad.memory import recompute
from equigrad.models.decoder import Decoder
from equigrad.models.specs import parameter_specs
from equigrad.numerics.native import NativeOps
from equigrad.numerics.ops import COMPUTE_DTYPES
from equigrad.parallel.placement import Placement, part, whole
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
        for block in blocks:
            block.forward = torch.compile(block.forward, dynamic=True)  # type: ignore[method-assign]
    recompute.apply(job.memory, blocks)
    shard(model, blocks, world)
    return model.to_empty(device=world.device) if sharded else model


def places(model: Model, world: World) -> dict[str, Placement]:
    """The box of each parameter that this rank works with, before it is sharded over the data ranks."""
    tensor, found = world.axis("tp"), {}
    for name, spec in parameter_specs(model).items():
        if spec.tensor is None:
            found[name] = whole(name, spec.shape, replica=tensor.rank)
        else:
            found[name] = part(name, spec.shape, *spec.tensor, tensor.size, tensor.rank)
    return found
