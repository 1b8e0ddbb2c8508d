"""The end of a step in exact numerics: gradient norm and AdamW, the same bits however tensors are sharded."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from equigrad.numerics.exact.elementary import exponent, power_of_two, sqrt
from equigrad.numerics.exact.fused import fused
from equigrad.numerics.exact.grids import fixed, term_bits
from equigrad.numerics.exact.scalar import power
from equigrad.optim.adamw import MOMENTS, AdamW
from equigrad.parallel.placement import Placed

_PIECE = 1 << 20
"""Entries that are worked on at a time: what is computed on the way takes some seventy bytes an entry."""


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of the same entries of tensors of one shape, in rows; of what is in no row, all at once."""
    rows = max(1, _PIECE // max(1, tensors[0][0].numel())) if tensors[0].ndim else 1
    return zip(*(x.split(rows) if x.ndim else (x,) for x in tensors), strict=True)


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
            for (piece,) in _pieces(counted[name]):
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
    def step(self, gradients: Mapping[str, Placed], lr: float) -> None:
        """Update every parameter in place from its gradient, with learning rate ``lr``."""
        self._updates += 1
        beta1, beta2 = self.config.betas
        rate = lr / (1 - power(beta1, self._updates))
        root = math.sqrt(1 - power(beta2, self._updates))
        for name, placed in self._parameters.items():
            if not placed.placement.numel:
                continue
            decay = 1 - lr * self.config.weight_decay if self._decays[name] else 1.0
            first, second = (self._moments[moment][name] for moment in MOMENTS)
            divisor = placed.tensor.new_full((), root)
            for parameter, gradient, m, v in _pieces(placed.tensor, gradients[name].tensor, first, second):
                new = _adamw(parameter, gradient, m, v, beta1, beta2, rate, decay, divisor, self.config.eps)
                for kept, value in zip((parameter, m, v), new, strict=True):
                    kept.copy_(value)
