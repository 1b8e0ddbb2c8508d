"""GSPO (Zheng et al., arXiv 2507.18071): one ratio for a whole rollout, the geometric mean of its tokens', clipped."""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from equigrad.objectives.policy import Exp
from equigrad.rl.algorithms.grpo import Grpo


class Gspo(Grpo):
    """The ratio is a constant of the step, from the log-probabilities that the model gives the whole batch before it: a
    rollout's tokens may be in several rows. Divided by the rollout's tokens, each has the slope that it should have:
    d s / d log p = s / tokens."""

    reads: ClassVar[tuple[str, ...]] = ("advantage", "sequence_ratio", "logprob")
    of_sequences: ClassVar[bool] = True

    def _ratio(self, logprob: Tensor, known: Mapping[str, Tensor], exp: Exp) -> Tensor:
        return known["sequence_ratio"]
