"""The end of a step in exact numerics: gradient norm, AdamW and what other rules are made of, the same bits however
tensors are sharded."""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from equigrad.config.optim import Optim
from equigrad.numerics.exact.elementary import exponent, power_of_two, quotient, sqrt
from equigrad.numerics.exact.fused import fused
from equigrad.numerics.exact.grids import fixed, largest, operand_bits, relative, sum_last, term_bits
from equigrad.numerics.exact.scalar import power
from equigrad.optim.adamw import MOMENTS, AdamW
from equigrad.optim.arithmetic import OverRanks, Sums, pieces, sums_over_ranks
from equigrad.optim.newton_schulz import SMALLEST_NORM, polynomials
from equigrad.parallel.placement import Placed


@torch.no_grad()
def exact_norm(
    gradients: Mapping[str, Placed],
    shapes: Mapping[str, Sequence[int]],
    over_ranks: Callable[[Tensor], None],
    add: Callable[[Tensor], Tensor],
    device: torch.device,
) -> float:
    """The global norm of the gradients of all parameters.

    The squares of a tensor's entries, over its largest entry's power of two, are each split into a part on a coarse
    grid and what remains, on a fine one. Both add up exactly; then tensors are added by a sum that is rounded once.

    shapes:     of all trained parameters of the whole model
    over_ranks: replaces each entry by the largest one on all ranks
    add:        sums over all ranks
    """
    names = sorted(shapes)
    counted = {n: g.tensor for n, g in gradients.items() if g.placement.replica == 0 and g.placement.numel}
    tops = torch.zeros(len(names), dtype=torch.float64, device=device)
    squares = torch.zeros(2, len(names), dtype=torch.float64, device=device)
    for number, name in enumerate(names):
        if name in counted:
            tops[number] = counted[name].abs().max()
    over_ranks(tops)
    limits = exponent(tops)
    for number, name in enumerate(names):
        if name in counted:
            bits = term_bits(math.prod(shapes[name]))
            for (piece,) in pieces(counted[name]):
                for total, part in zip(squares[:, number], _squares(piece, limits[number], bits), strict=True):
                    total += part  # exact, as all of these sums are
    # As squares of numbers below 1, exact; and only then of the size that they are.
    (coarse, fine), sizes = add(squares).tolist(), power_of_two(limits).tolist()
    terms = [s * size * size for sums in (coarse, fine) for s, size in zip(sums, sizes, strict=True)]
    return math.sqrt(math.fsum(terms))


