"""One global state in many layouts: what the tests of this room save, load and digest on 1 or 2 ranks."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from equigrad.parallel.placement import Placed, Placement, place, place_all

LAYOUTS = ["plain", "rows", "fsdp", "hsdp", "columns"]
SHARDED = ["w", "b", "v", "large"]
"""The float32 tensors, which FSDP2 holds in the layouts "fsdp" and "hsdp"."""


def values() -> dict[str, Tensor]:
    """Uneven, tiny, empty, scalar and several-leaves tensors of several types, with signed zeros, nan and inf."""
    make = torch.Generator().manual_seed(7)
    state = {
        "w": torch.randn(5, 3, generator=make),
        "b": torch.randn(1, generator=make),
        "v": torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-45, 1.0]),
        "large": torch.randn(601, 1000, generator=make),
        "half": torch.randn(6, 4, generator=make).bfloat16(),
        "double": torch.randn(3, 2, 5, generator=make, dtype=torch.float64),
        "count": torch.arange(-2, 2),
        "mask": torch.tensor([[True, False, True]]),
        "scale": torch.tensor(0.1),
        "step": torch.tensor(2**40 + 1),
        "nothing": torch.empty(0, 3),
    }
    return {f"model.{name}": tensor for name, tensor in state.items()}


def layout(kind: str, state: dict[str, Tensor]) -> dict[str, Placed]:
    """This rank's part of ``state``."""
    if kind == "plain":
        return place_all(state.items())
    if kind == "columns":
        return {name: _column_box(name, tensor) for name, tensor in state.items()}
    names = [f"model.{name}" for name in SHARDED] if kind != "rows" else []
    rows = {
        name: place(name, distribute_tensor(tensor, mesh("rows"), [Shard(0) if tensor.dim() else Replicate()]))
        for name, tensor in state.items()
        if name not in names
    }
    if not names:
        return rows
    module = nn.Module()
    for name in SHARDED:
        module.register_parameter(name, nn.Parameter(state[f"model.{name}"].clone()))
    module = fully_shard(module, mesh=mesh(kind))
    return rows | place_all((f"model.{name}", parameter) for name, parameter in module.named_parameters())


def mesh(kind: str) -> DeviceMesh:
    if kind == "hsdp":
        return init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))


def _column_box(name: str, tensor: Tensor) -> Placed:
    """A split of the last dimension, a third to rank 0, as tensor parallelism would; scalars on the last rank."""
    rank, shape = dist.get_rank(), tuple(tensor.shape)
    if not shape:
        return Placed(Placement(name, (), (), (), replica=1 - rank), tensor.clone())
    cut = shape[-1] // 3
    start, end = [(0, cut), (cut, shape[-1])][rank]
    local = tensor[..., start:end]
    return Placed(Placement(name, shape, (*(0 for _ in shape[1:]), start), tuple(local.shape)), local)


def zeros() -> dict[str, Tensor]:
    """The same names, shapes and types, with other values."""
    return {name: torch.zeros_like(tensor) for name, tensor in values().items()}


def same_bits(placed: dict[str, Placed]) -> bool:
    """Whether the local tensors are, bit for bit, their boxes of ``values()``."""
    whole = values()
    assert placed.keys() == whole.keys()
    for name, part in placed.items():
        place = part.placement
        box = tuple(slice(at, at + length) for at, length in zip(place.offset, place.local_shape, strict=True))
        ours, theirs = part.tensor.contiguous(), whole[name][box].contiguous()
        if not torch.equal(ours.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8)):
            return False
    return True
