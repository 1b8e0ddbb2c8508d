"""From rollouts to the samples of a step. All that a loss needs to know of a token is settled here, before any rank has
seen one: what its rollout is worth, what it is divided by, and what it was likely to be.

Everything is a function of the rollouts, in whatever order they came; sums are Python's exact ones.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from equigrad.config.policy import Policy
from equigrad.data.samples import Sample, SampleRef
from equigrad.data.stream import Batch
from equigrad.numerics.exact.elementary import exp
from equigrad.objectives.objective import Component, Mixture, Streams
from equigrad.objectives.policy import FARTHEST, KL, Exp, TokenLoss, divergence, likelihood
from equigrad.rl.algorithms.algorithm import Algorithm
from equigrad.rl.rollouts import Rollout

POLICY_WEIGHT, LIKELIHOOD_WEIGHT = "policy_weight", "likelihood_weight"
Scores = Sequence[Sequence[np.ndarray]]
"""Of each segment of each rollout, the log-probabilities [n] of its tokens under some weights; only those of tokens
that are learned from are looked at."""


@dataclass(frozen=True, eq=False)
class Samples:
    """The samples of a step, and who reads them."""

    samples: tuple[Sample, ...]
    refs: tuple[SampleRef, ...]

    def read(self, ref: SampleRef) -> Sample:
        return self.samples[ref.document]

    def batch(self, step: int) -> Batch:
        """All of them as a step."""
        tokens, labels = (sum(getattr(ref, name) for ref in self.refs) for name in ("length", "loss_tokens"))
        return Batch(step, self.refs, tokens, labels)


def objective(algorithm: Algorithm, likelihood_coefficient: float = 0.0) -> Mixture:
    """What is minimised of the samples that ``samples`` makes: the algorithm's own loss; the divergence from the
    reference, where it has one; and where samples to imitate are mixed in, ``likelihood_coefficient`` times their
    cross-entropy."""
    config = algorithm.config
    parts = [Component("policy", POLICY_WEIGHT, algorithm.reads, algorithm.loss)]
    if config.kl and config.kl_in == "loss":
        parts.append(Component("kl", POLICY_WEIGHT, ("reference_logprob",), partial(_kl, config.kl_kind), config.kl))
    if likelihood_coefficient:
        parts.append(Component("likelihood", LIKELIHOOD_WEIGHT, (), _likelihood, likelihood_coefficient))
    return Mixture(parts)


def _kl(kind: KL, logprob: Tensor, known: Streams, exp: Exp) -> TokenLoss:
    return divergence(logprob, known["reference_logprob"], kind, exp)


def _likelihood(logprob: Tensor, known: Streams, exp: Exp) -> TokenLoss:
    return likelihood(logprob)


def samples(
    rollouts: Sequence[Rollout],
    algorithm: Algorithm,
    old: Scores | None = None,
    now: Scores | None = None,
    reference: Scores | None = None,
    imitated: Sequence[Sample] = (),
) -> Samples:
    """
    old:       under the trainer's weights before the update; None: those of sampling
    now:       under the present ones, for algorithms whose ratio is of whole rollouts; None: ``old``
    reference: under the reference model, where a divergence from it is wanted
    imitated:  samples whose labels in the loss are to become likelier, beside the rollouts

    Of rollouts and segments without a token to learn from there is no sample. Order and splitting of rollouts change no
    number: weights and advantages are of whole rollouts.
    """
    sampling = [[segment.logprob for segment in rollout.segments] for rollout in rollouts]
    old = sampling if old is None else old
    now = old if now is None else now
    numbers = [number for number, rollout in enumerate(rollouts) if rollout.tokens]
    counted = [rollouts[number] for number in numbers]
    of_each = zip(numbers, counted, algorithm.advantages(counted), algorithm.weights(counted), strict=True)
    made, groups = list[tuple[Sample, int | None]](), dict[str, int]()
    for number, rollout, advantage, weight in of_each:
        group = groups.setdefault(rollout.group, len(groups))
        off = _apart(rollout, old[number], sampling[number])
        moved = np.concatenate(_apart(rollout, now[number], old[number]))
        ratio = _exp(np.array([math.fsum(moved.tolist()) / rollout.tokens]))
        correction = _correction(algorithm.config, off)
        for place, segment in enumerate(rollout.segments):
            if not segment.learned.any():
                continue
            known = {"logprob": segment.logprob, "old_logprob": old[number][place]}
            known |= {"advantage": np.full(len(segment.sampled), advantage), "sequence_ratio": ratio}
            known[POLICY_WEIGHT] = np.zeros(len(segment.sampled))
            known[POLICY_WEIGHT][segment.learned] = weight * correction[place]
            if reference is not None:
                known["reference_logprob"] = reference[number][place]
                if algorithm.config.kl_in == "reward":
                    apart = np.subtract(known["old_logprob"], known["reference_logprob"], dtype=np.float64)
                    known["advantage"] = known["advantage"] - algorithm.config.kl * apart
            made.append((_sample(segment.ids[:-1], segment.ids[1:], segment.learned, known), group))
    count = sum(int(sample.loss.sum()) for sample in imitated)
    for sample in imitated:
        weight_of_each = np.full(len(sample), 1 / max(count, 1))
        made.append((_sample(sample.ids, sample.labels, sample.loss, {LIKELIHOOD_WEIGHT: weight_of_each}), None))
    return _alike(made)


def _alike(made: Sequence[tuple[Sample, int | None]]) -> Samples:
    """All with the same streams: what is not known of a sample counts for nothing there."""
    names = sorted({name for sample, _ in made for name in sample.streams})
    refs = [SampleRef(0, i, 0, len(s), int(s.loss.sum()), group=group) for i, (s, group) in enumerate(made)]
    return Samples(tuple(Sample({n: s.streams.get(n, np.zeros(len(s))) for n in names}) for s, _ in made), tuple(refs))


def _sample(ids: np.ndarray, labels: np.ndarray, loss: np.ndarray, known: dict[str, np.ndarray]) -> Sample:
    """What is known of tokens that are in no loss is 0, whatever it was."""
    with np.errstate(invalid="ignore"):
        cleared = {name: np.where(loss, stream, 0.0).astype(np.float64) for name, stream in known.items()}
    return Sample({"ids": ids, "labels": labels, "loss": loss, **cleared})


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
