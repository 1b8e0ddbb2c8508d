"""REINFORCE leave-one-out (Ahmadian et al., arXiv 2402.14740)."""

from collections.abc import Sequence

from equigrad.rl.algorithms.algorithm import Algorithm
from equigrad.rl.rollouts import Rollout, groups, mean


class Rloo(Algorithm):
    """A = r - mean of the group's others; alone in a group, nothing is known and A is 0."""

    def advantages(self, rollouts: Sequence[Rollout]) -> list[float]:
        found = [0.0] * len(rollouts)
        for members in groups(rollouts).values():
            count, middle = len(members), mean([rollouts[i].reward for i in members])
            for i in members:
                found[i] = (rollouts[i].reward - middle) * count / (count - 1) if count > 1 else 0.0
        return found
