"""Losses of sampled tokens against their formulas as one writes them with autograd, in float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from equigrad.numerics.exact.elementary import exp as portable
from equigrad.objectives.policy import (
    FARTHEST,
    TokenLoss,
    clipped,
    divergence,
    likelihood,
    ratio,
    trusted,
    weighted,
)

RANDOM = torch.Generator().manual_seed(0)
COUNT = 4000
OLD = -3 * torch.rand(COUNT, generator=RANDOM, dtype=torch.float64)
NOW = OLD + 0.5 * torch.randn(COUNT, generator=RANDOM, dtype=torch.float64)
ADVANTAGE = torch.randn(COUNT, generator=RANDOM, dtype=torch.float64)
ADVANTAGE[:50] = 0.0
EXPS = pytest.mark.parametrize("exp", [torch.exp, portable], ids=["native", "exact"])


def same(found: TokenLoss, formula: Callable[[Tensor], Tensor]) -> None:
    """The value of the formula, and the slope that autograd finds."""
    logprob = NOW.clone().requires_grad_()
    value = formula(logprob)
    (slope,) = torch.autograd.grad(value.sum(), logprob)
    torch.testing.assert_close(found.value, value.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.slope, slope, rtol=1e-12, atol=1e-12)


@EXPS
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.2, 0.28), (0.5, 4.0)])
def test_the_clipped_surrogate(exp: Callable[[Tensor], Tensor], low: float, high: float) -> None:
    def formula(logprob: Tensor) -> Tensor:
        r = (logprob - OLD).exp()
        return -torch.minimum(r * ADVANTAGE, r.clamp(1 - low, 1 + high) * ADVANTAGE)

    same(clipped(ratio(NOW, OLD, exp), ADVANTAGE, low, high), formula)


@EXPS
def test_the_surrogate_that_is_clipped_twice(exp: Callable[[Tensor], Tensor]) -> None:
    def formula(logprob: Tensor) -> Tensor:
        r = (logprob - OLD).exp()
        once = torch.minimum(r * ADVANTAGE, r.clamp(0.8, 1.2) * ADVANTAGE)
        return -torch.where(ADVANTAGE < 0, torch.maximum(once, 1.5 * ADVANTAGE), once)

    found = clipped(ratio(NOW, OLD, exp), ADVANTAGE, 0.2, 0.2, 1.5)
    same(found, formula)
    assert ((found.slope == 0) & (ADVANTAGE < 0) & (NOW - OLD > 0.5)).any()


@EXPS
def test_weights_that_are_clipped_let_every_token_learn(exp: Callable[[Tensor], Tensor]) -> None:
    found = weighted(ratio(NOW, OLD, exp), NOW, ADVANTAGE, 1.0, 0.3)
    same(found, lambda logprob: -(NOW - OLD).exp().clamp(0, 1.3) * ADVANTAGE * logprob)
    assert (found.slope != 0).sum() == (ADVANTAGE != 0).sum()


@EXPS
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_estimates_of_a_divergence(exp: Callable[[Tensor], Tensor], kind: str) -> None:
    formulas = {
        "k1": lambda d: d,
        "k2": lambda d: d**2 / 2,
        "k3": lambda d: torch.exp(-d) - 1 + d,
    }
    same(divergence(NOW, OLD, kind, exp), lambda logprob: formulas[kind](logprob - OLD))  # type: ignore[arg-type]


def test_the_mean_slope_of_k2_is_that_of_the_divergence() -> None:
    """Over all tokens of a small vocabulary, each as often as it is sampled."""
    logits = torch.randn(7, generator=RANDOM, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(7, generator=RANDOM, dtype=torch.float64).log_softmax(0)
    logprob = logits.log_softmax(0)
    (whole,) = torch.autograd.grad((logprob.exp() * (logprob - reference)).sum(), logits, retain_graph=True)
    slope = divergence(logprob.detach(), reference, "k2", torch.exp).slope
    (sampled,) = torch.autograd.grad(logprob, logits, logprob.detach().exp() * slope)
    torch.testing.assert_close(sampled, whole, rtol=1e-12, atol=1e-14)


@EXPS
def test_outside_a_region_of_trust_a_token_stays_and_inside_nothing_changes(exp: Callable[[Tensor], Tensor]) -> None:
    loss = clipped(ratio(NOW, OLD, exp), ADVANTAGE, 10.0, 10.0)
    found = trusted(loss, NOW, OLD, ADVANTAGE, 0.1, exp)
    off = NOW.exp() - OLD.exp()
    leaves = (off.abs() > 0.1) & (off.sign() == ADVANTAGE.sign())
    assert leaves.any()
    assert not leaves.all()
    assert torch.equal(found.slope, torch.where(leaves, 0.0, loss.slope))
    assert torch.equal(found.value, loss.value)


def test_likelihood() -> None:
    same(likelihood(NOW), lambda logprob: -logprob)


@EXPS
def test_tokens_that_were_all_but_impossible_give_finite_losses(exp: Callable[[Tensor], Tensor]) -> None:
    """However far apart, and with no advantage nothing at all."""
    now, old = torch.tensor([-1e4, 0.0, 0.0, -1e4]).double(), torch.tensor([0.0, -1e4, -1e4, 0.0]).double()
    advantage = torch.tensor([1.0, -1.0, 0.0, 0.0]).double()
    r = ratio(now, old, exp)
    for found in (
        clipped(r, advantage, 0.2, 0.2),
        clipped(r, advantage, 0.2, 0.2, 3.0),
        divergence(now, old, "k3", exp),
    ):
        assert found.value.isfinite().all()
        assert found.slope.isfinite().all()
    assert clipped(r, advantage, 0.2, 0.2).value[2:].tolist() == [0.0, 0.0]
    assert r.max() <= torch.tensor(FARTHEST).double().exp() * (1 + 1e-12)
