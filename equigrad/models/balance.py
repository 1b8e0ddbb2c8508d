"""How evenly the experts of a model are used, and what is learned from that: state of a run, beside its parameters.

Knows counts only; the term of the loss that they enter is an objective, and who adds them up over ranks is the trainer.
"""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from equigrad.config.model import Model
from equigrad.numerics.routing import Loads
from equigrad.parallel.placement import Placed, whole


class Balance:
    """Of the last step the counts of each expert, of this step what was counted so far, and the routers' biases.

    A model without experts has zero layers here, and everything is empty.
    """

    def __init__(self, config: Model, parameters: Mapping[str, Placed], device: torch.device, rank: int) -> None:
        """``rank``: among all processes, each of which has a copy."""
        experts = config.experts
        self.layers = len(config.sparse_layers)
        number = 0 if experts is None else experts.num_experts
        self._chosen = 0 if experts is None else experts.num_experts_per_tok
        self._rate = 0.0 if experts is None else experts.router_bias_update_rate or 0.0
        self._coefficient = 0.0 if experts is None else experts.router_aux_loss_coef
        self._rank = rank
        self._last = torch.zeros(self.layers, number, dtype=torch.int64, device=device)
        self._now = torch.zeros_like(self._last)
        self._probability = torch.zeros(self._last.shape, dtype=torch.float64, device=device)
        self._place = {layer: place for place, layer in enumerate(config.sparse_layers)}
        names = {f"model.layers.{layer}.mlp.gate.e_score_correction_bias": at for layer, at in self._place.items()}
        self._biases = {at: parameters[name].tensor for name, at in names.items() if name in parameters}

    def shares(self, layers: Iterable[int]) -> Tensor:
        """[layers, E] float32: of the tokens of the last step, the part that chose each expert; together, k. Before the
        first step all are alike."""
        total = self._last.sum(1, keepdim=True)
        known = self._last.double() / total.clamp(min=1)
        shares = (self._chosen * torch.where(total > 0, known, 1 / self._last.shape[1])).float()
        return shares[[self._place[layer] for layer in layers]]

    def count(self, loads: Loads) -> None:
        """Take up the loads of one row."""
        for layer, load in loads.items():
            self._now[self._place[layer]] += load.counts
            self._probability[self._place[layer]] += load.probability.detach()

    def take(self) -> tuple[Tensor, Tensor]:
        """What was counted since the last call, this rank's part of the step, [layers, E]: tokens, int64, and the sums
        of their probabilities, float64."""
        taken = self._now, self._probability
        self._now, self._probability = (torch.zeros_like(x) for x in taken)
        return taken

    def term(self, probability: Tensor, tokens: int) -> float:
        """The load-balancing term of a step's loss, from its global sums of probabilities and number of tokens; the
        counts are those of the step before."""
        layers, experts = probability.shape
        if not layers:
            return 0.0
        terms = (probability * self.shares(self._place)).flatten().tolist()
        return math.fsum(terms) * experts / (layers * tokens) * self._coefficient

    @torch.no_grad()
    def update(self, counts: Tensor) -> None:
        """The step with these global counts was done: they are those of the last step from now on. A bias goes up where
        an expert had less than the mean, and down where it had more (Wang et al., arXiv 2408.15664)."""
        self._last.copy_(counts)
        for place, bias in self._biases.items():
            # Compared as integers: count < total / E.
            of_layer = counts[place]
            bias += self._rate * torch.sign(of_layer.sum() - of_layer * len(of_layer)).to(bias.dtype)

    def metrics(self, counts: Tensor) -> dict[str, float]:
        """Of a step's global counts: the most used expert's load over the mean load, in the worst of the layers; and
        the tokens that found no room, of which there are none by construction."""
        if not self.layers:
            return {}
        uneven = counts.max(1).values * counts.shape[1] / counts.sum(1).clamp(min=1)
        return {"expert_load": float(uneven.max()), "dropped_tokens": 0}

    def state(self) -> dict[str, Placed]:
        """What a checkpoint holds besides the biases, which are the model's."""
        if not self.layers:
            return {}
        name = "routing.counts"
        return {name: Placed(whole(name, self._last.shape, replica=self._rank), self._last)}
