"""The global gradient norm, from local shards and their placements."""

from collections.abc import Iterable

import torch
from torch import Tensor

from equigrad.parallel.placement import Placed

_PIECE = 1 << 15


@torch.no_grad()
def local_square_sum(gradients: Iterable[Placed]) -> Tensor:
    """Sum of squares, float64 scalar, of the boxes that this rank counts for. Added over all ranks it is norm^2."""
    counted = [g.tensor for g in gradients if g.placement.replica == 0 and g.placement.numel]
    if not counted:
        return torch.zeros((), dtype=torch.float64)
    # In float32 a long sum loses digits, and how many would depend on the shard: so short sums, added in float64.
    pieces = [piece for tensor in counted for piece in tensor.reshape(-1).split(_PIECE)]
    return torch.stack(torch._foreach_norm(pieces)).double().square().sum()


@torch.no_grad()
def clip(gradients: Iterable[Placed], norm: float, limit: float) -> None:
    """Scale all gradients in place so that their global norm is at most ``limit`` (> 0)."""
    tensors = [g.tensor for g in gradients]
    if norm > limit and tensors:  # a stage of a pipeline may have nothing that is trained
        torch._foreach_mul_(tensors, limit / norm)
