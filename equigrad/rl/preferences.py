"""Learning from pairs of answers of which one was preferred: DPO (Rafailov et al., arXiv 2305.18290).

The loss of a pair is a function of what the model gives both answers, which may lie in different rows on different
ranks. So the pair's margin is taken from a pass over the whole batch before the update (``Execution.score``), and with
it the slope of every token is known: under the same weights it is the gradient, however the step is divided.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from equigrad.data.samples import Sample
from equigrad.numerics.exact.elementary import exp, log
from equigrad.objectives.objective import Component, Mixture, Streams
from equigrad.objectives.policy import Exp, TokenLoss
from equigrad.rl.samples import Samples, known, together

_WEIGHT, _VALUE, _SLOPE = "pair_weight", "pair_value", "pair_slope"


@dataclass(frozen=True, eq=False)
class Pair:
    """Samples of a prompt with the answer that was preferred and with the other one; only answers are in the loss."""

    chosen: Sample
    rejected: Sample


@dataclass(frozen=True)
class Margins:
    """``margin``: beta times how much more than the reference the model prefers the answer that was preferred, the mean
    of all pairs; ``accuracy``: of how many that is positive."""

    margin: float
    accuracy: float


def samples(
    pairs: Sequence[Pair], now: Sequence[np.ndarray], reference: Sequence[np.ndarray], beta: float
) -> tuple[Samples, Margins]:
    """
    now, reference: log-probabilities [length] of the labels of each sample, chosen and rejected in turns, under the
                    present weights and under the reference model

    The mean over pairs of -log sigmoid(m), with m = beta ((log p - log q)(chosen) - (log p - log q)(rejected)); its
    slope at each token of the chosen answer is -beta sigmoid(-m), and the opposite at the other's.
    """
    if not pairs or not all(s.loss.any() for p in pairs for s in (p.chosen, p.rejected)):
        raise ValueError("preferences are pairs of answers, each with a token in the loss")
    gains = [
        math.fsum(np.subtract(a[s.loss], b[s.loss], dtype=np.float64).tolist())
        for s, a, b in zip((s for p in pairs for s in (p.chosen, p.rejected)), now, reference, strict=True)
    ]
    margins = torch.tensor([beta * (c - r) for c, r in zip(gains[::2], gains[1::2], strict=True)], dtype=torch.float64)
    back = exp(-margins.abs())
    losses = log(1 + back) + (-margins).clamp(min=0)
    wrong = torch.where(margins > 0, back, torch.ones_like(back)) / (1 + back)
    made = list[tuple[Sample, int | None]]()
    for number, pair in enumerate(pairs):
        tokens = int(pair.chosen.loss.sum() + pair.rejected.loss.sum())
        for sample, sign in ((pair.chosen, -beta), (pair.rejected, beta)):
            slope = sign * float(wrong[number])
            streams = {_WEIGHT: 1 / len(pairs), _VALUE: float(losses[number]) / tokens, _SLOPE: slope}
            made.append((known(sample, streams), number))
    told = Margins(math.fsum(margins.tolist()) / len(pairs), float((margins > 0).sum()) / len(pairs))
    return together(made).reading((_WEIGHT, _VALUE, _SLOPE)), told


def objective() -> Mixture:
    """What is minimised of these samples."""
    return Mixture([Component("preference", _WEIGHT, (_VALUE, _SLOPE), _settled)])


def _settled(logprob: Tensor, streams: Streams, exp: Exp) -> TokenLoss:
    return TokenLoss(streams[_VALUE], streams[_SLOPE])
