"""AdamW (Loshchilov and Hutter, arXiv 1711.05101) on local shards, through PyTorch's fused kernel.

An optimizer here is a rule over parameters with roles, and a state that is sharded exactly as the parameters are.
"""

from collections.abc import Mapping

import torch
from torch.optim.adamw import adamw

from equigrad.config.optim import Optim
from equigrad.models.specs import Spec
from equigrad.parallel.placement import Placed

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW:
    """State: two moments per parameter, in its place, and the number of updates made."""

    moment_dtype: torch.dtype | None = None
    """None: that of the parameter."""

    def __init__(self, config: Optim, parameters: Mapping[str, Placed], specs: Mapping[str, Spec]) -> None:
        self.config = config
        self._updates = 0
        self._parameters = {n: p for n, p in parameters.items() if specs[n].trained}
        # The kernel wants its own count beside each tensor, and moves it itself.
        self._counts = {n: torch.zeros((), device=p.tensor.device) for n, p in self._parameters.items()}
        self._decays = {name: specs[name].role != "vector" for name in self._parameters}
        dtype = self.moment_dtype
        self._moments = {
            m: {n: torch.zeros_like(p.tensor, dtype=dtype) for n, p in self._parameters.items()} for m in MOMENTS
        }

    @property
    def updates(self) -> int:
        """How many updates have been made."""
        return self._updates

    @updates.setter
    def updates(self, updates: int) -> None:
        self._updates = updates
        for count in self._counts.values():
            count.fill_(float(updates))

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Placed], lr: float) -> None:
        """Update every parameter in place from its gradient, with learning rate ``lr``."""
        for decays in (True, False):
            names = [n for n, p in self._parameters.items() if self._decays[n] == decays and p.placement.numel]
            if not names:
                continue
            tensors = [self._parameters[n].tensor for n in names]
            first, second = ([self._moments[m][n] for n in names] for m in MOMENTS)
            adamw(
                tensors,
                [gradients[n].tensor for n in names],
                first,
                second,
                [],
                [self._counts[n] for n in names],
                fused=True,
                amsgrad=False,
                beta1=self.config.betas[0],
                beta2=self.config.betas[1],
                lr=lr,
                weight_decay=self.config.weight_decay if decays else 0.0,
                eps=self.config.eps,
                maximize=False,
            )
        self._updates += 1

    def state(self) -> dict[str, Placed]:
        """The moments, named ``<moment>.<parameter>``, to save or to load into."""
        placed = {}
        for moment, tensors in self._moments.items():
            for name, tensor in tensors.items():
                at = self._parameters[name].placement
                placed[f"{moment}.{name}"] = Placed(at, tensor).renamed(f"{moment}.{name}")
        return placed
