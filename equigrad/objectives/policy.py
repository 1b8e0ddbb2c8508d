"""What methods of reinforcement learning minimise at each sampled token, and how steep that is.

Everything here is elementwise: a token's loss depends on its own log-probability under the model that is trained, and
on constants of the token (advantage, earlier log-probabilities) that were known before the forward pass. What belongs
to a whole sequence or group (its ratio, its advantage, its weight) is such a constant. Slopes are written out and not
left to autograd, so that exact numerics has one order of operations; tests hold them to autograd.

Tensors are [n] float64. ``exp`` is that of the op set.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Exp = Callable[[Tensor], Tensor]
KL = Literal["k1", "k2", "k3"]

FARTHEST = 20.0
"""Log-probabilities further apart than this count as so far apart: ratios stay finite, and nothing times zero."""


class TokenLoss(NamedTuple):
    """``value`` [n], and its derivative by the log-probability of the token, ``slope`` [n]."""

    value: Tensor
    slope: Tensor


def ratio(logprob: Tensor, before: Tensor, exp: Exp) -> Tensor:
    """How much likelier tokens are than ``before``."""
    return exp((logprob - before).clamp(-FARTHEST, FARTHEST))


def clipped(ratio: Tensor, advantage: Tensor, low: float, high: float, most: float | None = None) -> TokenLoss:
    """-min(r A, clip(r, 1 - low, 1 + high) A): Schulman et al., arXiv 1707.06347, section 3; with ``high`` of its own,
    Yu et al., arXiv 2503.14476, section 3.1. ``most``: where A < 0 a ratio counts as at most this (Ye et al., arXiv
    1912.09729, section 3.4).
    """
    least = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    moves = torch.where(advantage > 0, ratio <= 1 + high, ratio >= 1 - low)
    if most is not None:
        least = torch.where(advantage < 0, torch.maximum(least, most * advantage), least)
        moves &= (advantage >= 0) | (ratio <= most)
    return TokenLoss(-least, torch.where(moves, -ratio * advantage, 0.0))


def weighted(ratio: Tensor, logprob: Tensor, advantage: Tensor, low: float, high: float) -> TokenLoss:
    """-clip(r, 1 - low, 1 + high) A log p, the ratio a constant: CISPO, MiniMax, arXiv 2506.13585, section 3.1. No
    token loses its gradient."""
    weight = ratio.clamp(1 - low, 1 + high) * advantage
    return TokenLoss(-weight * logprob, -weight)


def trusted(loss: TokenLoss, logprob: Tensor, sampled: Tensor, advantage: Tensor, most: float, exp: Exp) -> TokenLoss:
    """``loss`` without slope where the token's probability is further than ``most`` from that with which it was
    sampled, and the advantage takes it further: the trust region of a divergence, total variation of the token against
    all others, beside that of ratios (DPPO)."""
    off = exp(logprob) - exp(sampled)
    leaves = (off.abs() > most) & (off * advantage > 0)
    return TokenLoss(loss.value, torch.where(leaves, 0.0, loss.slope))


def divergence(logprob: Tensor, reference: Tensor, kind: KL, exp: Exp) -> TokenLoss:
    """Estimates of the divergence from a reference at a sampled token (Schulman, "Approximating KL divergence"): with
    d = log p - log q, k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. The slope of k2 is that of the divergence itself,
    averaged over samples; that of k1 averages to nothing."""
    d = (logprob - reference).clamp(-FARTHEST, FARTHEST)
    if kind == "k1":
        return TokenLoss(d, torch.ones_like(d))
    if kind == "k2":
        return TokenLoss(d * d * 0.5, d)
    back = exp(-d)
    return TokenLoss(back - 1 + d, 1 - back)


def likelihood(logprob: Tensor) -> TokenLoss:
    """-log p."""
    return TokenLoss(-logprob, -torch.ones_like(logprob))
