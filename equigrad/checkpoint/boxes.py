"""Which rank holds which box of which tensor, and whether the boxes make up the whole.

Knows placements only: neither files nor process groups.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from math import prod
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from equigrad.parallel.placement import Placed


_MOST_CELLS = 64
"""For each box, where boxes make no grid."""


class Box(NamedTuple):
    """A box of a global tensor: the index of its first element and its extent, per dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements in the box."""
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of the box in the global tensor."""
        return tuple(slice(start, start + length) for start, length in zip(self.offset, self.shape, strict=True))


class Claim(NamedTuple):
    """What one rank says of one tensor. ``box`` is None where another rank speaks for it, or where it is empty."""

    dtype: str
    shape: tuple[int, ...]
    box: Box | None


class Whole(NamedTuple):
    """A global tensor and the rank that speaks for each of its boxes. ``dtype`` is PyTorch's name: "bfloat16"."""

    dtype: str
    shape: tuple[int, ...]
    boxes: dict[Box, int]


def claims(tensors: "Mapping[str, Placed]") -> dict[str, Claim]:
    """This rank's claims by the names of the mapping (not of the placements)."""
    found = {}
    for name, placed in tensors.items():
        place = placed.placement
        box = None if place.replica or not place.numel else Box(place.offset, place.local_shape)
        found[name] = Claim(str(placed.tensor.dtype).removeprefix("torch."), place.shape, box)
    return found


def wholes(by_rank: Sequence[Mapping[str, Claim]]) -> dict[str, Whole]:
    """All ranks' claims put together, in name order. A rank need not know every tensor (pipeline stages do not).

    A box that several ranks claim belongs to the first of them.
    Raises: ValueError if ranks contradict each other, or if boxes overlap or leave a gap.
    """
    found: dict[str, Whole] = {}
    for rank, claimed in enumerate(by_rank):
        for name, (dtype, shape, box) in claimed.items():
            whole = found.setdefault(name, Whole(dtype, shape, {}))
            if (whole.dtype, whole.shape) != (dtype, shape):
                raise ValueError(
                    f"{name} is {dtype} {list(shape)} on rank {rank}, {whole.dtype} {list(whole.shape)} on another"
                )
            if box is not None:
                whole.boxes.setdefault(box, rank)
    for name, whole in found.items():
        if not tile(whole.shape, whole.boxes):
            raise ValueError(
                f"the boxes of {name} {list(whole.shape)} overlap or leave a gap: "
                + ", ".join(f"{list(b.shape)} at {list(b.offset)} on rank {r}" for b, r in whole.boxes.items())
            )
    return dict(sorted(found.items()))


def tile(shape: Sequence[int], boxes: Iterable[Box]) -> bool:
    """Whether the boxes hold every element of the tensor exactly once. None of them may be empty.

    All borders of boxes cut the tensor into cells, about as many as there are boxes where these come from a layout.
    """
    boxes = list(boxes)
    if any(len(box.offset) != len(shape) or len(box.shape) != len(shape) for box in boxes):
        return False
    inside = (zip(box.offset, box.shape, shape, strict=True) for box in boxes)
    if not all(start >= 0 and length > 0 and start + length <= size for box in inside for start, length, size in box):
        return False
    if sum(box.numel for box in boxes) != prod(shape):
        return False
    if not boxes:
        return True
    pairs = [{(box.offset[dim], box.offset[dim] + box.shape[dim]) for box in boxes} for dim in range(len(shape))]
    if prod(map(len, pairs)) == len(boxes) == len(set(boxes)) and all(map(_tile_line, pairs, shape)):
        return True  # a grid, as layouts make them
    cells = [{border: at for at, border in enumerate(sorted({b for pair in own for b in pair}))} for own in pairs]
    if prod(max(len(own) - 1, 1) for own in cells) > _MOST_CELLS * len(boxes):
        return False  # no layout cuts so; and nobody is to be kept busy by a manifest
    seen: set[tuple[int, ...]] = set()
    for box in boxes:
        ranges = (
            range(cells[dim][start], cells[dim][start + length])
            for dim, (start, length) in enumerate(zip(box.offset, box.shape, strict=True))
        )
        for cell in product(*ranges):
            if cell in seen:
                return False
            seen.add(cell)
    return True  # none twice, and as many elements as there are


def _tile_line(ranges: set[tuple[int, int]], size: int) -> bool:
    """Whether ranges, each from start up to stop, hold every number below ``size`` once."""
    borders = [0, *(border for pair in sorted(ranges) for border in pair), size]
    return all(a == b for a, b in zip(borders[::2], borders[1::2], strict=True))
