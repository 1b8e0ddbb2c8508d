"""Which rank holds which box of which tensor, and whether the boxes make up the whole.

Knows placements only: neither files nor process groups.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

from equigrad.parallel.placement import Placed


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


def claims(tensors: Mapping[str, Placed]) -> dict[str, Claim]:
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
        if not _tile(whole.shape, whole.boxes):
            raise ValueError(
                f"the boxes of {name} {list(whole.shape)} overlap or leave a gap: "
                + ", ".join(f"{list(b.shape)} at {list(b.offset)} on rank {r}" for b, r in whole.boxes.items())
            )
    return dict(sorted(found.items()))


def _tile(shape: Sequence[int], boxes: Mapping[Box, int]) -> bool:
    """Whether the boxes hold every element of the tensor exactly once.

    Let the element (i, j, ...) stand for the monomial x^i y^j ...: the elements of [a, b) x [c, d) then add up to
    (x^b - x^a) (y^d - y^c) / (x - 1) (y - 1), and boxes tile the tensor exactly if their polynomials add up to its
    own. Polynomials of such degree that differ also differ at any one point modulo a large prime, but for a chance of
    1e-12 (Schwartz-Zippel). So the check is linear in the boxes, where comparing them pairwise is quadratic.
    """
    prime = 2**61 - 1
    points = [pow(0x9E3779B97F4A7C15, dim + 1, prime) for dim in range(len(shape))]

    def polynomial(box: Box) -> int:
        return prod(
            pow(x, start + length, prime) - pow(x, start, prime)
            for x, start, length in zip(points, box.offset, box.shape, strict=True)
        )

    whole = Box((0,) * len(shape), tuple(shape))
    return (sum(map(polynomial, boxes)) - polynomial(whole)) % prime == 0
