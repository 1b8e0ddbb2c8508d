"""What optimizers compute with, in native numerics. ``exact.Exact`` has the same for exact numerics.

Tensors are local parts, or stacks of whole matrices; nothing here knows ranks, but for sums that are handed in.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from equigrad.config.optim import Optim
from equigrad.numerics.budget import PIECE_ENTRIES
from equigrad.optim.adamw import AdamW
from equigrad.optim.newton_schulz import newton_schulz
from equigrad.parallel.placement import Placed

OverRanks: TypeAlias = Callable[[Tensor], Tensor]
"""Of a tensor of each rank, element by element and in place, what all of them then have."""


@dataclass(frozen=True)
class Sums:
    """What is summed: a placed tensor, over some of its dimensions, which are kept."""

    placed: Placed
    dims: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the sums of the whole tensor."""
        return tuple(1 if dim in self.dims else size for dim, size in enumerate(self.placed.placement.shape))

    @property
    def kept(self) -> tuple[slice, ...]:
        """This rank's part of the sums."""
        at = self.placed.placement
        box = enumerate(zip(at.offset, at.local_shape, strict=True))
        return tuple(slice(0, 1) if dim in self.dims else slice(a, a + size) for dim, (a, size) in box)


class Arithmetic(Protocol):
    """How the operations of an optimizer are computed."""

    moment_dtype: torch.dtype | None
    """Of buffers; None: that of the parameter."""
    matrix_dtype: torch.dtype | None
    """Of matrices that are made orthogonal, and travel for that; None: that of buffers."""
    adamw: type[AdamW]
    """The rule of that name."""

    def mix(self, moment: Tensor, gradient: Tensor, keep: float, add: float) -> None:
        """moment <- keep moment + add gradient."""

    def mixed(self, moment: Tensor, gradient: Tensor, keep: float, add: float) -> Tensor:
        """keep moment + add gradient, of the moment's type."""

    def apply(self, parameter: Tensor, update: Tensor, decay: float, rate: float) -> None:
        """parameter <- decay parameter - rate update."""

    def orthogonalize(self, x: Tensor, config: Optim) -> Tensor:
        """x [k, m, n] -> nearly the nearest (semi-)orthogonal matrices."""

    def mean_square(self, x: Tensor, dim: int) -> Tensor:
        """Of x [k, m, n] over a dimension, which is kept."""

    def sum_last(self, x: Tensor) -> Tensor:
        """Over the last dimension, which is kept."""

    def sqrt(self, x: Tensor) -> Tensor:
        """Of what is not negative."""

    def square_sums(self, of: Sequence[Sums]) -> list[Tensor]:
        """Sums of squares of whole tensors of which each rank has a part; a collective.

        Returns for each the sums that this rank's part needs, float64, which its tensor can be divided by.
        """


class Native:
    """PyTorch's own operations.

    add:          adds up over the ranks that have parts of the same parameters, element by element and in place
    matrix_dtype: of matrices that are made orthogonal; None: that of buffers
    """

    moment_dtype: torch.dtype | None = None
    adamw: type[AdamW] = AdamW

    def __init__(self, add: OverRanks, matrix_dtype: torch.dtype | None = None) -> None:
        self._add, self.matrix_dtype = add, matrix_dtype

    def mix(self, moment: Tensor, gradient: Tensor, keep: float, add: float) -> None:
        moment.mul_(keep).add_(gradient, alpha=add)

    def mixed(self, moment: Tensor, gradient: Tensor, keep: float, add: float) -> Tensor:
        return (moment * keep).add_(gradient, alpha=add)

    def apply(self, parameter: Tensor, update: Tensor, decay: float, rate: float) -> None:
        parameter.mul_(decay).add_(update, alpha=-rate)

    def orthogonalize(self, x: Tensor, config: Optim) -> Tensor:
        return newton_schulz(x, config)

    def mean_square(self, x: Tensor, dim: int) -> Tensor:
        return x.square().mean(dim, keepdim=True)

    def sum_last(self, x: Tensor) -> Tensor:
        return x.sum(-1, keepdim=True)

    def sqrt(self, x: Tensor) -> Tensor:
        return x.sqrt()

    def square_sums(self, of: Sequence[Sums]) -> list[Tensor]:
        return sums_over_ranks(of, lambda i: of[i].placed.tensor.to(torch.float64, copy=True).square_(), self._add)


def sums_over_ranks(of: Sequence[Sums], terms: Callable[[int], Tensor], add: OverRanks) -> list[Tensor]:
    """The sums of ``terms``, float64 and of the shape of the tensor of that number; those of one at a time."""
    if not of:
        return []
    wholes = []
    for number, sums in enumerate(of):
        at = sums.placed.placement
        whole = sums.placed.tensor.new_zeros(sums.shape, dtype=torch.float64)
        if at.replica == 0 and at.numel:
            whole[sums.kept] = terms(number).sum(sums.dims, keepdim=True)
        wholes.append(whole)
    flat = add(torch.cat([whole.reshape(-1) for whole in wholes]))
    parts = flat.split([whole.numel() for whole in wholes])
    return [part.view_as(whole)[sums.kept] for part, whole, sums in zip(parts, wholes, of, strict=True)]


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of the same entries of tensors of one shape, in rows; of what is in no row, all at once."""
    if not tensors[0].numel():
        return iter(())
    rows = max(1, PIECE_ENTRIES // max(1, tensors[0][0].numel())) if tensors[0].ndim else 1
    return zip(*(x.split(rows) if x.ndim else (x,) for x in tensors), strict=True)
