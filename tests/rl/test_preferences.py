"""Scores of a batch are the model's on every layout, and a step on preferences has the gradient of its formula."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from equigrad.data.samples import Sample
from equigrad.numerics.row import Row
from equigrad.rl.preferences import Pair, objective, samples
from equigrad.rl.samples import Samples, known, together
from equigrad.schedule.division import schedule_samples
from equigrad.trainer import Trainer
from tests.jobs import pool_world
from tests.parallel.layouts import Layout
from tests.parallel.outcomes import Pools, close, layout_job
from tests.rl.policies import Given, one_step

SMALL: dict[str, Any] = {"model__initializer_range": 0.2, "batch__row_tokens": 48}
BETA = 0.3
LAYOUTS: list[Layout] = [{"dp_shard": 2}, {"cp": 2}, {"tp": 2}, {"pp": 2}]


def pairs() -> list[Pair]:
    """Four prompts with two answers each, of different lengths."""
    random, made = np.random.default_rng(0), []
    for number in range(4):
        prompt = random.integers(0, 256, 3 + number)
        both = []
        for _ in range(2):
            ids = np.concatenate([[256], prompt, random.integers(0, 256, int(random.integers(1, 12)))])
            loss = np.arange(len(ids) - 1) >= len(prompt)
            both.append(Sample({"ids": ids[:-1], "labels": ids[1:], "loss": loss}))
        made.append(Pair(*both))
    return made


def each(given: list[Pair]) -> list[Sample]:
    return [sample for pair in given for sample in (pair.chosen, pair.rejected)]


def opened(job: Any, folder: Path, given: Samples, minimised: Any = None) -> Trainer:
    trainer = Trainer(job, folder, pool_world(job), Given(given), minimised)  # type: ignore[arg-type]
    trainer.initialize(job.seed)
    return trainer


def score(trainer: Trainer, given: Samples) -> list[np.ndarray]:
    job = trainer.job
    schedule = schedule_samples(given.refs, job.model, trainer.world.lanes, job.batch.row_tokens, job.batch.packing)
    return trainer.execution.score(given, given.refs, schedule)  # type: ignore[arg-type]


def reference_of(scores: list[np.ndarray]) -> list[np.ndarray]:
    return [x + 0.5 * np.sin(29 * x) for x in scores]


def preference_step(layout: Layout, kind: str, folder: Path) -> dict[str, Any]:
    """The scores before a step, and its figures and gradients."""
    job, given = layout_job(layout, **SMALL, numerics__kind=kind), pairs()
    plain = together([(known(sample, {}), None) for sample in each(given)])
    scores = score(opened(job, folder / "scores", plain), plain)
    made, margins = samples(given, scores, reference_of(scores), BETA)
    record, gradients = one_step(opened(job, folder / "step", made, objective()))
    return {"scores": scores, "loss": record["loss"], "margins": margins, "gradients": gradients}


def test_a_step_on_preferences_is_that_of_its_formula(tmp_path: Path) -> None:
    given = pairs()
    job = layout_job({}, **SMALL)
    plain = together([(known(sample, {}), None) for sample in each(given)])
    model = opened(job, tmp_path / "plain", plain).model.double()

    def logprob(sample: Sample) -> Tensor:
        logits = model(torch.from_numpy(sample.ids), Row.of([len(sample)])).double()
        return logits.log_softmax(-1).gather(1, torch.from_numpy(sample.labels)[:, None]).squeeze(1)

    found = preference_step({}, "native", tmp_path)
    gains = []
    for sample, scores in zip(each(given), found["scores"], strict=True):
        own = logprob(sample)[torch.from_numpy(sample.loss)]
        np.testing.assert_allclose(scores[sample.loss], own.detach().numpy(), rtol=1e-5)
        assert np.isnan(scores[~sample.loss]).all()
        (reference,) = reference_of([scores[sample.loss]])
        gains.append((own - torch.from_numpy(reference)).sum())
    margins = BETA * (torch.stack(gains[::2]) - torch.stack(gains[1::2]))
    loss = -torch.nn.functional.logsigmoid(margins).mean()
    loss.backward()
    assert found["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert found["margins"].margin == pytest.approx(float(margins.detach().mean()), rel=1e-4)
    assert found["margins"].accuracy == float((margins > 0).double().mean())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert (found["gradients"][name] - parameter.grad).norm() <= 1e-4 * parameter.grad.norm(), name


@pytest.mark.parametrize("kind", ["native", "exact"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts_change_neither_scores_nor_the_step(workers: Pools, tmp_path: Path, layout: Layout, kind: str) -> None:
    one = preference_step({}, kind, tmp_path / "one")
    for many in workers(2).run(preference_step, layout, kind, tmp_path):
        for a, b in zip(many["scores"], one["scores"], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5 if kind == "native" else 0)
        assert many["loss"] == (one["loss"] if kind == "exact" else pytest.approx(one["loss"], rel=1e-5))
        for name, gradient in one["gradients"].items():
            theirs = many["gradients"][name]
            assert torch.equal(theirs, gradient) if kind == "exact" else close(theirs, gradient), name
