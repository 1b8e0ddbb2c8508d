"""Random rollouts, and a step of a policy on them on any layout."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from equigrad.config.policy import Policy
from equigrad.data.samples import Sample, SampleRef
from equigrad.data.stream import Batch
from equigrad.parallel.stop import StopRequest
from equigrad.rl.algorithms import algorithm
from equigrad.rl.batch import objective, samples
from equigrad.rl.rollouts import Rollout, Segment
from equigrad.rl.samples import Samples
from equigrad.trainer import Trainer
from tests.jobs import assemble, pool_world
from tests.parallel.layouts import Layout
from tests.parallel.outcomes import layout_job

NAMES = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp")
KL = {"kl": 0.05}


def rollouts(count: int = 9, seed: int = 0) -> list[Rollout]:
    """Uneven groups of one prompt each, completions of 1 to 14 tokens, some turns of an environment among them."""
    random, made = np.random.default_rng(seed), []
    for number in range(count):
        group = number * number // 9
        prompt = np.random.default_rng([seed, group]).integers(0, 256, 3 + group)
        length = int(random.integers(1, 15))
        ids = np.concatenate([[256], prompt, random.integers(0, 256, length)])
        sampled = np.arange(len(ids) - 1) >= len(prompt)
        sampled[len(prompt) + 1 :] &= random.random(length - 1) < 0.8
        logprob = np.where(sampled, -4 - random.random(len(sampled)), 0).astype(np.float32)
        segment = Segment(ids, sampled, logprob, np.zeros(len(sampled), np.int64))
        made.append(Rollout(f"r{number}", f"g{group}", (segment,), float(random.integers(0, 3))))
    return made


def split(rollout: Rollout) -> Rollout:
    """The same with every other sampled token learned in one segment and the rest in another."""
    (segment,) = rollout.segments
    even = np.cumsum(segment.sampled) % 2 == 0
    parts = (replace(segment, sampled=segment.sampled & side) for side in (even, ~even))
    return replace(rollout, segments=tuple(parts))


def imitated() -> list[Sample]:
    """Two samples beside the rollouts, some labels of which are in the loss."""
    random, made = np.random.default_rng(7), []
    for length in (11, 6):
        ids = random.integers(0, 256, length + 1)
        made.append(Sample({"ids": ids[:-1], "labels": ids[1:], "loss": np.arange(length) > 3}))
    return made


class Given:
    """A stream of one step."""

    def __init__(self, made: Samples) -> None:
        self._made = made

    def next_batch(self) -> Batch:
        return self._made.batch(1)

    def read(self, ref: SampleRef) -> Sample:
        return self._made.read(ref)

    def cursor(self) -> dict[str, Any]:
        return {}


def made(name: str, given: Sequence[Rollout], policy: dict[str, Any], mixed: bool) -> tuple[Samples, Any]:
    """Samples and objective. The other log-probabilities are near those of sampling, and functions of these."""
    chosen = algorithm(Policy.model_validate({"name": name, **policy}))
    own = [[segment.logprob.astype(np.float64) for segment in rollout.segments] for rollout in given]
    old, now, reference = ([[x + f * np.sin(37 * x) for x in of] for of in own] for f in (0.1, 0.2, 0.4))
    found = samples(given, chosen, old, now, reference if chosen.config.kl else None, None, imitated() if mixed else ())
    return found, objective(chosen, 0.3 if mixed else 0.0)


def one_step(trainer: Trainer) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The record of a step and its gradients, whole, before they are clipped; a collective."""
    kept, norm = dict[str, Tensor](), trainer.norm

    def keep(gradients: Any) -> float:
        whole = assemble({n: p.renamed(n) for n, p in gradients.items()})
        kept.update({n: g.clone() for n, g in whole.items()})
        return norm(gradients)

    trainer.norm = keep  # type: ignore[method-assign]
    record, _ = trainer.update(trainer.stream.next_batch(), StopRequest())
    return record, kept


def policy_step(
    layout: Layout, changes: dict[str, Any], folder: Path, name: str, policy: dict[str, Any], apart: bool, mixed: bool
) -> dict[str, Any]:
    """Figures and gradients of one step, on the ranks of this pool."""
    job = layout_job(layout, **changes)
    given = [split(r) for r in rollouts()] if apart else rollouts()
    found, minimised = made(name, given, policy, mixed)
    trainer = Trainer(job, folder, pool_world(job), Given(found), minimised)  # type: ignore[arg-type]
    trainer.initialize(job.seed)
    record, gradients = one_step(trainer)
    told = ("clip_share", "logprob_diff", "logprob_diff_max", "sampled_kl")
    losses = [f"{component.name}_loss" for component in minimised.components]
    figures = {n: record[n] for n in ("loss", "grad_norm", "loss_tokens", *losses, *told)}
    return {"figures": figures, "gradients": gradients}
