"""Muon and its kin: rules for hidden matrices and stacks of them, whose updates are made (nearly) orthogonal.

What they share: a buffer in the parameter's place, an update made of it there, an exchange that brings whole updates to
the ranks that work on them and takes back what came of it.

Muon:     Jordan et al., the Muon post; update scales of Liu et al., arXiv 2502.16982
NorMuon:  Li et al., arXiv 2510.05491
LionMuon: with SignMuon, arXiv 2605.19811
MeqMuon:  arXiv 2609.35701
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from equigrad.config.optim import Optim
from equigrad.optim.arithmetic import Arithmetic
from equigrad.optim.exchange import Exchange, Stack
from equigrad.optim.momentum import SMALLEST, Momentum
from equigrad.optim.roles import Rates
from equigrad.parallel.collectives import Axis
from equigrad.parallel.placement import Placed, Placement

_ADDED = 1e-10
"""NorMuon: to the root of a second moment, and to a norm."""


class Muon(Momentum):
    """Nesterov's momentum, or plain, made orthogonal. ``exchange.sent`` tells the bytes that were sent."""

    def __init__(
        self, config: Optim, parameters: Mapping[str, Placed], rates: Rates, arithmetic: Arithmetic, axis: Axis
    ) -> None:
        """``axis``: the ranks that have parts of these parameters. A collective."""
        super().__init__(config, parameters, rates, arithmetic)
        self.exchange = Exchange({name: placed.placement for name, placed in parameters.items()}, axis)
        self._rows: dict[str, Placed] = {}
        """A number for each row that ``_finished`` reads and replaces."""

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Placed], lr: float, update: int) -> None:
        """Update every parameter in place; ``update``: how many were made before. A collective."""
        self.exchange.run(
            lambda name: self._direction(name, gradients[name].tensor),
            self._made,
            lambda name, made: self._apply(name, made, lr, self._scale(name)),
            {name: placed.tensor for name, placed in self._rows.items()},
            self._arithmetic.matrix_dtype,
        )

    def _direction(self, name: str, gradient: Tensor) -> Tensor:
        """What is made orthogonal."""
        of, buffer, keep = self._arithmetic, self._buffers[name], self.config.momentum
        of.mix(buffer, gradient, keep, 1.0)
        return of.mixed(buffer, gradient, keep, 1.0) if self.config.nesterov else buffer.clone()

    def _made(self, x: Tensor, rows: Tensor | None) -> Stack:
        return self._finished(self._arithmetic.orthogonalize(x, self.config), rows)

    def _finished(self, x: Tensor, rows: Tensor | None) -> Stack:
        """What becomes of orthogonal matrices, and of the numbers of their rows."""
        return x, rows

    def _scale(self, name: str) -> float:
        *_, m, n = self._parameters[name].placement.shape
        return 0.2 * math.sqrt(max(m, n)) if self.config.update_scale == "rms" else math.sqrt(m / n)


class NorMuon(Muon):
    """Rows divided by the roots of their second moments, and all of it scaled back to the norm that it had."""

    def __init__(
        self, config: Optim, parameters: Mapping[str, Placed], rates: Rates, arithmetic: Arithmetic, axis: Axis
    ) -> None:
        super().__init__(config, parameters, rates, arithmetic, axis)
        self._rows = {name: _row_moment(placed, arithmetic) for name, placed in parameters.items()}

    def state(self) -> dict[str, Placed]:
        """Buffers, and second moments of rows, [..., rows], named ``row_moment.<parameter>``."""
        rows = {f"row_moment.{n}": placed.renamed(f"row_moment.{n}") for n, placed in self._rows.items()}
        return super().state() | rows

    def _finished(self, x: Tensor, rows: Tensor | None) -> Stack:
        assert rows is not None
        of, beta, x = self._arithmetic, self.config.row_beta, x.to(rows.dtype)
        squares = of.mean_square(x, 2).squeeze(2)
        moments = (rows * beta + squares * (1 - beta)).to(rows.dtype)
        divisor = of.sqrt(moments.to(squares.dtype)) + _ADDED
        # Norms over the root of the number of columns, by which they are both divided.
        before, after = (of.sqrt(of.sum_last(s)) for s in (squares, squares / (divisor * divisor)))
        added = _ADDED / math.sqrt(x.shape[2])
        return (x / divisor[..., None] * (before / (after + added))[..., None]).to(x.dtype), moments


class LionMuon(Muon):
    """Every ``period``-th step orthogonal, in between a sign, for which nothing is sent. SignMuon, where both decays
    are one."""

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Placed], lr: float, update: int) -> None:
        """Update every parameter in place; ``update``: how many were made before. A collective, but for signs."""
        if update % self.config.period == 0:
            super().step(gradients, lr, update)
            return
        for name in self._parameters:
            self._apply(name, self._lion(name, gradients[name].tensor).sign_(), lr * self.config.sign_lr)

    def _direction(self, name: str, gradient: Tensor) -> Tensor:
        return self._lion(name, gradient)


class MeqMuon(Muon):
    """Rows, or columns where these vary more, then have the root mean square 1."""

    def _direction(self, name: str, gradient: Tensor) -> Tensor:
        self._arithmetic.mix(self._buffers[name], gradient, self.config.momentum, 1.0)
        return self._buffers[name].clone()

    def _finished(self, x: Tensor, rows: Tensor | None) -> Stack:
        x = x.to(self._arithmetic.moment_dtype or torch.promote_types(x.dtype, torch.float32))
        of_rows, of_columns = (self._arithmetic.sqrt(self._arithmetic.mean_square(x, dim)) for dim in (2, 1))
        rows_vary = self._variation(of_rows.squeeze(2)) > self._variation(of_columns.squeeze(1))
        sizes = torch.where(rows_vary[:, :, None], of_rows, of_columns)
        return (x / sizes.clamp(min=SMALLEST)).to(x.dtype), rows

    def _variation(self, sizes: Tensor) -> Tensor:
        """Coefficient of variation of sizes [k, n], those of nothing left out: [k, 1]."""
        of, counted = self._arithmetic, (sizes > SMALLEST).to(sizes.dtype)
        number = counted.sum(1, keepdim=True).clamp(min=1.0)
        mean = of.sum_last(sizes * counted) / number
        off = (sizes - mean) * counted
        return of.sqrt(of.sum_last(off * off) / number) / mean.clamp(min=SMALLEST)

    def _scale(self, name: str) -> float:
        return self.config.meq_scale


def _row_moment(parameter: Placed, arithmetic: Arithmetic) -> Placed:
    """A zero for each row, where the row is; counted on the rank that has its first column."""
    at = parameter.placement
    if at.numel:
        offset, local = at.offset[:-1], at.local_shape[:-1]
        # Parts of a row have places of their own among the copies.
        columns = at.offset[-1] if at.local_shape[-1] < at.shape[-1] else 0
        replica = at.replica * at.shape[-1] + columns
    else:
        offset, local, replica = (0,) * (len(at.shape) - 1), (0,) * (len(at.shape) - 1), at.replica
    where = Placement(at.name, at.shape[:-1], offset, local, replica)
    return Placed(where, parameter.tensor.new_zeros(local, dtype=arithmetic.moment_dtype))
