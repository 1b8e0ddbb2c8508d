"""From rollouts to the samples of a step. All that a loss needs to know of a token is settled here, before any rank has
seen one: what its rollout is worth, what it is divided by, and what it was likely to be.

Everything is a function of the rollouts, in whatever order they came; sums are Python's exact ones.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from equigrad.config.policy import Policy
from equigrad.data.samples import Sample
from equigrad.numerics.exact.elementary import exp
from equigrad.objectives.objective import Compared, Component, Mixture, Streams
from equigrad.objectives.policy import FARTHEST, KL, Exp, TokenLoss, divergence, likelihood
from equigrad.rl.algorithms.algorithm import Algorithm
from equigrad.rl.rollouts import Rollout
from equigrad.rl.samples import Samples, known, of_segment, together

POLICY_WEIGHT, LIKELIHOOD_WEIGHT = "policy_weight", "likelihood_weight"
Scores = Sequence[Sequence[np.ndarray]]
"""Of each segment of each rollout, the log-probabilities [n] of its tokens under some weights; only those of tokens
that are learned from are looked at."""


def objective(
    algorithm: Algorithm | None, likelihood_coefficient: float = 0.0, distillation_coefficient: float = 0.0
) -> Mixture:
    """What is minimised of the samples that ``samples`` makes, one after the other where it is wanted: the algorithm's
    own loss, and the divergence from the reference; the divergence from a teacher, of which the slope at sampled tokens
    is that of k2 (on-policy distillation: Agarwal et al., arXiv 2306.13649); the cross-entropy of samples to imitate.
    """
    parts = []
    if algorithm is not None:
        config = algorithm.config
        parts.append(Component("policy", POLICY_WEIGHT, algorithm.reads, algorithm.loss))
        if config.kl and config.kl_in == "loss":
            parts.append(_divergence("kl", "reference_logprob", config.kl_kind, config.kl))
    if distillation_coefficient:
        parts.append(_divergence("distillation", "teacher_logprob", "k2", distillation_coefficient))
    if likelihood_coefficient:
        parts.append(Component("likelihood", LIKELIHOOD_WEIGHT, (), _likelihood, likelihood_coefficient))
    return Mixture(parts, None if algorithm is None else Compared(POLICY_WEIGHT, "logprob"))


def _divergence(name: str, other: str, kind: KL, coefficient: float) -> Component:
    def loss(logprob: Tensor, known: Streams, exp: Exp) -> TokenLoss:
        return divergence(logprob, known[other], kind, exp)

    return Component(name, POLICY_WEIGHT, (other,), loss, coefficient)


def _likelihood(logprob: Tensor, known: Streams, exp: Exp) -> TokenLoss:
    return likelihood(logprob)


def samples(
    rollouts: Sequence[Rollout],
    algorithm: Algorithm,
    old: Scores | None = None,
    now: Scores | None = None,
    reference: Scores | None = None,
    teacher: Scores | None = None,
    beside: Sequence[Sample] = (),
    coefficient: float = 1.0,
) -> Samples:
    """
    old:       under the trainer's weights before the update; None: those of sampling
    now:       under the present ones, which algorithms need whose ratio is of whole rollouts
    reference: under the reference model, where a divergence from it is wanted
    teacher:   under a model to learn from
    beside:    samples whose labels in the loss are to become likelier, with a coefficient

    Of rollouts and segments without a token to learn from there is no sample. Order and splitting of rollouts change no
    number: weights and advantages are of whole rollouts.
    """
    config = algorithm.config
    _check(algorithm, rollouts, {"old": old, "now": now, "reference": reference, "teacher": teacher})
    sampling = [[segment.logprob for segment in rollout.segments] for rollout in rollouts]
    old = sampling if old is None else old
    now = old if now is None else now
    numbers = [number for number, rollout in enumerate(rollouts) if rollout.tokens]
    counted = [rollouts[number] for number in numbers]
    penalties = None
    if reference is not None and config.kl_in == "reward":
        penalties = [_spread(rollouts[n], _apart(rollouts[n], old[n], reference[n]), config.kl) for n in numbers]
    of_each = zip(numbers, counted, algorithm.of_tokens(counted, penalties), algorithm.weights(counted), strict=True)
    made, groups = list[tuple[Sample, int | None]](), dict[str, int]()
    for number, rollout, advantages, weight in of_each:
        group = groups.setdefault(rollout.group, len(groups))
        moved = np.concatenate(_apart(rollout, now[number], old[number]))
        (ratio,) = _exp(np.array([math.fsum(moved.tolist()) / rollout.tokens]))
        correction = _correction(config, _apart(rollout, old[number], sampling[number]))
        for place, segment in enumerate(rollout.segments):
            if not segment.learned.any():
                continue
            streams = {"logprob": segment.logprob, "old_logprob": old[number][place], "advantage": advantages[place]}
            streams[POLICY_WEIGHT] = np.zeros(len(segment.sampled))
            streams[POLICY_WEIGHT][segment.learned] = weight * correction[place]
            if algorithm.of_sequences:
                streams["sequence_ratio"] = np.full(len(segment.sampled), ratio)
            if teacher is not None:
                streams["teacher_logprob"] = teacher[number][place]
            if reference is not None:
                streams["reference_logprob"] = reference[number][place]
            made.append((known(of_segment(segment), streams), group))
    found = together([*made, *_weighted(beside, coefficient)])
    return found.reading({name for sample in found.samples for name in sample.streams})


def imitated(given: Sequence[Sample], coefficient: float, streams: Iterable[str]) -> Samples:
    """Samples to imitate, and nothing else, for an objective that reads these streams."""
    return together(_weighted(given, coefficient)).reading(streams)


def _weighted(given: Sequence[Sample], coefficient: float) -> list[tuple[Sample, int | None]]:
    """The mean over all their labels in the loss, times the coefficient."""
    count = sum(int(sample.loss.sum()) for sample in given)
    return [(known(sample, {LIKELIHOOD_WEIGHT: coefficient / max(count, 1)}), None) for sample in given]


def _check(algorithm: Algorithm, rollouts: Sequence[Rollout], scores: Mapping[str, Scores | None]) -> None:
    """``ValueError`` for scores that are missing, or no numbers where they are looked at."""
    config = algorithm.config
    needed = {"old": config.correction != "none", "now": algorithm.of_sequences, "reference": config.kl > 0}
    for name, found in scores.items():
        if found is None and needed.get(name):
            raise ValueError(f"{config.name} with these settings needs {name!r}: log-probabilities of the rollouts")
        for rollout, own in zip(rollouts, found or (), strict=found is not None):
            if not all(np.isfinite(x[s.learned]).all() for s, x in zip(rollout.segments, own, strict=True)):
                raise ValueError(f"{name!r} of rollout {rollout.id} has log-probabilities that are no numbers")


def _spread(rollout: Rollout, values: Sequence[np.ndarray], factor: float) -> list[np.ndarray]:
    """Of each segment, the values where it is learned from, and elsewhere 0."""
    found = [np.zeros(len(segment.sampled)) for segment in rollout.segments]
    for whole, segment, own in zip(found, rollout.segments, values, strict=True):
        whole[segment.learned] = factor * own
    return found


def _apart(rollout: Rollout, at: Sequence[np.ndarray], than: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Of each segment, the differences at the tokens that are learned from."""
    return [
        a[segment.learned].astype(np.float64) - b[segment.learned]
        for segment, a, b in zip(rollout.segments, at, than, strict=True)
    ]


def _correction(config: Policy, apart: Sequence[np.ndarray]) -> list[np.ndarray]:
    """By what the losses of a rollout's tokens are multiplied, since it was sampled from another distribution than the
    trainer's (Yao et al., "Your efficient RL framework secretly brings you off-policy RL training"; masks: Zhao et al.,
    IcePop)."""
    if config.correction == "none":
        return [np.ones(len(segment)) for segment in apart]
    if config.correction_of == "sequence":
        whole = math.fsum(np.concatenate(apart).tolist())
        apart = [np.full(len(segment), whole) for segment in apart]
    ratios = [_exp(segment) for segment in apart]
    if config.correction == "truncate":
        return [np.minimum(ratio, config.correction_high) for ratio in ratios]
    low, high = config.correction_low, config.correction_high
    return [np.where((ratio >= low) & (ratio <= high), ratio, 0.0) for ratio in ratios]


def _exp(x: np.ndarray) -> np.ndarray:
    """In the same bits on every machine."""
    return exp(torch.from_numpy(np.clip(x, -FARTHEST, FARTHEST))).numpy()
