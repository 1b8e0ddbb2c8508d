"""What a layout computed in three steps, and the comparison with one process."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from equigrad.config import Job
from equigrad.data.samples import Sample, SampleRef
from equigrad.data.stream import Batch
from equigrad.parallel.stop import StopRequest
from equigrad.schedule.packing import Schedule
from tests.jobs import assemble, make_trainer, tiny_job, whole_parameters
from tests.parallel.layouts import Layout
from tests.workers import Workers

Pools = Callable[[int], Workers]
Outcome = dict[str, Any]
Rows = Sequence[Sequence[int]]
"""A step: each row is the lengths of its samples, and a row without samples is empty."""

# Layer 0 dense, layer 1 with experts, a shared one, and both ways of balancing; 5 experts do not divide by 2 or 4.
EXPERTS = {
    "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [0],
    "shared_expert_intermediate_size": 16, "shared_expert_gate": True,
    "router_aux_loss_coef": 0.05, "router_bias_update_rate": 0.01,
}  # fmt: skip
# With larger weights attention differs from a mean, and its gradients from rounding.
SPARSE = {"model__initializer_range": 0.05, "model__experts": EXPERTS}


class GivenRows:
    """A stream whose steps have the rows that a test asks for; a third of the labels is out of the loss, and of every
    fourth sample all but one."""

    def __init__(self, steps: Sequence[Rows], lanes: int) -> None:
        self._steps, self._lanes, self._step = steps, lanes, 0

    def next_batch(self) -> Batch:
        self._step += 1
        refs = [self._ref(number, length) for number, length in enumerate(self._lengths())]
        return Batch(self._step, tuple(refs), sum(self._lengths()), sum(ref.loss_tokens for ref in refs))

    def schedule(self, *_: Any) -> Schedule:
        """The rows of the present step as they are, one after another to the lanes, the last round filled up."""
        numbers = iter(range(len(self._lengths())))
        rows = [tuple(next(numbers) for _ in row) for row in self._steps[self._step - 1]]
        rows += [()] * (-len(rows) % self._lanes)
        rounds = tuple(tuple(rows[i : i + self._lanes]) for i in range(0, len(rows), self._lanes))
        return Schedule(rounds, ("text",) * len(rounds), tuple(1.0 + max(map(len, round_)) for round_ in rounds))

    def read(self, ref: SampleRef) -> Sample:
        ids = np.random.default_rng([self._step, ref.document]).integers(0, 257, ref.length + 1)
        return Sample({"ids": ids[:-1], "labels": ids[1:], "loss": self._loss(ref.document, ref.length)})

    def cursor(self) -> dict[str, Any]:
        return {"step": self._step}

    def _lengths(self) -> list[int]:
        return [length for row in self._steps[self._step - 1] for length in row]

    def _ref(self, number: int, length: int) -> SampleRef:
        return SampleRef(0, number, 0, length, int(self._loss(number, length).sum()))

    @staticmethod
    def _loss(number: int, length: int) -> np.ndarray:
        at = np.arange(length)
        return at == length - 1 if number % 4 == 3 else (at % 3 > 0) | (at == 0)


def layout_job(layout: Layout, **changes: Any) -> Job:
    """The tiny job on a layout. Its epsilon makes an update a smooth function of its gradient: with AdamW's usual one
    the first update is the gradient's sign, and what is compared would be how that enlarges rounding."""
    choices = {f"layout__{key}": value for key, value in layout.items()}
    return tiny_job(**{"train__steps": 3, "model__num_key_value_heads": 4, "optim__eps": 1e-5} | choices | changes)


def grouped(batch: Batch) -> Batch:
    """Pairs of samples belong together, and every fifth is alone."""
    samples = [ref._replace(group=None if at % 5 == 0 else at // 2) for at, ref in enumerate(batch.samples)]
    return replace(batch, samples=tuple(samples))


def three_steps(layout: Layout, changes: dict[str, Any], folder: Path, given: Any = None) -> Outcome:
    """Train for three steps, of the job's own text (``grouped``: in groups) or of ``given`` rows, on the ranks of this
    pool."""
    trainer, gradients, stop = make_trainer(layout_job(layout, **changes), folder), [], StopRequest()
    plain, scheduled = trainer.gradients, nullcontext()
    if given == "grouped":
        batches = map(grouped, iter(trainer.stream.next_batch, None))
        trainer.stream.next_batch = batches.__next__  # type: ignore[method-assign]
    elif given is not None:
        stream = GivenRows(given, trainer.world.lanes)
        trainer.stream = stream  # type: ignore[assignment]
        scheduled = patch("equigrad.trainer.schedule_samples", stream.schedule)  # type: ignore[assignment]

    def kept() -> Any:
        found = plain()
        gradients.append(assemble({n: p.renamed(n) for n, p in found.items()}))
        return found

    trainer.gradients = kept  # type: ignore[method-assign]
    records, counts = [], []
    for _ in range(3):
        with scheduled:
            records.append(trainer.update(trainer.stream.next_batch(), stop)[0])
        counts.append({n: p.tensor.tolist() for n, p in trainer.balance.state().items()})
    return {"records": records, "gradients": gradients, "parameters": whole_parameters(trainer), "counts": counts}


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Within 1e-5 of the tensor's size."""
    return bool((found - expected).norm() <= 1e-5 * expected.norm() + 1e-9)


def check(workers: Pools, alone: Any, folder: Path, layout: Layout, changes: dict[str, Any], given: Any = None) -> None:
    """Every rank of the layout has what one process has."""
    pool = workers(layout_job(layout, **changes).layout.world_size)
    for rank, many in enumerate(pool.run(three_steps, layout, changes, folder, given)):
        same(many, alone(changes, given), rank)


def same(many: Outcome, one: Outcome, rank: int) -> None:
    """Loss, gradient norm and counts, every gradient, and every parameter."""
    assert many["counts"] == one["counts"], rank  # one token that chooses otherwise, and nothing below holds
    for key in ("loss", "balance_loss", "mtp_loss", "grad_norm", "tokens", "executed_tokens"):
        if key in one["records"][0]:
            found, expected = ([record[key] for record in outcome["records"]] for outcome in (many, one))
            assert found == pytest.approx(expected, rel=1e-5), (rank, key)
    for step in range(3):
        assert many["gradients"][step].keys() == one["gradients"][step].keys(), (rank, step)
        wrong = [n for n, g in one["gradients"][step].items() if not close(many["gradients"][step][n], g)]
        assert not wrong, (rank, step, wrong)
    wrong = [n for n, p in one["parameters"].items() if not close(many["parameters"][n], p)]
    assert not wrong, (rank, wrong)
