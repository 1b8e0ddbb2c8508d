"""Drawing the next token of each of several sequences, each by its own rules and from its own stream of numbers: what
one gets does not depend on the sequences beside it.

*Order.* Logits are divided by the temperature, then all but the ``top_k`` most likely tokens are left out, then all but
the smallest set of most likely ones whose share of what is left reaches ``top_p``.

*Two log-probabilities.* Public systems mean by a sampled token's log-probability either that of the whole vocabulary at
the temperature, or that among the tokens which could be drawn. Training knows the first: ``log_probs``. The second is
``kept_log_probs``; they are equal where nothing is left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equigrad.numerics.ops import Distribution, Ops
from equigrad.numerics.random import key, signed, uniform

_GREEDY = 1e-30
"""Temperatures below it are 0: float32 does not hold logits over them."""


@dataclass(frozen=True)
class Rule:
    """How a sequence draws.

    stream:      64-bit key of its random numbers, as ``numerics.random.key`` makes it
    temperature: 0: the most likely token, the lowest id of equals; log-probabilities are then those at 1
    top_p:       in (0, 1]
    top_k:       0: any number
    """

    stream: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    @classmethod
    def seeded(cls, seed: int, name: str, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> "Rule":
        """With the stream of a name under a seed."""
        return cls(key(seed, name), temperature, top_p, top_k)

    @property
    def greedy(self) -> bool:
        return self.temperature < _GREEDY

    @property
    def filtered(self) -> bool:
        """Whether tokens are left out."""
        return self.top_p < 1 or self.top_k > 0


@dataclass(frozen=True)
class Drawn:
    """Of n sequences: the tokens [n] int64, and of each, float32, both log-probabilities (see above) and the entropy of
    the whole distribution, in nats."""

    ids: Tensor
    log_probs: Tensor
    kept_log_probs: Tensor
    entropies: Tensor


@torch.no_grad()
def draw(logits: Tensor, ops: Ops, rules: Sequence[Rule], positions: Sequence[int]) -> Drawn:
    """One token for each row of ``logits`` [n, V]; ``positions``: numbers of the tokens in their streams."""
    device = logits.device
    greedy = [rule.greedy for rule in rules]
    temperatures = [1.0 if rule.greedy else rule.temperature for rule in rules]
    distribution = ops.distribution(logits, torch.tensor(temperatures, dtype=torch.float64, device=device))
    terms, mass = distribution.terms, distribution.total
    if any(rule.filtered for rule in rules):
        terms = terms.masked_fill(~_kept(distribution, rules), 0.0)
        mass = torch.where(torch.tensor([r.filtered for r in rules], device=device), _sum(terms), mass)
    if all(greedy):
        ids = logits.argmax(-1)
    else:
        streams = torch.tensor([signed(rule.stream) for rule in rules])
        ids = _invert(terms, uniform(torch.tensor(positions), streams).to(device))
        if any(greedy):
            ids = torch.where(torch.tensor(greedy, device=device), logits.argmax(-1), ids)
    every = distribution.log_probability(ids, distribution.total)
    kept = every if mass is distribution.total else distribution.log_probability(ids, mass)
    return Drawn(ids, every, kept, distribution.entropy())


def _sum(terms: Tensor) -> Tensor:
    return terms.sum(1, dtype=torch.float64)


def _invert(terms: Tensor, uniform: Tensor) -> Tensor:
    """The first token at which the sum of the terms so far is beyond a share ``uniform`` [n] of the whole; the last one
    where the terms are no numbers."""
    sums = terms.cumsum(1, dtype=torch.float64)
    whole = sums[:, -1]
    # A share below 1 may be rounded up to the whole, which nothing is beyond.
    threshold = torch.minimum(uniform * whole, torch.nextafter(whole, torch.zeros_like(whole)))
    return torch.searchsorted(sums, threshold[:, None], right=True).squeeze(1).clamp(max=terms.shape[1] - 1)


def _kept(distribution: Distribution, rules: Sequence[Rule]) -> Tensor:
    """[n, V] bool, the tokens that may be drawn. Of equals those of lower id come first."""
    ordered, order = distribution.terms.sort(dim=1, descending=True, stable=True)
    device, width = order.device, order.shape[1]
    most = torch.tensor([rule.top_k or width for rule in rules], device=device)[:, None]
    share = torch.tensor([rule.top_p for rule in rules], dtype=torch.float64, device=device)[:, None]
    among = torch.arange(width, device=device) < most
    ordered = ordered.double().masked_fill_(~among, 0.0)
    before = ordered.cumsum(1) - ordered
    whole = ordered.sum(1, keepdim=True)
    kept = among & ((before < share * whole) | (share >= 1))
    return torch.empty_like(kept).scatter_(1, order, kept)
