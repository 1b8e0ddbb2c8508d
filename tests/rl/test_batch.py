"""From rollouts to samples: what an advantage, a weight and a correction are, and what must not change them."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from equigrad.config.policy import PRESETS, Policy
from equigrad.rl.algorithms import algorithm
from equigrad.rl.batch import LIKELIHOOD_WEIGHT, POLICY_WEIGHT, objective, samples
from equigrad.rl.rollouts import Rollout, Segment
from equigrad.rl.samples import Samples
from tests.rl.policies import NAMES, imitated, rollouts, split


def policy(**given: Any) -> Any:
    return algorithm(Policy.model_validate(given))


def rollout(name: str, group: str, reward: float, tokens: int = 3, logprob: float = -1.0) -> Rollout:
    sampled = np.arange(tokens + 1) > 0
    at = np.full(tokens + 1, logprob, np.float32)
    return Rollout(name, group, (Segment(np.arange(tokens + 2), sampled, at, np.zeros(tokens + 1, np.int64)),), reward)


REWARDS = {"a": ("x", 1.0), "b": ("y", 0.0), "c": ("x", 0.0), "d": ("x", 5.0), "e": ("z", 9.0)}
UNEVEN = [rollout(name, *of) for name, of in REWARDS.items()]


@pytest.mark.parametrize(
    ("name", "advantages"),
    [
        ("dr_grpo", [-1.0, 0.0, -2.0, 3.0, 0.0]),
        ("grpo", [-1 / math.sqrt(7), 0.0, -2 / math.sqrt(7), 3 / math.sqrt(7), 0.0]),
        ("rloo", [1 - 2.5, 0.0, 0 - 3.0, 5 - 0.5, 0.0]),
        ("reinforce_pp", [(r - 3) / math.sqrt(13.2857142857) for r in (1, 0, 0, 5, 9)]),  # each reward three times
    ],
)
def test_advantages_are_of_groups_by_name_however_many_are_in_one(name: str, advantages: list[float]) -> None:
    """Neighbours in the list belong to different groups, and one is alone."""
    assert policy(name=name).advantages(UNEVEN) == pytest.approx(advantages, rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_rollouts_changes_no_bit(name: str) -> None:
    given, chosen = rollouts(23), policy(name=name)
    order = np.random.default_rng(1).permutation(len(given))
    mixed = [given[i] for i in order]
    for of in (chosen.advantages, chosen.weights):
        assert [of(given)[i] for i in order] == of(mixed)


@pytest.mark.parametrize(
    ("normaliser", "total"), [("token", 1.0), ("sequence", 1.0), ("constant", 15 / (5 * 7)), ("rollout", 3.0)]
)
def test_weights_are_the_normaliser_and_splitting_does_not_change_them(normaliser: str, total: float) -> None:
    """A rollout in three samples weighs as one in one (a rollout of three samples weighed three times as much)."""
    chosen = policy(normaliser=normaliser, longest=7)

    def weights(given: list[Rollout]) -> tuple[float, float]:
        found = samples(given, chosen)
        return (
            math.fsum(x for s in found.samples for x in s.streams[POLICY_WEIGHT]),
            math.fsum(x for s in found.samples for x in s.streams[POLICY_WEIGHT] * s.streams["advantage"]),
        )

    whole, parts = weights(UNEVEN), weights([split(split_once) for split_once in UNEVEN])
    assert whole[0] == pytest.approx(total, rel=1e-12)
    assert parts == pytest.approx(whole, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_log_probability_that_is_no_number_is_in_no_loss_and_in_no_count(bad: float) -> None:
    given = rollouts()
    (segment,) = given[3].segments
    at = int(np.flatnonzero(segment.sampled)[0])
    logprob = segment.logprob.copy()
    logprob[at] = bad
    given[3] = replace(given[3], segments=(replace(segment, logprob=logprob),))
    assert given[3].dropped == 1
    found = samples(given, policy())
    assert math.fsum(x for s in found.samples for x in s.streams[POLICY_WEIGHT]) == pytest.approx(1.0, rel=1e-12)
    for sample in found.samples:
        assert all(np.isfinite(stream).all() for stream in sample.streams.values())
        assert not sample.streams[POLICY_WEIGHT][~sample.loss].any()
    assert sum(s.loss.sum() for s in found.samples) == sum(r.tokens for r in rollouts()) - 1


def test_a_rollout_without_a_token_to_learn_from_is_no_sample_and_in_no_group() -> None:
    nothing = rollout("f", "x", 100.0, logprob=math.nan)
    ours, theirs = samples([*UNEVEN, nothing], policy()), samples(UNEVEN, policy())
    assert ours.refs == theirs.refs
    for a, b in zip(ours.samples, theirs.samples, strict=True):
        assert all(np.array_equal(a.streams[n], b.streams[n]) for n in b.streams)


def corrected(given: dict[str, Any], old: float = -0.5) -> np.ndarray:
    """What the weights of the first rollout's tokens are multiplied by; sampled at -1, or the middle one at -3."""
    first = rollout("a", "x", 1.0)
    (segment,) = first.segments
    at = segment.logprob.copy()
    at[2] = -3.0
    first = replace(first, segments=(replace(segment, logprob=at),))
    scores = [[np.full(4, old)], [np.full(4, -1.0)]]
    found, plain = (samples([first, rollout("b", "x", 0.0)], policy(**g), old=scores) for g in (given, {}))
    return found.samples[0].streams[POLICY_WEIGHT][1:] / plain.samples[0].streams[POLICY_WEIGHT][1:]


