"""The global gradient norm, from local shards and their placements."""

from collections.abc import Iterable

import torch
from torch import Tensor

from equigrad.parallel.placement import Placed


@torch.no_grad()
def local_square_sum(gradients: Iterable[Placed]) -> Tensor:
    """Sum of squares, float64 scalar, of the boxes that this rank counts for. Added over all ranks it is norm^2."""
    counted = [g.tensor for g in gradients if g.placement.replica == 0 and g.placement.numel]
    if not counted:
        return torch.zeros((), dtype=torch.float64)
    norms = torch._foreach_norm(counted)
    return torch.stack(norms).double().square().sum()


@torch.no_grad()
def clip(gradients: Iterable[Placed], norm: float, limit: float) -> None:
    """Scale all gradients in place so that their global norm is at most ``limit`` (> 0)."""
    if norm > limit:
        torch._foreach_mul_([g.tensor for g in gradients], limit / norm)
