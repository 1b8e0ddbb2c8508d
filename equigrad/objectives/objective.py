"""What a step minimises: the loss of each token in it, from what the model thinks of the token and from what was known
of it before the forward pass. Several losses may be minimised at once, each over tokens and a normaliser of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from equigrad.numerics.ops import Ops
from equigrad.objectives.language_model import language_model
from equigrad.objectives.policy import Exp, TokenLoss

Streams: TypeAlias = Mapping[str, Tensor]
"""By name, a number [n] float64 of each token in the loss."""

_LARGEST = 2.0**16
"""What is reported of a token's loss; its slope is not limited."""
_MOST = 20
"""A step's loss is below 2^20: weights add up to few."""


class Objective(Protocol):
    """What is added up over the rows of a step.

    streams: of samples, what it reads beside ids, labels and ``loss``
    sums:    how many numbers it tells of a row besides, which are added up over all rows
    peaks:   how many of which the largest of all rows counts, none below 0
    """

    streams: tuple[str, ...]
    sums: int
    peaks: int

    def __call__(self, token_loss: Tensor, streams: Streams, ops: Ops, normaliser: int) -> tuple[Tensor, Tensor | None]:
        """A row's share of the step's loss, a scalar with a gradient, and its sums and then its peaks, float64.

        token_loss: [n] float32, the cross-entropy of each token in the loss
        normaliser: number of tokens in the loss over the *whole* step
        """
        ...

    def figures(self, sums: Sequence[float], peaks: Sequence[float]) -> dict[str, float]:
        """What a step's record says of those of all rows."""
        ...


class LanguageModel:
    """The mean cross-entropy of all tokens in the loss."""

    streams: tuple[str, ...] = ()
    sums = peaks = 0

    def __call__(self, token_loss: Tensor, streams: Streams, ops: Ops, normaliser: int) -> tuple[Tensor, Tensor | None]:
        return language_model(token_loss, ops, normaliser), None

    def figures(self, sums: Sequence[float], peaks: Sequence[float]) -> dict[str, float]:
        return {}


@dataclass(frozen=True)
class Component:
    """One loss of several.

    weight: the stream that says by how much a token counts, 0 not at all; what the loss is divided by over the whole
            step is in there
    loss:   of tokens, from their log-probabilities [n] float64 and streams; where the weight is 0 it may be anything
    """

    name: str
    weight: str
    reads: tuple[str, ...]
    loss: Callable[[Tensor, Streams, Exp], TokenLoss]
    coefficient: float = 1.0


@dataclass(frozen=True)
class Compared:
    """Of which tokens a mixture tells how far they are from where they were sampled.

    weight:  the stream whose weight is not 0 there; the first component with that weight is the one that may clip
    logprob: the stream of their log-probabilities when they were sampled
    """

    weight: str
    logprob: str


class Mixture:
    """The sum of some components. A record tells the loss of each, its coefficient not applied, as ``<name>_loss``.

    Of tokens that are ``compared`` it tells

        clip_share:   of how many the loss is not 0 but its slope is
        logprob_diff: the mean distance of their log-probabilities from those of sampling; ``logprob_diff_max``: the
                      largest one
        sampled_kl:   the mean of log p_sampled - log p, an estimate of the divergence between the two (k1)
    """

    def __init__(self, components: Sequence[Component], compared: Compared | None = None) -> None:
        self.components, self._compared = tuple(components), compared
        streams = {name for c in components for name in (c.weight, *c.reads)}
        self.streams = tuple(sorted(streams | (set() if compared is None else {compared.logprob})))
        self.sums, self.peaks = len(components) + 4 * (compared is not None), int(compared is not None)

    def __call__(self, token_loss: Tensor, streams: Streams, ops: Ops, normaliser: int) -> tuple[Tensor, Tensor | None]:
        logprob = -token_loss.detach().double()
        value, slope = torch.zeros_like(logprob), torch.zeros_like(logprob)
        told, still = list[Tensor](), dict[str, Tensor]()
        for component in self.components:
            weight = streams[component.weight]
            loss = component.loss(logprob, streams, ops.exp)
            # Selected and not multiplied by 0: what is not counted may be infinite.
            counts = weight != 0
            own = torch.where(counts, weight * loss.value.clamp(-_LARGEST, _LARGEST), 0.0)
            value = value + component.coefficient * own
            slope = slope + torch.where(counts, component.coefficient * weight * loss.slope, 0.0)
            told.append(ops.total(own, _MOST))
            still.setdefault(component.weight, (own != 0) & (loss.slope == 0))
        if self._compared is not None:
            counts = streams[self._compared.weight] != 0
            apart = torch.where(counts, streams[self._compared.logprob] - logprob, 0.0)
            clipped = still[self._compared.weight] & counts
            apart = apart.clamp(-_LARGEST, _LARGEST)
            told += [ops.total(x, _MOST) for x in (counts.double(), clipped.double(), apart.abs(), apart)]
            told.append(apart.abs().amax() if len(apart) else apart.sum())
        return _Sloped.apply(token_loss, ops.total(value, _MOST), slope), torch.stack(told)

    def figures(self, sums: Sequence[float], peaks: Sequence[float]) -> dict[str, float]:
        """See the class; what is told of compared tokens is absent where there is none."""
        found = {f"{c.name}_loss": loss for c, loss in zip(self.components, sums, strict=False)}
        if self._compared is not None and (count := sums[len(self.components)]):
            clipped, apart, kl = (total / count for total in sums[len(self.components) + 1 :])
            found |= {"clip_share": clipped, "logprob_diff": apart, "logprob_diff_max": peaks[0], "sampled_kl": kl}
        return found


class _Sloped(torch.autograd.Function):
    """A loss whose derivative by the log-probability of each token is given."""

    @staticmethod
    def forward(ctx: Any, token_loss: Tensor, loss: Tensor, slope: Tensor) -> Tensor:
        ctx.gradient = (0.0 - slope).to(token_loss.dtype)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None]:
        return d.to(ctx.gradient.dtype) * ctx.gradient, None, None
