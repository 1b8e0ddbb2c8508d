"""Group-relative advantages: GRPO (Shao et al., arXiv 2402.03300), which DAPO shares (Yu et al., arXiv 2503.14476: its
bounds and its normaliser are its preset's), and Dr. GRPO (Liu et al., arXiv 2503.20783)."""

from collections.abc import Sequence

from equigrad.rl.algorithms.algorithm import Algorithm
from equigrad.rl.rollouts import Rollout, deviation, groups, mean

_LEAST = 1e-6
"""Added to a deviation."""


class Grpo(Algorithm):
    """A = (r - mean) / deviation, of the group."""

    def advantages(self, rollouts: Sequence[Rollout]) -> list[float]:
        found = [0.0] * len(rollouts)
        for members in groups(rollouts).values():
            rewards = [rollouts[i].reward for i in members]
            middle, spread = mean(rewards), self._spread(rewards)
            for i in members:
                found[i] = (rollouts[i].reward - middle) / spread
        return found

    def _spread(self, rewards: Sequence[float]) -> float:
        return deviation(rewards) + _LEAST


class DrGrpo(Grpo):
    """A = r - mean: a group whose rewards are close weighs no more than others."""

    def _spread(self, rewards: Sequence[float]) -> float:
        return 1.0
