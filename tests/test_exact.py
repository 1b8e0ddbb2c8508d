"""Exact numerics, whole runs: packings, micro-batches, order, threads, overflows, resuming elsewhere."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equigrad.checkpoint.folder import latest
from equigrad.numerics.cache import DecodingCache
from equigrad.numerics.exact.channels import Grids
from equigrad.numerics.row import Row
from equigrad.parallel.stop import StopRequest
from tests.exact_runs import EXACT, differences, exact_steps, outcome, same_bits
from tests.jobs import make_trainer, tiny_job
from tests.parallel.layouts import Layout
from tests.parallel.outcomes import SPARSE, Pools, layout_job
from tests.parallel.test_layouts import ADAPTED, FURTHER, SINKS

MODELS: dict[str, dict[str, Any]] = {"dense": {}, "experts": SPARSE, "sinks": SINKS}
# One process and rows of 96 tokens.
FIGURES = ("loss", "balance_loss", "mtp_loss", "grad_norm", "tokens", "lr")
LENGTHS = [9, 1, 3, 7, 3, 8, 9, 17, 30, 2]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], Any]:
    """Three steps of samples of ``LENGTHS``, all of a step in one row; computed once for a model."""
    known: dict[str, Any] = {}

    def run(changes: dict[str, Any]) -> Any:
        if repr(changes) not in known:
            rows = [[tuple(LENGTHS)]] * 3
            known[repr(changes)] = exact_steps({}, changes, tmp_path_factory.mktemp("whole"), rows)
        return known[repr(changes)]

    return run


def packed(ends: list[int]) -> list[tuple[int, ...]]:
    """Samples of ``LENGTHS``, in their order, in rows; ``ends``: how many rows end after each sample."""
    rows: list[tuple[int, ...]] = [()]
    for length, end in zip(LENGTHS, ends, strict=True):
        rows[-1] += (length,)
        rows += [()] * end
    return rows


PACKINGS = st.lists(st.integers(0, 2), min_size=len(LENGTHS), max_size=len(LENGTHS)).map(packed)


@pytest.mark.parametrize("model", MODELS)
def test_any_packing_has_the_same_bits(model: str, whole: Any) -> None:
    expected = whole(MODELS[model])

    @settings(max_examples=8, deadline=None, derandomize=True)
    @given(st.tuples(PACKINGS, PACKINGS, PACKINGS))
    def check(steps: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            assert not differences(exact_steps({}, MODELS[model], Path(folder), steps), expected, FIGURES)

    check()


@pytest.mark.parametrize(
    ("how", "changes"),
    [
        *(("threads", changes) for changes in (SPARSE, FURTHER, ADAPTED)),
        *(("recomputed", changes) for changes in (SPARSE, FURTHER, ADAPTED)),
    ],
    ids=str,
)
def test_how_it_is_computed_changes_no_bit(how: str, changes: dict[str, Any], whole: Any, tmp_path: Path) -> None:
    rows, more, threads = [[tuple(LENGTHS)]] * 3, dict(changes), torch.get_num_threads()
    if how == "recomputed":
        more |= {"memory__recompute": "block", "memory__saved_logits_mb": 0}
    try:
        torch.set_num_threads(2 if how == "threads" else threads)
        found = exact_steps({}, more, tmp_path, rows)
    finally:
        torch.set_num_threads(threads)
    assert not differences(found, whole(changes))


def overflow(layout: Layout, folder: Path, at: int, rank: int) -> dict[str, Any]:
    """Three steps; in one of them a rank believes that it has seen a value far beyond its grid."""
    trainer = make_trainer(layout_job(layout, **EXACT, train__steps=3), folder)
    plain, calls = Grids.end_step, []

    def end_step(self: Grids, over_ranks: Any) -> bool:
        calls.append(None)
        # The first step calibrates, and is done again.
        if len(calls) == at + 1 and trainer.world.rank == rank:
            self._own["model.norm.weight/sum"].seen[3] = 2.0**40
        return plain(self, over_ranks)

    with patch.object(Grids, "end_step", end_step):
        return outcome(trainer, 3)


@pytest.mark.parametrize("layout", [{"dp_shard": 2}, {"cp": 2, "tp": 2}, {"dp_replicate": 2}], ids=str)
def test_an_overflow_on_one_rank_is_done_again_on_all(workers: Pools, layout: Layout, tmp_path: Path) -> None:
    one = overflow({}, tmp_path, 2, 0)
    plain = outcome(make_trainer(layout_job({}, **EXACT, train__steps=3), tmp_path), 3)
    assert one["redone"] == plain["redone"] + 1
    assert plain["records"][0] == one["records"][0]
    for rank in range(2):
        pool = workers(layout_job(layout).layout.world_size)
        for many in pool.run(overflow, layout, tmp_path, 2, rank):
            assert not differences(many, one, FIGURES)


def two_steps(layout: Layout, changes: dict[str, Any], folder: Path, resume: bool) -> dict[str, Any]:
    """The first two steps, and a checkpoint; or what follows it."""
    trainer = make_trainer(layout_job(layout, **changes, **EXACT, train__steps=4), folder)
    if resume:
        checkpoint = latest(folder / "checkpoints")
        assert checkpoint is not None
        trainer.resume(checkpoint)
    found = outcome(trainer, 2)
    trainer.save()
    trainer.checkpointer.close()
    return found


@pytest.mark.parametrize(
    ("first", "second", "changes"),
    [
        ({"tp": 2}, {"dp_shard": 2}, SINKS),
        ({"dp_shard": 2, "ep": 2}, {"pp": 2}, SPARSE),
        ({}, {"cp": 2}, ADAPTED),
    ],
    ids=str,
)
def test_a_run_goes_on_elsewhere_as_if_it_had_never_stopped(
    workers: Pools, first: Layout, second: Layout, changes: dict[str, Any], tmp_path: Path
) -> None:
    def run(layout: Layout, resume: bool) -> Any:
        size = layout_job(layout, **changes).layout.world_size
        if size == 1:
            return [two_steps(layout, changes, tmp_path, resume)]
        return workers(size).run(two_steps, layout, changes, tmp_path, resume)

    run(first, False)
    through = outcome(make_trainer(layout_job({}, **changes, **EXACT, train__steps=4), tmp_path / "through"), 4)
    for many in run(second, True):
        assert many["records"] == [
            {**record, "executed_tokens": many["records"][n]["executed_tokens"]}
            for n, record in enumerate(through["records"][2:])
        ]
        assert many["state"] == through["state"]


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, 1e60])
def test_a_step_that_is_not_finite_changes_nothing(wrong: float, tmp_path: Path) -> None:
    """Values that are not finite, or become so on their way, in one weight."""
    trainer = make_trainer(tiny_job(**EXACT, train__non_finite="skip"), tmp_path)
    trainer.update(trainer.stream.next_batch(), StopRequest())
    weight = trainer.parameters["model.layers.0.mlp.up_proj.weight"].tensor
    kept = weight.clone()
    weight[3, 2] = wrong
    before = {n: p.tensor.clone() for n, p in trainer.state().items()}
    trainer.update(trainer.stream.next_batch(), StopRequest())
    assert trainer.counters["skipped"] == 1
    after = trainer.state()
    assert not [n for n, x in before.items() if not same_bits(after[n].tensor, x)]
    # And the next one is as good as ever.
    weight.copy_(kept)
    record, _ = trainer.update(trainer.stream.next_batch(), StopRequest())
    assert trainer.counters["skipped"] == 1
    assert 0 < record["grad_norm"] < 10


def test_it_learns_as_native_numerics_do(tmp_path: Path) -> None:
    """Losses of twenty steps, and the gradients of the first against float32's."""
    losses = {}
    for kind in ("native", "exact"):
        trainer = make_trainer(tiny_job(numerics__kind=kind, train__steps=20), tmp_path / kind)
        losses[kind] = [trainer.update(trainer.stream.next_batch(), StopRequest())[0]["loss"] for _ in range(20)]
    assert losses["exact"] == pytest.approx(losses["native"], rel=2e-3)
    assert losses["exact"][-1] < losses["exact"][0] - 1.5


