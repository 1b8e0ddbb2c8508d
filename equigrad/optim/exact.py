"""The end of a step in exact numerics: gradient norm and AdamW, the same bits however tensors are sharded."""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from equigrad.numerics.exact.elementary import exponent, power_of_two, sqrt
from equigrad.numerics.exact.fused import fused
from equigrad.numerics.exact.grids import fixed, term_bits
from equigrad.numerics.exact.scalar import power
from equigrad.optim.adamw import MOMENTS, AdamW
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
            squares[0, number], squares[1, number] = _squares(counted[name], limits[number], bits)
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
            new = _adamw(
                placed.tensor, gradients[name].tensor, first, second,
                beta1, beta2, rate, decay, placed.tensor.new_full((), root), self.config.eps,
            )  # fmt: skip
            for kept, value in zip((placed.tensor, first, second), new, strict=True):
                kept.copy_(value)
