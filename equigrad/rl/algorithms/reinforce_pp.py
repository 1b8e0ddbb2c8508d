"""REINFORCE++ (Hu, arXiv 2501.03262): rewards of the whole step brought to mean 0 and deviation 1, no groups."""

from collections.abc import Sequence

from equigrad.rl.algorithms.algorithm import Algorithm
from equigrad.rl.rollouts import Rollout, deviation, mean

_LEAST = 1e-6
"""Added to a deviation."""


class ReinforcePlusPlus(Algorithm):
    """A = (r - mean) / deviation, of the step."""

    def advantages(self, rollouts: Sequence[Rollout]) -> list[float]:
        rewards = [rollout.reward for rollout in rollouts]
        middle, spread = mean(rewards), deviation(rewards) + _LEAST
        return [(reward - middle) / spread for reward in rewards]
