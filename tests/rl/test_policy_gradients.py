"""A policy's gradients are those of its formula, and do not depend on how the work was divided: layout, packing,
micro-batches, or into how many samples a rollout was split."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from equigrad.config.policy import Policy
from equigrad.numerics.row import Row
from equigrad.parallel.stop import StopRequest
from equigrad.rl.rollouts import Rollout
from equigrad.trainer import Trainer
from tests.jobs import make_trainer, pool_world
from tests.parallel.layouts import Layout
from tests.parallel.outcomes import Pools, close, layout_job
from tests.rl.policies import KL, NAMES, Given, imitated, made, policy_step, rollouts

DENSE: dict[str, Any] = {"model__initializer_range": 0.2, "batch__row_tokens": 64}
SMALL_ROWS = DENSE | {"batch__row_tokens": 48}
LAYOUTS: list[Layout] = [{"dp_shard": 2}, {"cp": 2}, {"tp": 2}, {"pp": 2}, {"cp": 2, "tp": 2}]


def formula(name: str, policy: Policy, given: list[Rollout], logprobs: list[Tensor]) -> Tensor:
    """The loss as publications write it, from log-probabilities [n] of each rollout with a gradient. Independent of the
    package: only its records are read."""
    rewards, total = [r.reward for r in given], torch.zeros((), dtype=torch.float64)
    masks = [torch.from_numpy(r.segments[0].sampled) for r in given]
    everything = sum(int(mask.sum()) for mask in masks)
    for rollout, mask, logprob in zip(given, masks, logprobs, strict=True):
        group = np.array([o.reward for o in given if o.group == rollout.group])
        spread = group.std(ddof=1) if len(group) > 1 else 0.0
        if name == "dr_grpo":
            advantage = rollout.reward - group.mean()
        elif name == "rloo":
            others = (group.sum() - rollout.reward) / (len(group) - 1) if len(group) > 1 else rollout.reward
            advantage = rollout.reward - others
        elif name == "reinforce_pp":
            tokens = np.repeat(rewards, [int(m.sum()) for m in masks])
            advantage = (rollout.reward - tokens.mean()) / (tokens.std(ddof=1) + 1e-6)
        else:
            advantage = (rollout.reward - group.mean()) / (spread + 1e-6)
        sampling = torch.from_numpy(rollout.segments[0].logprob.astype(np.float64))[mask]
        old, now, reference = (sampling + f * torch.sin(37 * sampling) for f in (0.1, 0.2, 0.4))
        own, low, high = logprob[mask], policy.clip_low, policy.clip_high
        if name == "gspo":
            # A straight-through ratio: the value of the batch before the step, the slope of s.
            s = ((now - old).mean() + (own - own.detach()).mean()).exp()
            terms = -torch.minimum(s * advantage, s.clamp(1 - low, 1 + high) * advantage).expand(len(own))
        elif name == "cispo":
            terms = -(own - old).detach().exp().clamp(1 - low, 1 + high) * advantage * own
        else:
            r = (own - old).exp()
            terms = -torch.minimum(r * advantage, r.clamp(1 - low, 1 + high) * advantage)
        if policy.kl:
            d = own - reference
            terms = terms + policy.kl * ((-d).exp() - 1 + d)
        if policy.normaliser == "token":
            total = total + terms.sum() / everything
        else:
            length = {"sequence": len(own), "constant": policy.longest, "rollout": 1}[policy.normaliser]
            total = total + terms.sum() / (len(given) * length)
    return total


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mixed", [False, True], ids=["alone", "mixed"])
def test_gradients_are_those_of_the_formula(tmp_path: Path, name: str, mixed: bool) -> None:
    trainer = make_trainer(layout_job({}, **DENSE), tmp_path / "plain")
    model, given = trainer.model.double(), rollouts()

    def logprob(ids: np.ndarray, labels: np.ndarray) -> Tensor:
        logits = model(torch.from_numpy(ids), Row.of([len(ids)])).double()
        return logits.log_softmax(-1).gather(1, torch.from_numpy(labels)[:, None]).squeeze(1)

    policy = Policy.model_validate({"name": name, **KL})
    loss = formula(name, policy, given, [logprob(r.segments[0].ids[:-1], r.segments[0].ids[1:]) for r in given])
    if mixed:
        each = [-logprob(s.ids, s.labels)[torch.from_numpy(s.loss)] for s in imitated()]
        loss = loss + 0.3 * torch.cat(each).mean()
    loss.backward()
    found = policy_step({}, DENSE, tmp_path / "ours", name, KL, False, mixed)
    assert found["figures"]["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    for parameter, gradient in found["gradients"].items():
        reference = dict(model.named_parameters())[parameter].grad
        assert (gradient - reference).norm() <= 1e-4 * reference.norm() + 1e-9, parameter


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """What one process has in large rows; computed once."""

    @cache
    def run(name: str, kind: str, apart: bool) -> dict[str, Any]:
        changes = DENSE | {"numerics__kind": kind}
        return policy_step({}, changes, tmp_path_factory.mktemp("alone"), name, KL, apart, True)

    return run


def same(many: dict[str, Any], one: dict[str, Any], bits: bool) -> None:
    for name, figure in one["figures"].items():
        assert many["figures"][name] == (figure if bits else pytest.approx(figure, rel=1e-5, abs=1e-9)), name
    for name, gradient in one["gradients"].items():
        theirs = many["gradients"][name]
        assert torch.equal(theirs, gradient) if bits else close(theirs, gradient), name


@pytest.mark.parametrize("kind", ["native", "exact"])
@pytest.mark.parametrize("name", NAMES)
def test_packing_and_splitting_change_nothing(tmp_path: Path, alone: Any, name: str, kind: str) -> None:
    """To the bit, but for splitting: what comes before the split is computed once for each part, and gradients of its
    tokens are rounded in each."""
    changes = SMALL_ROWS | {"numerics__kind": kind}
    packed = policy_step({}, changes, tmp_path, name, KL, True, True)
    same(packed, alone(name, kind, True), kind == "exact")
    whole = alone(name, kind, False)
    for parameter, gradient in whole["gradients"].items():
        # Operands of exact numerics are rounded to fewer bits than float32 has.
        far = (packed["gradients"][parameter] - gradient).norm() / gradient.norm()
        assert far < (1e-5 if kind == "native" else 3e-4), parameter


def every(layout: Layout, kind: str, folder: Path) -> dict[str, dict[str, Any]]:
    """A step of each algorithm, rollouts split."""
    changes = SMALL_ROWS | {"numerics__kind": kind}
    return {name: policy_step(layout, changes, folder / name, name, KL, True, True) for name in NAMES}


@pytest.mark.parametrize("kind", ["native", "exact"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts_change_nothing(workers: Pools, tmp_path: Path, alone: Any, layout: Layout, kind: str) -> None:
    size = layout_job(layout, **DENSE).layout.world_size
    for found in workers(size).run(every, layout, kind, tmp_path):
        for name in NAMES:
            same(found[name], alone(name, kind, True), kind == "exact")


def disagreeing(folder: Path) -> str:
    """Rank 1 has another reward."""
    job = layout_job({"dp_shard": 2}, **DENSE)
    given = rollouts()
    if dist.get_rank() == 1:
        given[0] = replace(given[0], reward=given[0].reward + 1)
    found, minimised = made("grpo", given, {}, False)
    trainer = Trainer(job, folder, pool_world(job), Given(found), minimised)  # type: ignore[arg-type]
    trainer.initialize(0)
    try:
        trainer.update(trainer.stream.next_batch(), StopRequest())
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_that_have_other_rollouts_say_so_before_any_work(workers: Pools, tmp_path: Path) -> None:
    for error in workers(2).run(disagreeing, tmp_path):
        assert "contents" in error