def test_what_is_computed_one_by_one_has_the_bits_of_the_training_forward(tmp_path: Path) -> None:
    """Logits of whole texts, and of the same with a cache: prompts first, then token by token."""
    texts = [torch.randint(0, 257, (n,), generator=torch.Generator().manual_seed(n)) for n in (23, 17)]
    heads = [4, 1]
    for changes in (SINKS, SPARSE):
        model = make_trainer(tiny_job(**changes, **EXACT), tmp_path).model
        config = model.config
        with torch.no_grad():
            whole = model(torch.cat(texts), Row.of([len(text) for text in texts])).split([len(t) for t in texts])
            cache = DecodingCache(2, 40, config.kv_heads, config.head_size, torch.float32, torch.device("cpu"))
            prompts = torch.cat([text[:n] for text, n in zip(texts, heads, strict=True)])
            found = [[part] for part in model(prompts, cache.prefill(heads)).split(heads)]
            for place in range(16):
                ids = torch.stack([text[n + place] for text, n in zip(texts, heads, strict=True)])
                for parts, logits in zip(found, model(ids, cache.step()), strict=True):
                    parts.append(logits[None])
        for parts, logits in zip(found, whole, strict=True):
            together = torch.cat(parts)
            assert same_bits(together, logits[: len(together)])
