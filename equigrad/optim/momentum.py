"""Rules with one buffer per parameter. Each is a few lines over ``Arithmetic``, which says how they are computed.

Lion:      the sign of a mixture of gradient and buffer (Chen et al., arXiv 2302.06675); nothing is sent
Equalized: MeqMuon's rule for what is no hidden matrix (arXiv 2609.35701)
"""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from equigrad.config.optim import Optim
from equigrad.numerics.exact.elementary import quotient
from equigrad.optim.arithmetic import Arithmetic, Sums, pieces
from equigrad.optim.division import Division
from equigrad.optim.roles import Rates
from equigrad.parallel.collectives import Axis
from equigrad.parallel.placement import Placed, Placement

SMALLEST = 1e-7
"""A root mean square below this counts as this where something is divided by it."""


class Momentum:
    """What these rules have in common: the buffers, each in its parameter's place."""

    def __init__(self, config: Optim, parameters: Mapping[str, Placed], rates: Rates, arithmetic: Arithmetic) -> None:
        self.config, self._parameters, self._rates, self._arithmetic = config, parameters, rates, arithmetic
        dtype = arithmetic.moment_dtype
        self._buffers = {n: torch.zeros_like(p.tensor, dtype=dtype) for n, p in parameters.items()}

    def state(self) -> dict[str, Placed]:
        """The buffers, named ``momentum.<parameter>``, to save or to load into."""
        placed = {n: Placed(p.placement, self._buffers[n]) for n, p in self._parameters.items()}
        return {f"momentum.{n}": p.renamed(f"momentum.{n}") for n, p in placed.items()}

    def _lion(self, name: str, gradient: Tensor) -> Tensor:
        """b1 m + (1 - b1) g, and then m <- b2 m + (1 - b2) g."""
        (now, kept), buffer = self.config.sign_betas, self._buffers[name]
        update = self._arithmetic.mixed(buffer, gradient, now, 1 - now)
        self._arithmetic.mix(buffer, gradient, kept, 1 - kept)
        return update

    def _apply(self, name: str, update: Tensor, lr: float, scale: float = 1.0) -> None:
        rate, decay = self._rates(name, lr)
        self._arithmetic.apply(self._parameters[name].tensor, update, 1 - rate * decay, rate * scale)


class Lion(Momentum):
    """W <- (1 - eta lambda) W - eta sign(b1 m + (1 - b1) g); m <- b2 m + (1 - b2) g."""

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Placed], lr: float, update: int) -> None:
        """Update every parameter in place; ``update``: how many were made before."""
        for name in self._parameters:
            self._apply(name, self._lion(name, gradients[name].tensor).sign_(), lr)


class Equalized(Momentum):
    """B <- mu B + G; the embedding and the head: rows of B, then columns, divided by their root mean square; vectors: B
    divided by its own. Kernels of convolutions are as vectors, one for each channel."""

    def __init__(
        self, config: Optim, parameters: Mapping[str, Placed], rates: Rates, arithmetic: Arithmetic, axis: Axis
    ) -> None:
        """``axis``: the ranks that have parts of these parameters. A collective."""
        super().__init__(config, parameters, rates, arithmetic)
        self._places = _first_copies({n: p.placement for n, p in parameters.items()}, axis)

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Placed], lr: float, update: int) -> None:
        """Update every parameter in place; a collective, two sums over ranks."""
        updates = {}
        for name, buffer in self._buffers.items():
            self._arithmetic.mix(buffer, gradients[name].tensor, self.config.momentum, 1.0)
            updates[name] = buffer.clone()
        self._divide(updates, {name: tuple(range(min(x.ndim - 1, 1), x.ndim)) for name, x in updates.items()})
        self._divide(updates, {name: (0,) for name in updates if self._rates.specs[name].role in ("embedding", "head")})
        for name, made in updates.items():
            self._apply(name, made, lr, self.config.meq_scale)

    def _divide(self, updates: Mapping[str, Tensor], dims: Mapping[str, tuple[int, ...]]) -> None:
        """In place, by the root mean square over some dimensions of the whole tensor."""
        of = [Sums(Placed(self._places[n], updates[n]), over) for n, over in dims.items()]
        for (name, over), total in zip(dims.items(), self._arithmetic.square_sums(of), strict=True):
            count = math.prod(self._parameters[name].placement.shape[dim] for dim in over)
            size = self._arithmetic.sqrt(quotient(total, count)).clamp(min=SMALLEST)
            for x, divisor in pieces(updates[name], size.expand_as(updates[name])):
                x.copy_(x / divisor)


def _first_copies(places: Mapping[str, Placement], axis: Axis) -> dict[str, Placement]:
    """This rank's places, 0 the number of a copy where no earlier rank of the axis has the same: at the end of a
    pipeline the embedding is a copy on every rank, and its sums are to be counted there, too."""
    before = Division.among(axis, places).copies_before(axis.rank)
    return {name: replace(at, replica=before[name]) for name, at in places.items()}
