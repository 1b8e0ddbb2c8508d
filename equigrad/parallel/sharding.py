"""Data parallelism by FSDP2: parameters, gradients and optimizer state sharded over dp_shard, copied over dp_replicate.

Gradients are sums over ranks, never means: the loss is already divided by the count of the whole step.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import nn

from equigrad.parallel.world import World

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def shard(model: nn.Module, blocks: Iterable[nn.Module], world: World) -> None:
    """Shard ``model`` in place, each block a unit of its own. Nothing happens with one process."""
    if world.mesh is None:
        return
    from torch.distributed.fsdp import fully_shard

    for module in (*blocks, model):
        reshard = world.layout.reshard_after_forward and module is not model
        sharded: FSDPModule = fully_shard(module, mesh=world.mesh, reshard_after_forward=reshard)
        sharded.set_gradient_divide_factor(1.0)
        # gloo knows no pre-multiplied sum; NCCL sums too, so that both add the same numbers
        sharded.set_force_sum_reduction_for_comms(True)


def reduce_gradients(model: nn.Module, now: bool) -> None:
    """Whether the next backward pass reduces gradients over ranks, or adds to the local ones."""
    set_sync = getattr(model, "set_requires_gradient_sync", None)  # absent where nothing is sharded
    if set_sync is not None:
        set_sync(now)
