"""Where a rank's local tensor lies within the global tensor of that name.

Checkpoints, digests, norms and exports read this and nothing else: none guesses from local shapes.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from equigrad.parallel.partition import part_of


@dataclass(frozen=True)
class Placement:
    """One box of a global tensor.

    name:        of the parameter (or state) in the whole model
    shape:       global shape
    offset:      global index of the box's first element, per dimension
    local_shape: extent of the box; any of them may be 0
    replica:     0 on the one rank that counts, hashes and saves this box; 1, 2, ... on ranks that hold a copy

    Example: row-sharded over 2 ranks, the [5, 3] weight ``w`` is on rank 1
    ``Placement("w", (5, 3), (3, 0), (2, 3), 0)``.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    local_shape: tuple[int, ...]
    replica: int = 0

    @property
    def numel(self) -> int:
        """Elements in the local box."""
        return math.prod(self.local_shape)

    def part(self, dim: int, units: int, ranks: int, rank: int) -> "Placement":
        """The box of ``rank`` where ``dim``, whole until now and of ``units`` equal units, is divided as evenly as they
        go."""
        start, stop = part_of(units, ranks, rank)
        unit, offset, local = self.shape[dim] // units, list(self.offset), list(self.local_shape)
        offset[dim], local[dim] = start * unit, (stop - start) * unit
        return replace(self, offset=tuple(offset), local_shape=tuple(local))


@dataclass(frozen=True)
class Placed:
    """A local tensor together with its place. ``tensor.shape == placement.local_shape`` always."""

    placement: Placement
    tensor: Tensor

    def __post_init__(self) -> None:
        if tuple(self.tensor.shape) != self.placement.local_shape:
            raise ValueError(f"{self.placement} does not describe a local tensor of shape {tuple(self.tensor.shape)}")

    def renamed(self, name: str) -> "Placed":
        """The same tensor in the same place, under another name."""
        return Placed(replace(self.placement, name=name), self.tensor)


def whole(name: str, shape: Sequence[int], replica: int = 0) -> Placement:
    """All of a tensor."""
    return Placement(name, tuple(shape), (0,) * len(shape), tuple(shape), replica)


def place(name: str, tensor: Tensor, within: Placement | None = None) -> Placed:
    """The local part of a plain or distributed tensor.

    within: the box that ``tensor`` as a whole is of the tensor ``name``; None: all of it
    A plain tensor is taken to be the same on every rank, rank 0's value.
    """
    within = within or whole(name, tensor.shape)
    if not hasattr(tensor, "device_mesh"):  # only a DTensor has one; importing its module takes most of a second
        return Placed(within, tensor.detach())
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(tensor, DTensor)
    local = local_part(tensor)
    shape, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    offset = tuple(a + b for a, b in zip(within.offset, start, strict=True))
    if 0 in shape:
        offset = (0,) * len(shape)
    replica = within.replica
    coordinate = tensor.device_mesh.get_coordinate() or ()
    for index, size, kind in zip(coordinate, tensor.device_mesh.shape, tensor.placements, strict=True):
        if kind.is_replicate():
            replica = replica * size + index
    return Placed(Placement(name, within.shape, offset, tuple(shape), replica), local)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a plain or distributed tensor, detached."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


def place_all(named: Iterable[tuple[str, Tensor]]) -> dict[str, Placed]:
    """``place`` for every named tensor, in name order."""
    return {name: place(name, tensor) for name, tensor in sorted(named)}
