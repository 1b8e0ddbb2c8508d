"""REINFORCE++ (Hu, arXiv 2501.03262): advantages of all tokens of the step brought to mean 0 and deviation 1; no
groups. What is taken off the reward at a token counts for the tokens up to it."""

from collections.abc import Sequence

import numpy as np

from equigrad.rl.algorithms.algorithm import Algorithm, Penalties
from equigrad.rl.rollouts import Rollout, deviation, mean

_LEAST = 1e-6
"""Added to a deviation."""


class ReinforcePlusPlus(Algorithm):
    """A = (g - mean) / deviation, of all tokens of the step, with g the reward less what follows to be taken off."""

    def advantages(self, rollouts: Sequence[Rollout]) -> list[float]:
        return [segments[0][0].item() for segments in self.of_tokens(rollouts, None)]

    def of_tokens(self, rollouts: Sequence[Rollout], penalties: Penalties | None) -> list[list[np.ndarray]]:
        gains = []
        for number, rollout in enumerate(rollouts):
            lengths = [len(segment.sampled) for segment in rollout.segments]
            own = np.zeros(sum(lengths)) if penalties is None else np.concatenate(list(penalties[number]))
            to_go = rollout.reward - own[::-1].cumsum()[::-1]
            gains.append(np.split(to_go, np.cumsum(lengths)[:-1]))
        pairs = zip(rollouts, gains, strict=True)
        learned = [g[s.learned].tolist() for r, own in pairs for s, g in zip(r.segments, own, strict=True)]
        counted = [value for values in learned for value in values]
        middle, spread = mean(counted), deviation(counted) + _LEAST
        return [[(g - middle) / spread for g in own] for own in gains]
