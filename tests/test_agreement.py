"""Ranks agree before they work: what cannot be computed is refused on all of them, and has changed nothing."""

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from equigrad.checkpoint.rng import rng_state
from equigrad.config import Job
from equigrad.data.stream import Batch, HeldOut
from equigrad.data.tokenizers import byte_tokenizer
from equigrad.evaluation import evaluate
from equigrad.parallel.ranks import SharedUserError
from equigrad.parallel.stop import StopRequest
from equigrad.prepare import agree
from equigrad.trainer import Trainer
from tests.jobs import Records, make_trainer, tiny_job
from tests.workers import Workers

Pools = Callable[[int], Workers]
FIELDS = ["schedule", "normaliser", "data cursor", "configuration"]


def _state(trainer: Trainer) -> list[Any]:
    """All that a step may change, as values to compare."""
    tensors = {name: placed.tensor.tolist() for name, placed in trainer.state().items()}
    counters = {name: value for name, value in trainer.counters.items() if name not in ("step_seconds", "wall_seconds")}
    generator = {name: str(value) for name, value in rng_state().items()}
    return [tensors, trainer.optimizer.updates, trainer.step, counters, trainer.stream.cursor(), generator]


class _UpToTwo(Records):
    """Changes what comes after the second step, and knows the state that it comes upon."""

    def __init__(self, trainer: Trainer, change: Callable[[], None]) -> None:
        super().__init__()
        self._trainer, self._change = trainer, change
        self.before: list[Any] = []

    def step(self, record: dict[str, Any], batch: Any) -> None:
        super().step(record, batch)
        if record["step"] == 2:
            self._change()
            self.before = _state(self._trainer)


def _change_batch(trainer: Trainer, change: Callable[[Batch], Batch]) -> None:
    whole = trainer.stream.next_batch
    trainer.stream.next_batch = lambda: change(whole())  # type: ignore[method-assign]


def empty_step(job: Job, folder: Path) -> tuple[str, list[bool], list[Any]]:
    """The third step has samples, but no token in the loss."""
    trainer = make_trainer(job, folder)
    seen = _UpToTwo(trainer, lambda: _change_batch(trainer, lambda batch: replace(batch, loss_tokens=0)))
    with pytest.raises(SharedUserError) as refused:
        trainer.run(seen, StopRequest())
    same = [a == b for a, b in zip(seen.before, _state(trainer), strict=True)]
    batch = trainer.stream.next_batch()
    return str(refused.value), same, [batch.step, *(ref.document for ref in batch.samples)]


@pytest.mark.parametrize("layout", [{}, {"dp_shard": 2}, {"pp": 2}], ids=str)
def test_an_empty_step_is_refused_on_all_ranks_and_changes_nothing(
    workers: Pools, tmp_path: Path, layout: dict[str, int]
) -> None:
    job = tiny_job(**{f"layout__{name}": degree for name, degree in layout.items()})
    ranks = job.layout.world_size
    results = workers(ranks).run(empty_step, job, tmp_path) if ranks > 1 else [empty_step(job, tmp_path)]
    for text, same, batch in results:
        assert text.startswith("step 3 has no token in the loss")
        assert text.endswith("nothing was changed")
        assert all(same), same
        assert batch == results[0][2]
        assert batch[0] == 3  # the refused batch is the next one still


def disagreement(job: Job, folder: Path, field: str, odd: int) -> tuple[str, list[bool]]:
    """One rank sees the third step differently; what came of it, and what of the state is as before."""
    trainer = make_trainer(job, folder)

    def differ() -> None:
        if trainer.world.rank != odd:
            return
        if field == "schedule":
            _change_batch(trainer, lambda batch: replace(batch, samples=(batch.samples[-1], *batch.samples[:-1])))
        elif field == "normaliser":
            _change_batch(trainer, lambda batch: replace(batch, loss_tokens=batch.loss_tokens - 1))
        elif field == "data cursor":
            trainer.stream._feeds[0].tokens += 1
        else:
            other = job.model_copy(update={"optim": job.optim.model_copy(update={"lr": 0.5})})
            trainer._configuration = other.common()

    seen = _UpToTwo(trainer, differ)
    with pytest.raises(RuntimeError) as refused:
        trainer.run(seen, StopRequest())
    return str(refused.value), [a == b for a, b in zip(seen.before, _state(trainer), strict=True)]


@pytest.mark.parametrize("field", FIELDS)
def test_a_rank_that_means_another_step_is_named_with_what_differs(workers: Pools, tmp_path: Path, field: str) -> None:
    for text, same in workers(4).run(disagreement, tiny_job(layout__dp_shard=4), tmp_path, field, 2):
        assert text.startswith(f"ranks disagree about step 3; {field}: rank 2 differs from rank 0 (")
        assert not any(other in text for other in FIELDS if other != field)
        assert all(same), same
        if field == "configuration":
            assert "(optim.lr 0.5 on rank 2, 0.01 on rank 0)" in text


def empty_evaluation(job: Job, folder: Path) -> str:
    trainer = make_trainer(job, folder)
    held_out = trainer.stream.held_out()
    assert held_out.samples
    empty = HeldOut(held_out.samples, held_out.tokens, 0, held_out.bytes)
    trainer.stream.held_out = lambda *_: empty  # type: ignore[method-assign]
    trainer.execution.evaluate = lambda *_: pytest.fail("it was computed first")  # type: ignore[method-assign]
    with pytest.raises(SharedUserError) as refused:
        trainer.evaluate(Records())
    return str(refused.value)


def test_an_evaluation_without_a_token_in_the_loss_is_refused_on_every_rank_before_any_work(
    workers: Pools, tmp_path: Path
) -> None:
    for text in workers(2).run(empty_evaluation, tiny_job(layout__dp_shard=2), tmp_path):
        assert text.startswith("the held-out set has no token in the loss")


def other_held_out(job: Job, folder: Path) -> list[str]:
    """One rank has another held-out text with as many tokens: seen before anything is computed, and by an evaluation
    where samples are cut elsewhere."""
    trainer, messages = make_trainer(job, folder), []
    if trainer.world.rank == 1:
        trainer.stream._held_out[0] = with_other_digest(trainer.stream._held_out[0])
    with pytest.raises(SharedUserError) as refused:
        agree(job, byte_tokenizer(), trainer.stream, trainer.world)
    messages.append(str(refused.value))
    held_out = trainer.stream.held_out()
    if trainer.world.rank == 1:
        first, second, *others = held_out.samples
        moved = [first._replace(length=first.length - 1), second._replace(length=second.length + 1)]
        held_out = replace(held_out, samples=(*moved, *others))
    with pytest.raises(RuntimeError) as refused_too:
        evaluate(trainer.execution, trainer.stream, held_out, job, trainer.world)
    return [*messages, str(refused_too.value)]


def with_other_digest(side: Any) -> Any:
    other = copy(side)
    other._spans = copy(side._spans)
    other._spans.store = copy(side._spans.store)
    other._spans.store.digest = "0" * 64
    return other


def test_ranks_with_other_held_out_text_are_named(workers: Pools, tmp_path: Path) -> None:
    for early, late in workers(2).run(other_held_out, tiny_job(layout__dp_shard=2), tmp_path):
        assert "ranks disagree about what they are to do; data: rank 1 differs from rank 0" in early
        assert "ranks disagree about the evaluation; schedule: rank 1 differs from rank 0" in late
