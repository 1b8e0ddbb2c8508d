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
    sums:    names of what it tells of a row besides, to be added up over all rows
    """

    streams: tuple[str, ...]
    sums: tuple[str, ...]

    def __call__(self, token_loss: Tensor, streams: Streams, ops: Ops, normaliser: int) -> tuple[Tensor, Tensor | None]:
        """A row's share of the step's loss, a scalar with a gradient, and its sums, float64 [len(sums)].

        token_loss: [n] float32, the cross-entropy of each token in the loss
        normaliser: number of tokens in the loss over the *whole* step
        """
        ...


class LanguageModel:
    """The mean cross-entropy of all tokens in the loss."""

    streams: tuple[str, ...] = ()
    sums: tuple[str, ...] = ()

    def __call__(self, token_loss: Tensor, streams: Streams, ops: Ops, normaliser: int) -> tuple[Tensor, Tensor | None]:
        return language_model(token_loss, ops, normaliser), None


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


class Mixture:
    """The sum of some components. ``sums``: the loss of each, its coefficient not applied, as ``<name>_loss``."""

    def __init__(self, components: Sequence[Component]) -> None:
        self.components = tuple(components)
        self.streams = tuple(sorted({name for c in components for name in (c.weight, *c.reads)}))
        self.sums = tuple(f"{c.name}_loss" for c in components)

    def __call__(self, token_loss: Tensor, streams: Streams, ops: Ops, normaliser: int) -> tuple[Tensor, Tensor | None]:
        logprob = -token_loss.detach().double()
        value, slope = torch.zeros_like(logprob), torch.zeros_like(logprob)
        sums = []
        for component in self.components:
            weight = streams[component.weight]
            loss = component.loss(logprob, streams, ops.exp)
            # Selected and not multiplied by 0: what is not counted may be infinite.
            counts = weight != 0
            own = torch.where(counts, weight * loss.value.clamp(-_LARGEST, _LARGEST), 0.0)
            value = value + component.coefficient * own
            slope = slope + torch.where(counts, component.coefficient * weight * loss.slope, 0.0)
            sums.append(ops.total(own, _MOST))
        return _Sloped.apply(token_loss, ops.total(value, _MOST), slope), torch.stack(sums)


class _Sloped(torch.autograd.Function):
    """A loss whose derivative by the log-probability of each token is given."""

    @staticmethod
    def forward(ctx: Any, token_loss: Tensor, loss: Tensor, slope: Tensor) -> Tensor:
        ctx.gradient = (0.0 - slope).to(token_loss.dtype)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None]:
        return d.to(ctx.gradient.dtype) * ctx.gradient, None, None
