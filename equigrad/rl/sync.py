"""Weights on their way from the ranks that train, however they are divided, to whoever samples with them.

There is one way: tensor by tensor, whole, in name order, under the names that checkpoints use. What an engine makes of
them (its own layout, its own type) is its affair.
"""

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from equigrad.checkpoint.boxes import claims, wholes
from equigrad.checkpoint.digest import tree
from equigrad.parallel.placement import Placed
from equigrad.parallel.ranks import gather, rank_and_size


class Weights:
    """The parameters of a model whose boxes are on the ranks of a group (default: all ranks)."""

    def __init__(self, parameters: Mapping[str, Placed], group: dist.ProcessGroup | None = None) -> None:
        """A collective. Whoever changes the parameters in place need not tell."""
        self._parameters, self._group = parameters, group
        self._rank, self._size = rank_and_size(group)
        self._wholes = wholes(gather(claims(parameters), group))

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Names and whole tensors, on every rank; a collective, to be gone through to the end. A tensor that is whole
        here is no copy."""
        device = next((placed.tensor.device for placed in self._parameters.values()), torch.device("cpu"))
        for name, whole in self._wholes.items():
            if self._size == 1:
                yield name, self._parameters[name].tensor
                continue
            found = torch.empty(whole.shape, dtype=getattr(torch, whole.dtype), device=device)
            for box, holder in whole.boxes.items():
                target = found[box.slices]
                if holder == self._rank:
                    target.copy_(self._parameters[name].tensor)
                sent = target if target.is_contiguous() else target.contiguous()
                dist.broadcast(sent, group=self._group, group_src=holder)
                if sent is not target and holder != self._rank:
                    target.copy_(sent)
            yield name, found

    def digests(self) -> dict[str, str]:
        """SHA-256 of each tensor, the same on every rank; a collective. ``tree_of_tensors`` says the same of what has
        arrived whole."""
        return tree(self._parameters, self._group).nodes