@fused
def _squares(x: Tensor, limit: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    units = x * power_of_two(-limit)
    squares = units * units
    coarse = fixed(squares, bits)
    # At most half a unit of the coarse grid: as many bits again.
    fine = fixed(squares - coarse, 2 * bits)
    return coarse.sum(), fine.sum()


@fused
def _adamw(
    parameter: Tensor, gradient: Tensor, first: Tensor, second: Tensor,
    beta1: float, beta2: float, rate: float, decay: float, root: Tensor, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``root``: a tensor, for what is divided by it (``elementary.quotient``)."""
    m = first.double() * beta1 + gradient * (1 - beta1)
    v = second.double() * beta2 + (gradient * gradient) * (1 - beta2)
    m, v = m.float(), v.float()
    step = m.double() / (sqrt(v.double()) / root + eps)
    return parameter * decay - step * rate, m, v


class ExactAdamW(AdamW):
    """AdamW made of elementwise IEEE operations in one order. Parameters are float64, moments float32."""

    moment_dtype = torch.float32

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Placed], lr: float, update: int) -> None:
        """Update every parameter in place from its gradient; ``update``: how many were made before."""
        (beta1, beta2), eps = self.config.betas, self.config.eps
        corrected = 1 - power(beta1, update + 1)
        root = math.sqrt(1 - power(beta2, update + 1))
        for name, placed in self._parameters.items():
            if not placed.placement.numel:
                continue
            rate, decay = self._rates(name, lr)
            first, second = (self._moments[moment][name] for moment in MOMENTS)
            keep, divisor = 1 - rate * decay, placed.tensor.new_full((), root)
            for parameter, gradient, m, v in pieces(placed.tensor, gradients[name].tensor, first, second):
                new = _adamw(parameter, gradient, m, v, beta1, beta2, rate / corrected, keep, divisor, eps)
                for kept, value in zip((parameter, m, v), new, strict=True):
                    kept.copy_(value)


@fused
def _mixed(moment: Tensor, gradient: Tensor, keep: float, add: float) -> Tensor:
    return (moment.double() * keep + gradient * add).to(moment.dtype)


@fused
def _applied(parameter: Tensor, update: Tensor, decay: float, rate: float) -> Tensor:
    return parameter * decay - update.double() * rate


class Exact:
    """``Arithmetic`` of IEEE operations in one order, and of sums without one. Parameters and gradients are float64,
    buffers and updates float32.

    add, largest: over the ranks that have parts of the same parameters, element by element and in place
    """

    moment_dtype: torch.dtype | None = torch.float32
    matrix_dtype: torch.dtype | None = None
    adamw: type[AdamW] = ExactAdamW

    def __init__(self, add: OverRanks, largest: OverRanks) -> None:
        self._add, self._largest = add, largest

    def mix(self, moment: Tensor, gradient: Tensor, keep: float, add: float) -> None:
        self._mix_into(moment, moment, gradient, keep, add)

    def mixed(self, moment: Tensor, gradient: Tensor, keep: float, add: float) -> Tensor:
        made = torch.empty_like(moment)
        self._mix_into(made, moment, gradient, keep, add)
        return made

    @staticmethod
    def _mix_into(made: Tensor, moment: Tensor, gradient: Tensor, keep: float, add: float) -> None:
        for to, m, g in pieces(made, moment, gradient):
            to.copy_(_mixed(m, g, keep, add))

    def apply(self, parameter: Tensor, update: Tensor, decay: float, rate: float) -> None:
        for kept, made in pieces(parameter, update):
            kept.copy_(_applied(kept, made, decay, rate))

    def orthogonalize(self, x: Tensor, config: Optim) -> Tensor:
        """Products of operands on grids: of X and X^T, the contraction is as long as a row; of the others, as long as
        the smaller side."""
        applied, larger = polynomials(config)
        tall, y = x.shape[1] > x.shape[2], x.double()
        y = y.mT.contiguous() if tall else y
        size = sqrt(self.sum_last(self.sum_last(y * y).mT)) * larger
        y = y / size.clamp(min=SMALLEST_NORM)
        for a, b, c in applied:
            squares = _product(y, y.mT)
            y = y * a + _product(squares * b + _product(squares, squares) * c, y)
        return ((y.mT if tall else y) + 0.0).float()

    def mean_square(self, x: Tensor, dim: int) -> Tensor:
        squares = x.double() * x.double()
        total = self.sum_last(squares) if dim == 2 else self.sum_last(squares.mT).mT
        return quotient(total, x.shape[dim])

    def sum_last(self, x: Tensor) -> Tensor:
        return sum_last(x.contiguous())

    def sqrt(self, x: Tensor) -> Tensor:
        return sqrt(x)

    def square_sums(self, of: Sequence[Sums]) -> list[Tensor]:
        """The squares that are added up together on a grid of the largest of them, on all ranks: exact."""
        if not of:
            return []
        tops = []
        for sums in of:
            top = sums.placed.tensor.new_zeros(sums.shape, dtype=torch.float64)
            if sums.placed.tensor.numel():
                top[sums.kept] = sums.placed.tensor.abs().amax(sums.dims, keepdim=True).double()
            tops.append(top)
        flat = self._largest(torch.cat([top.reshape(-1) for top in tops]))
        parts = power_of_two(exponent(flat)).split([top.numel() for top in tops])
        limits = [part.view_as(top)[sums.kept] for part, top, sums in zip(parts, tops, of, strict=True)]

        def terms(number: int) -> Tensor:
            sums, x, limit = of[number], of[number].placed.tensor, limits[number]
            bits = term_bits(math.prod(sums.placed.placement.shape[dim] for dim in sums.dims))
            made = torch.empty_like(x, dtype=torch.float64)
            for to, entries, unit in pieces(made, x, limit.expand_as(x)):
                units = entries.double() / unit
                to.copy_(fixed(units * units, bits))
            return made

        found = sums_over_ranks(of, terms, self._add)
        return [total * (limit * limit) for total, limit in zip(found, limits, strict=True)]


def _product(x: Tensor, y: Tensor) -> Tensor:
    """x [k, m, l] times y [k, l, n]: each row of x on a grid of its own, and each column of y."""
    bits, other = operand_bits(x.shape[2])
    return torch.bmm(relative(x, bits, largest(x, 2)), relative(y, other, largest(y, 1)))
