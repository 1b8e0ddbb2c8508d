"""Drawing tokens, against a transcription in float64: which may be drawn, how often, and both log-probabilities."""

import math

import pytest
import torch
from torch import Tensor

from equigrad.models.sampling import Rule, draw
from equigrad.numerics.exact.ops import ExactOps
from equigrad.numerics.native import NativeOps
from equigrad.numerics.ops import Ops

VOCABULARY = 11
OPS = {"native": NativeOps(), "exact": ExactOps(torch.float32, 0, 64, 40)}
# Temperature, top_p, top_k.
SETTINGS = [(1.0, 1.0, 0), (0.7, 1.0, 0), (1.3, 0.6, 0), (1.0, 1.0, 3), (0.5, 0.9, 4), (2.0, 1e-9, 0), (1.0, 1.0, 50)]


def logits() -> Tensor:
    x = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(2)) * 2
    x[4] = x[7]  # equals
    return x


def transcribed(x: Tensor, temperature: float, top_p: float, top_k: int) -> tuple[list[float], list[float]]:
    """Probability of each token in the whole vocabulary, and among those that may be drawn."""
    powers = [math.exp(v / temperature) for v in x.tolist()]
    every = [p / sum(powers) for p in powers]
    kept = sorted(range(len(every)), key=lambda i: (-every[i], i))[: top_k or None]
    mass, chosen, so_far = sum(every[i] for i in kept), list[int](), 0.0
    for i in kept:
        if top_p < 1 and so_far >= top_p * mass:
            break
        chosen.append(i)
        so_far += every[i]
    return every, [every[i] / so_far if i in chosen else 0.0 for i in range(len(every))]


@pytest.mark.parametrize("ops", OPS.values(), ids=OPS)
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_draws_and_both_log_probabilities_follow_the_definition(ops: Ops, setting: tuple[float, float, int]) -> None:
    x, count = logits(), 6000
    every, kept = transcribed(x, *setting)
    drawn = draw(x.expand(count, -1), ops, [Rule.seeded(n, "a", *setting) for n in range(count)], [3] * count)
    seen = torch.bincount(drawn.ids, minlength=VOCABULARY).double() / count
    # Five standard deviations.
    assert all(
        abs(s - p) <= 5 * math.sqrt(p * (1 - p) / count) + 1e-12 for s, p in zip(seen.tolist(), kept, strict=True)
    )
    for found, wanted in ((drawn.log_probs, every), (drawn.kept_log_probs, kept)):
        expected = torch.tensor([math.log(p) if p else math.nan for p in wanted], dtype=torch.float64)[drawn.ids]
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    entropy = -sum(p * math.log(p) for p in every)
    assert drawn.entropies.tolist() == pytest.approx([entropy] * count, rel=1e-5)


@pytest.mark.parametrize("ops", OPS.values(), ids=OPS)
def test_each_draws_by_its_own_rule_and_numbers_whoever_is_beside(ops: Ops) -> None:
    x = torch.randn(len(SETTINGS) + 1, VOCABULARY, generator=torch.Generator().manual_seed(3))
    rules = [Rule.seeded(n, "a", *setting) for n, setting in enumerate([*SETTINGS, (0.0, 1.0, 0)])]
    together = draw(x, ops, rules, range(len(rules)))
    for n, rule in enumerate(rules):
        alone = draw(x[n : n + 1], ops, [rule], [n])
        for name, stream in vars(alone).items():
            assert torch.equal(stream, getattr(together, name)[n : n + 1])


def test_greedy_takes_the_first_of_equals_and_has_log_probabilities_at_temperature_1() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0, 0.0]])
    for temperature in (0.0, 1e-307):
        drawn = draw(x, OPS["exact"], [Rule(0, temperature)], [0])
        assert drawn.ids.tolist() == [1]
        assert drawn.log_probs.tolist() == pytest.approx([float(x.log_softmax(1)[0, 1])])


def test_without_filters_both_log_probabilities_have_the_same_bits() -> None:
    x = torch.randn(40, 300, generator=torch.Generator().manual_seed(5))
    for ops in OPS.values():
        drawn = draw(x, ops, [Rule(n, 0.9) for n in range(40)], [0] * 40)
        assert torch.equal(drawn.log_probs, drawn.kept_log_probs)
