"""AdamW (Loshchilov and Hutter, arXiv 1711.05101) on local shards, through PyTorch's fused kernel."""

from collections.abc import Mapping

import torch
from torch.optim.adamw import adamw

from equigrad.config.optim import Optim
from equigrad.optim.roles import Rates
from equigrad.parallel.placement import Placed

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW:
    """State: two moments per parameter, in its place."""

    moment_dtype: torch.dtype | None = None
    """None: that of the parameter."""

    def __init__(self, config: Optim, parameters: Mapping[str, Placed], rates: Rates) -> None:
        self.config, self._parameters, self._rates = config, parameters, rates
        # The kernel wants its own count beside each tensor, and moves it itself.
        self._counts = {n: torch.zeros((), device=p.tensor.device) for n, p in parameters.items()}
        self._counted = 0
        dtype = self.moment_dtype
        self._moments = {
            m: {n: torch.zeros_like(p.tensor, dtype=dtype) for n, p in parameters.items()} for m in MOMENTS
        }

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Placed], lr: float, update: int) -> None:
        """Update every parameter in place from its gradient; ``update``: how many were made before."""
        if self._counted != update:
            for count in self._counts.values():
                count.fill_(float(update))
        self._counted = update + 1
        alike: dict[tuple[float, float], list[str]] = {}
        for name, placed in self._parameters.items():
            if placed.placement.numel:
                alike.setdefault(self._rates(name, lr), []).append(name)
        for (rate, decay), names in alike.items():
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
                lr=rate,
                weight_decay=decay,
                eps=self.config.eps,
                maximize=False,
            )

    def state(self) -> dict[str, Placed]:
        """The moments, named ``<moment>.<parameter>``, to save or to load into."""
        placed = {}
        for moment, tensors in self._moments.items():
            for name, tensor in tensors.items():
                at = self._parameters[name].placement
                placed[f"{moment}.{name}"] = Placed(at, tensor).renamed(f"{moment}.{name}")
        return placed
