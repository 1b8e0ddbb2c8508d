"""Muon and its kin: rules for hidden matrices and stacks of them, whose updates are made (nearly) orthogonal.

What they share: a buffer in the parameter's place, an update made of it there, an exchange that brings whole updates to
the ranks that work on them and takes back what came of it.

muon:               Jordan et al., the Muon post; update scales of Liu et al., arXiv 2502.16982
normuon:            rows then divided by the root of their second moment (Li et al., arXiv 2510.05491)
lionmuon, signmuon: orthogonalised every ``period``-th step only, in between a sign (arXiv 2605.19811)
meqmuon:            rows or columns then brought to one size, whichever vary more (arXiv 2609.35701)
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
    """``exchange.sent`` tells the bytes that were sent."""

    def __init__(
        self, config: Optim, parameters: Mapping[str, Placed], rates: Rates, arithmetic: Arithmetic, axis: Axis
    ) -> None:
        """``axis``: the ranks that have parts of these parameters. A collective."""
        super().__init__(config, parameters, rates, arithmetic)
        self.exchange = Exchange({name: placed.placement for name, placed in parameters.items()}, axis)
        self._rows: dict[str, Placed] = {}
        if config.name == "normuon":
            self._rows = {name: _rows(placed, arithmetic) for name, placed in parameters.items()}

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Placed], lr: float, update: int) -> None:
        """Update every parameter in place; ``update``: how many were made before. A collective, but for signs."""
        config, updates = self.config, {n: self._direction(n, gradients[n].tensor) for n in self._parameters}
        if config.name in ("lionmuon", "signmuon") and update % config.period:
            for name, direction in updates.items():
                self._apply(name, direction.sign_(), lr * config.sign_lr)
            return
        rows = {name: placed.tensor for name, placed in self._rows.items()} or None
        self.exchange.run(updates, rows, self._made)
        for name, made in updates.items():
            self._apply(name, made, lr, self._scale(name))

    def state(self) -> dict[str, Placed]:
        """Buffers, and NorMuon's second moments, [..., rows], named ``row_moment.<parameter>``."""
        rows = {f"row_moment.{n}": placed.renamed(f"row_moment.{n}") for n, placed in self._rows.items()}
        return super().state() | rows

    def _direction(self, name: str, gradient: Tensor) -> Tensor:
        """What is made orthogonal, or what the sign is of."""
        config, of, buffer = self.config, self._arithmetic, self._buffers[name]
        if config.name in ("lionmuon", "signmuon"):
            return self._lion(gradient, name)
        of.mix(buffer, gradient, config.momentum, 1.0)
        if config.nesterov and config.name != "meqmuon":
            return of.mixed(buffer, gradient, config.momentum, 1.0)
        return buffer.clone()

    def _scale(self, name: str) -> float:
        """Of an update, which is orthogonal (MeqMuon: whose entries have the root mean square 1)."""
        *_, m, n = self._parameters[name].placement.shape
        if self.config.name == "meqmuon":
            return self.config.meq_scale
        return 0.2 * math.sqrt(max(m, n)) if self.config.update_scale == "rms" else math.sqrt(m / n)

    def _made(self, x: Tensor, rows: Tensor | None) -> Stack:
        made = self._arithmetic.orthogonal(x, self.config)
        if rows is not None:
            return self._with_even_rows(made, rows)
        return self._equalized(made) if self.config.name == "meqmuon" else made, None

    def _with_even_rows(self, x: Tensor, moments: Tensor) -> Stack:
        """NorMuon: of the size that they had together."""
        of, beta = self._arithmetic, self.config.row_beta
        squares = of.mean_square(x, 2).squeeze(2)
        moments = (moments * beta + squares * (1 - beta)).to(moments.dtype)
        divisor = of.sqrt(moments.to(squares.dtype)) + _ADDED
        # Norms over the root of the number of columns, by which they are both divided.
        before, after = (of.sqrt(of.sum_last(s)) for s in (squares, squares / (divisor * divisor)))
        added = _ADDED / math.sqrt(x.shape[2])
        return (x / divisor[..., None] * (before / (after + added))[..., None]).to(x.dtype), moments

    def _equalized(self, x: Tensor) -> Tensor:
        """MeqMuon: rows, or columns where these vary more, of root mean square 1."""
        by_row, by_column = (self._arithmetic.sqrt(self._arithmetic.mean_square(x, dim)) for dim in (2, 1))
        rows_vary = self._variation(by_row.squeeze(2)) > self._variation(by_column.squeeze(1))
        rows, columns = (x / size.clamp(min=SMALLEST) for size in (by_row, by_column))
        return torch.where(rows_vary[:, :, None], rows, columns).to(x.dtype)

    def _variation(self, sizes: Tensor) -> Tensor:
        """Coefficient of variation of sizes [k, n], those of nothing left out: [k, 1]."""
        of, counted = self._arithmetic, (sizes > SMALLEST).to(sizes.dtype)
        number = counted.sum(1, keepdim=True).clamp(min=1.0)
        mean = of.sum_last(sizes * counted) / number
        off = (sizes - mean) * counted
        return of.sqrt(of.sum_last(off * off) / number) / mean.clamp(min=SMALLEST)


def _rows(parameter: Placed, arithmetic: Arithmetic) -> Placed:
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
