"""CISPO (MiniMax, arXiv 2506.13585): importance weights are clipped, and no token loses its gradient."""

from torch import Tensor

from equigrad.objectives.policy import TokenLoss, weighted
from equigrad.rl.algorithms.grpo import Grpo


class Cispo(Grpo):
    def _surrogate(self, ratio: Tensor, logprob: Tensor, advantage: Tensor) -> TokenLoss:
        return weighted(ratio, logprob, advantage, self.config.clip_low, self.config.clip_high)
