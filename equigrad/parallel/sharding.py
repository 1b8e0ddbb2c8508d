"""Data parallelism by FSDP2: parameters, gradients and optimizer state sharded over dp_shard, copied over dp_replicate.
Context ranks see different tokens too, so parameters are sharded over them as well. Experts that are divided over ep
are sharded over the ranks that have the same ones: dp_shard x cp / ep.

Gradients are sums over ranks, never means: the loss is already divided by the count of the whole step.
"""

import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from equigrad.parallel.collectives import Axis
from equigrad.parallel.world import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule


def shard(model: nn.Module, blocks: Iterable[nn.Module], world: World, experts: Collection[nn.Parameter]) -> None:
    """Shard ``model`` in place, each block a unit of its own. Nothing happens where no data is divided.

    ``experts``: the parameters with an expert in each index of their first dimension.
    """
    mesh = data_mesh(world)
    if mesh is None:
        return
    from torch.distributed.fsdp import fully_shard

    # A fork of the residual stream; nobody changes it in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    where = _expert_placement(world, set(experts)) if experts else None
    # FSDP2 cannot reduce what has no elements, as where a tensor rank has no head.
    empty = {parameter for parameter in model.parameters() if not parameter.numel()}
    for module in (*blocks, model):
        reshard = world.layout.reshard_after_forward and module is not model
        sharded: FSDPModule = fully_shard(
            module, mesh=mesh, reshard_after_forward=reshard, shard_placement_fn=where, ignored_params=empty
        )
        sharded.set_gradient_divide_factor(1.0)
        # gloo knows no pre-multiplied sum; NCCL sums too, so that both add the same numbers
        sharded.set_force_sum_reduction_for_comms(True)


def _expert_placement(world: World, experts: set[nn.Parameter]) -> Callable[[nn.Parameter], Any]:
    """How FSDP2 shards each parameter: None: as it does by itself; experts on their mesh, and none left without."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo, ShardPlacementResult
    from torch.distributed.tensor import Shard

    info = None
    if world.expert_mesh is not None:
        info = HSDPMeshInfo(world.expert_mesh["dp_replicate", "expert_fsdp"], shard_mesh_dim=1, replicate_mesh_dim=0)
    layout = world.layout
    ranks = layout.dp_shard * layout.cp // layout.ep

    def where(parameter: nn.Parameter) -> Any:
        if parameter not in experts:
            return None
        # Few experts on many ranks would leave some with none; then each rank has a part of every expert.
        number, rows = parameter.shape[:2]
        dim = Shard(1 if number % ranks and rows % ranks == 0 else 0)
        return dim if info is None else ShardPlacementResult(dim, info)

    return where


def data_mesh(world: World) -> "DeviceMesh | None":
    """The ranks that share parameters and see different tokens: (dp_replicate, dp_shard x cp)."""
    layout = world.layout
    if world.mesh is None or layout.data_lanes * layout.cp == 1:
        return None
    return world.mesh["dp_replicate", "fsdp"]


@torch.no_grad()
def add_up(gradients: Sequence[Tensor], axis: Axis) -> None:
    """Sum gradients over an axis, in place: each rank has seen a part of what the parameter was used for."""
    if axis.group is None or not gradients:
        return
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat, group=axis.group)
    for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))


@torch.no_grad()
def add_ends(gradient: Tensor, axis: Axis) -> None:
    """Sum a gradient over the first and the last rank of an axis, in place and in this order: both use the parameter.
    The ranks in between have nothing to do with it, and do not call this."""
    if axis.group is None:
        return
    other = axis.size - 1 if axis.rank == 0 else 0
    theirs = torch.empty_like(gradient)
    sent = gradient.contiguous()
    transfers = [
        dist.P2POp(dist.isend, sent, group=axis.group, group_peer=other),
        dist.P2POp(dist.irecv, theirs, group=axis.group, group_peer=other),
    ]
    for work in dist.batch_isend_irecv(transfers):
        work.wait()
    gradient.copy_(sent + theirs if axis.rank == 0 else theirs + sent)


def reduce_gradients(model: nn.Module, now: bool) -> None:
    """Whether the next backward pass reduces gradients over ranks, or adds to the local ones."""
    set_sync = getattr(model, "set_requires_gradient_sync", None)  # absent where nothing is sharded
    if set_sync is not None:
        set_sync(now)