def test_corrections_are_of_tokens_or_of_rollouts() -> None:
    token, far = math.exp(0.5), math.exp(2.5)
    assert corrected({}) == pytest.approx([1, 1, 1])
    assert corrected({"correction": "truncate"}) == pytest.approx([token, 2.0, token])
    assert corrected({"correction": "truncate", "correction_high": 99}) == pytest.approx([token, far, token])
    assert corrected({"correction": "mask"}) == pytest.approx([token, 0.0, token])
    whole = {"correction_of": "sequence", "correction": "truncate"}
    assert corrected(whole) == pytest.approx([2.0] * 3)
    assert corrected(whole | {"correction_high": 99}) == pytest.approx([math.exp(3.5)] * 3)
    assert corrected(whole | {"correction": "mask"}) == pytest.approx([0.0] * 3)


def test_a_divergence_in_the_reward_is_taken_off_before_anything_is_made_of_it() -> None:
    longer = [UNEVEN[0], rollout("b", "x", 1.0, tokens=5)]
    scores = [[np.full(len(s.sampled), -2.0) for s in r.segments] for r in longer]  # sampled at -1
    given = {"kl": 0.1, "kl_in": "reward"}
    found = samples(longer, policy(name="dr_grpo", **given), reference=scores)
    for sample, expected in zip(found.samples, (0.1, -0.1), strict=True):  # 1 - 0.3 and 1 - 0.5, less their mean
        assert sample.streams["advantage"][sample.loss] == pytest.approx(expected)
    found = samples(longer, policy(name="reinforce_pp", **given), reference=scores)
    to_go = np.array([0.7, 0.8, 0.9, 0.5, 0.6, 0.7, 0.8, 0.9])
    advantages = np.concatenate([s.streams["advantage"][s.loss] for s in found.samples])
    assert advantages == pytest.approx((to_go - to_go.mean()) / to_go.std(ddof=1), rel=1e-4)
    parts = [c.name for c in objective(policy(kl=0.1, kl_in="reward")).components]
    assert parts == ["policy"]
    parts = [c.name for c in objective(policy(kl=0.1), 0.5, 1.0).components]
    assert parts == ["policy", "kl", "distillation", "likelihood"]


def test_samples_to_imitate_have_a_count_of_their_own() -> None:
    found: Samples = samples(UNEVEN, policy(), beside=imitated())
    weights = [math.fsum(x for s in found.samples for x in s.streams[n]) for n in (POLICY_WEIGHT, LIKELIHOOD_WEIGHT)]
    assert weights == pytest.approx([1.0, 1.0], rel=1e-12)
    halved = samples(UNEVEN, policy(), beside=imitated(), coefficient=0.5)
    for name, factor in ((POLICY_WEIGHT, 1.0), (LIKELIHOOD_WEIGHT, 0.5)):
        assert math.fsum(x for s in halved.samples for x in s.streams[name]) == pytest.approx(factor, rel=1e-12)
    assert not any((s.streams[POLICY_WEIGHT] * s.streams[LIKELIHOOD_WEIGHT]).any() for s in found.samples)


def test_groups_share_rows_where_they_fit() -> None:
    groups = [ref.group for ref in samples(UNEVEN, policy()).refs]
    assert groups == [0, 1, 0, 0, 2]


@pytest.mark.parametrize("name", PRESETS)
def test_an_algorithm_brings_the_values_of_its_publication(name: str) -> None:
    found = Policy.model_validate({"name": name, "clip_high": 0.5})
    assert found.clip_high == 0.5
    for key, value in PRESETS[name].items():
        assert key == "clip_high" or getattr(found, key) == value
    assert Policy.model_validate(found.model_dump()) == found


PUBLISHED = {  # normaliser, lower and upper bound, as the publications have them
    "grpo": ("sequence", 0.2, 0.2),
    "dr_grpo": ("constant", 0.2, 0.2),
    "dapo": ("token", 0.2, 0.28),
    "gspo": ("sequence", 3e-4, 4e-4),
    "reinforce_pp": ("token", 0.2, 0.2),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_those_values_are(name: str) -> None:
    found = Policy.model_validate({"name": name})
    assert (found.normaliser, found.clip_low, found.clip_high) == PUBLISHED[name]


def test_scores_that_are_missing_or_no_numbers_are_told() -> None:
    nan = [[np.full(len(s.sampled), math.nan) for s in r.segments] for r in UNEVEN]
    for given, scores, why in (
        ({"name": "gspo"}, {}, "'now'"),
        ({"kl": 0.1}, {}, "'reference'"),
        ({"correction": "mask"}, {}, "'old'"),
        ({}, {"old": nan}, "'old' of rollout a"),
    ):
        with pytest.raises(ValueError, match=why):
            samples(UNEVEN, policy(**given), **scores)


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_told(reward: float) -> None:
    with pytest.raises(ValueError, match="rollout f of group x"):
        rollout("f", "x", reward)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"correction_low": 3.0}, "correction_low 3.0 is not below correction_high 2.0"),
        ({"name": "ppo"}, "grpo"),
    ],
)
def test_what_cannot_be_meant_is_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match="1 validation error") as error:
        Policy.model_validate(given)
    assert why in str(error.value)
