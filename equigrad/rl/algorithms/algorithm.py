"""What algorithms have in common: the clipped ratio, and what its tokens are divided by."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, TypeAlias

import numpy as np
from torch import Tensor

from equigrad.config.policy import Policy
from equigrad.objectives.policy import Exp, TokenLoss, clipped, ratio, trusted
from equigrad.rl.rollouts import Rollout

Penalties: TypeAlias = Sequence[Sequence[np.ndarray]]
"""Of each segment of each rollout, a number for each token, 0 where it is not learned from."""


class Algorithm(ABC):
    """Streams that its loss reads: ``advantage``; ``old_logprob``, from before the update; ``logprob``, of sampling."""

    reads: ClassVar[tuple[str, ...]] = ("advantage", "old_logprob", "logprob")
    of_sequences: ClassVar[bool] = False
    """Whether its ratio is one of whole rollouts, the stream ``sequence_ratio``."""

    def __init__(self, config: Policy) -> None:
        self.config = config

    @abstractmethod
    def advantages(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Of each rollout; all of a step, in any order the same."""

    def of_tokens(self, rollouts: Sequence[Rollout], penalties: Penalties | None) -> list[list[np.ndarray]]:
        """The advantage of each token, by rollout and segment. ``penalties``: what is taken off the reward."""
        if penalties is not None:
            taken = [math.fsum(x for segment in own for x in segment.tolist()) for own in penalties]
            rollouts = [replace(r, reward=r.reward - off) for r, off in zip(rollouts, taken, strict=True)]
        each = zip(rollouts, self.advantages(rollouts), strict=True)
        return [[np.full(len(segment.sampled), a) for segment in rollout.segments] for rollout, a in each]

    def weights(self, rollouts: Sequence[Rollout]) -> list[float]:
        """What a token of each rollout counts: weights of all tokens that are learned from are the normaliser."""
        counts = [rollout.tokens for rollout in rollouts]
        number, kind = sum(count > 0 for count in counts), self.config.normaliser
        if kind == "token":
            return [1 / max(sum(counts), 1)] * len(rollouts)
        lengths = counts if kind == "sequence" else [self.config.longest if kind == "constant" else 1] * len(counts)
        return [1 / (number * length) if count else 0.0 for count, length in zip(counts, lengths, strict=True)]

    def loss(self, logprob: Tensor, known: Mapping[str, Tensor], exp: Exp) -> TokenLoss:
        """Of tokens [n] float64."""
        config, advantage = self.config, known["advantage"]
        found = self._surrogate(self._ratio(logprob, known, exp), logprob, advantage)
        return (
            found if config.trust is None else trusted(found, logprob, known["logprob"], advantage, config.trust, exp)
        )

    def _ratio(self, logprob: Tensor, known: Mapping[str, Tensor], exp: Exp) -> Tensor:
        return ratio(logprob, known["old_logprob"], exp)

    def _surrogate(self, ratio: Tensor, logprob: Tensor, advantage: Tensor) -> TokenLoss:
        config = self.config
        return clipped(ratio, advantage, config.clip_low, config.clip_high, config.clip_twice)
