"""What was sampled, and what it was worth: the record between whoever generates and whoever trains. Tokens, no text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Segment:
    """A token sequence of which the model has sampled some: a prompt and its completion, or a whole conversation.

    ids:      int64 [n + 1]
    sampled:  bool [n], whether the model has sampled token i + 1; what a prompt or an environment said it has not
    logprob:  float32 [n], of token i + 1 in the distribution that it was sampled from, before any cut to the likeliest
    versions: int64 [n], of the weights that sampled it

    Where ``sampled`` is false the last two may be anything.

    Worked example, "2+2=" answered by "4" and the end of the text, in bytes:

        ids      256  50  43  50  61  52 256
        sampled    F   F   F   F   T   T
    """

    ids: np.ndarray
    sampled: np.ndarray
    logprob: np.ndarray
    versions: np.ndarray

    def __post_init__(self) -> None:
        shapes = {name: getattr(self, name).shape for name in ("sampled", "logprob", "versions")}
        if self.ids.ndim != 1 or len(self.ids) < 2 or any(s != (len(self.ids) - 1,) for s in shapes.values()):
            raise ValueError(f"a segment of {self.ids.shape} tokens has a number of each but the first, not {shapes}")

    @property
    def learned(self) -> np.ndarray:
        """bool [n]: sampled, and with a log-probability that is a number; others are in no loss and in no count."""
        return self.sampled & np.isfinite(self.logprob)


@dataclass(frozen=True)
class Rollout:
    """One attempt at a problem.

    group:     rollouts of one prompt have the same, whatever their number
    segments:  usually one; several where the history was rewritten on the way. Together they weigh as one
    truncated: whether the last turn was cut at its longest
    """

    id: str
    group: str
    segments: tuple[Segment, ...]
    reward: float
    truncated: bool = False

    def __post_init__(self) -> None:
        if not math.isfinite(self.reward):
            raise ValueError(f"rollout {self.id} of group {self.group} has the reward {self.reward}")

    @property
    def tokens(self) -> int:
        """How many are learned from."""
        return sum(int(segment.learned.sum()) for segment in self.segments)

    @property
    def dropped(self) -> int:
        """How many were sampled with a log-probability that is no number."""
        return sum(int(s.sampled.sum()) for s in self.segments) - self.tokens


def groups(rollouts: Sequence[Rollout]) -> dict[str, list[int]]:
    """The numbers of the rollouts of each group."""
    found: dict[str, list[int]] = {}
    for number, rollout in enumerate(rollouts):
        found.setdefault(rollout.group, []).append(number)
    return found


def mean(values: Sequence[float]) -> float:
    """Of any order of the values the same bits."""
    return math.fsum(values) / len(values)


def deviation(values: Sequence[float]) -> float:
    """The sample's standard deviation, in the same bits for any order; 0 of one value."""
    if len(values) < 2:
        return 0.0
    middle = mean(values)
    apart = [value - middle for value in values]
    return math.sqrt(math.fsum(off * off for off in apart) / (len(values) - 1))
