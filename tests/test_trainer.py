"""The loop: equal to a bare PyTorch loop, and independent of layout, packing, accumulation and memory policy."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from equigrad.checkpoint.folder import latest
from equigrad.config import Job
from equigrad.data.stream import Stream
from equigrad.data.tokenizers import byte_tokenizer
from equigrad.errors import UserError
from equigrad.models.huggingface import to_huggingface
from equigrad.optim.schedule import learning_rate
from equigrad.parallel.stop import StopRequest
from tests.jobs import Records, make_trainer, mean_loss, pool_world, tiny_job, train, whole_parameters
from tests.workers import Workers

Pools = Callable[[int], Workers]


def assert_close(
    a: tuple[list[dict[str, Any]], dict[str, torch.Tensor]], b: tuple[list[dict[str, Any]], dict[str, torch.Tensor]]
) -> None:
    """Same losses and norms up to rounding, same tokens exactly, same parameters up to rounding."""
    for x, y in zip(a[0], b[0], strict=True):
        assert x["loss"] == pytest.approx(y["loss"], rel=1e-5)
        assert x["grad_norm"] == pytest.approx(y["grad_norm"], rel=1e-4)
        assert (x["tokens"], x["loss_tokens"]) == (y["tokens"], y["loss_tokens"])
        assert x["executed_tokens"] == x["tokens"] == y["executed_tokens"]
    for name in a[1]:
        torch.testing.assert_close(a[1][name], b[1][name], rtol=0, atol=2e-4)


def test_training_equals_a_bare_loop_over_transformers(tmp_path: Path) -> None:
    """Samples one by one, unpacked, through another implementation and PyTorch's own AdamW."""
    from transformers import AutoConfig, AutoModelForCausalLM

    job = tiny_job()
    records, parameters = train(job, tmp_path)
    raw = to_huggingface(job.model, None, None, "float32")
    hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(raw.pop("model_type"), **raw))
    hf.load_state_dict(make_trainer(job, tmp_path / "b").model.state_dict(), strict=False)
    groups = [
        {"params": [p for p in hf.parameters() if p.ndim == 2], "weight_decay": job.optim.weight_decay},
        {"params": [p for p in hf.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=job.optim.betas, eps=job.optim.eps)
    stream = Stream(job.data, job.batch, job.seed, byte_tokenizer())
    for step, record in enumerate(records):
        samples = [stream.read(ref) for ref in stream.next_batch().samples]
        loss = mean_loss(hf, samples)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(hf.parameters(), job.optim.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(job.optim, step, job.train.steps)
        optimizer.step()
        optimizer.zero_grad()
        assert record["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert record["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    for name, parameter in hf.named_parameters():
        torch.testing.assert_close(parameters[name], parameter.data, rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    "layout",
    [
        {"dp_shard": 2},
        {"dp_replicate": 2},
        {"dp_shard": 4},
        {"dp_replicate": 2, "dp_shard": 2},
        {"dp_shard": 2, "reduce_every_round": True, "reshard_after_forward": False},
    ],
    ids=str,
)
def test_every_layout_gives_the_same_update(workers: Pools, tmp_path: Path, layout: dict[str, Any]) -> None:
    job = tiny_job(layout=layout)
    reference = train(tiny_job(), tmp_path / "one")
    results = workers(job.layout.world_size).run(train, job, tmp_path / "many")
    for result in results:
        assert_close(result, reference)


def test_lanes_without_samples_take_part_with_nothing(workers: Pools, tmp_path: Path) -> None:
    """Three samples a step on four lanes, then one sample on four: idle lanes hold zero tokens."""
    for samples in (3, 1):
        changes = {"batch__tokens": None, "batch__samples": samples, "train__steps": 3}
        results = workers(4).run(train, tiny_job(**changes, layout__dp_shard=4), tmp_path / f"many{samples}")
        assert_close(results[0], train(tiny_job(**changes), tmp_path / f"one{samples}"))


@pytest.mark.parametrize(
    "changes",
    [
        {"batch__row_tokens": 48},
        {"batch__row_tokens": 500},
        {"batch__packing": "first_fit"},
        {"memory__saved_logits_mb": 0},
    ],
    ids=str,
)
def test_packing_and_accumulation_change_nothing_but_rounding(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert_close(train(tiny_job(**changes), tmp_path / "a"), train(tiny_job(), tmp_path / "b"))


@pytest.mark.parametrize("every", [1, 2])
def test_recomputation_gives_the_same_bits(tmp_path: Path, every: int) -> None:
    policy = {"memory__recompute": "block", "memory__recompute_every": every}
    plain, recomputed = train(tiny_job(), tmp_path / "a"), train(tiny_job(**policy), tmp_path / "b")
    assert [r["loss"] for r in plain[0]] == [r["loss"] for r in recomputed[0]]
    assert all(torch.equal(plain[1][n], recomputed[1][n]) for n in plain[1])


def test_recomputation_works_under_sharding(workers: Pools, tmp_path: Path) -> None:
    job = tiny_job(memory__recompute="block", layout__dp_shard=2)
    assert_close(workers(2).run(train, job, tmp_path / "many")[0], train(tiny_job(), tmp_path / "one"))


def test_compiled_blocks_give_the_same_update_and_compile_once_for_all_layers(tmp_path: Path) -> None:
    import shutil

    from torch._dynamo.utils import counters

    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("torch.compile needs a C++ compiler on CPU, and this machine has none")
    deep = {"train__steps": 2, "model__num_hidden_layers": 10, "model__sliding_window": 24, "model__qk_norm": True,
            "model__full_attention_layers": [0, 3]}  # fmt: skip
    counters.clear()
    compiled = train(tiny_job(**deep, numerics__compile=True), tmp_path / "a")
    assert counters["frames"]["total"] == counters["frames"]["ok"] > 0
    assert not counters["recompile_limit"]
    assert all("NativeOps.attention" in reason for reason in counters["graph_break"])  # nothing else stays out
    assert_close(compiled, train(tiny_job(**deep), tmp_path / "b"))


def test_bfloat16_trains_with_float32_masters(tmp_path: Path) -> None:
    records, parameters = train(tiny_job(numerics__dtype="bfloat16", train__steps=12), tmp_path)
    assert {p.dtype for p in parameters.values()} == {torch.float32}
    assert records[-1]["loss"] < records[0]["loss"] - 0.3


def poisoned(job: Job, folder: Path, rank: int, at: int) -> Any:
    """Train with one rank's gradient made infinite at step ``at``; what came of it, on this rank."""
    world = pool_world(job)
    trainer, records = make_trainer(job, folder, world), Records()
    whole = trainer.execution.train

    def poison(*arguments: Any) -> Any:
        result = whole(*arguments)
        if trainer.step + 1 == at and world.rank == rank:
            p = next(p for p in trainer.model.parameters() if p.grad is not None)
            (p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad).fill_(torch.inf)
        return result

    trainer.execution.train = poison  # type: ignore[method-assign]
    try:
        trainer.run(records, StopRequest())
    except UserError as error:
        return "stopped", str(error), trainer.step, whole_parameters(trainer)
    return "done", records.steps, trainer.counters, whole_parameters(trainer)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_non_finite_step_stops_every_rank_before_anything_changes(workers: Pools, tmp_path: Path, ranks: int) -> None:
    job = tiny_job(layout__dp_shard=ranks)
    pool = workers(ranks) if ranks > 1 else None
    run = lambda j, name, at: (  # noqa: E731
        pool.run(poisoned, j, tmp_path / name, ranks - 1, at) if pool else [poisoned(j, tmp_path / name, 0, at)]
    )
    stopped = run(job, "stopped", 3)
    short = run(tiny_job(layout__dp_shard=ranks, train__steps=2, optim__schedule_steps=4), "short", 0)
    for (kind, text, step, parameters), (_, _, _, wanted) in zip(stopped, short, strict=True):
        assert (kind, step) == ("stopped", 2)
        assert "step 3" in text
        assert "nothing was changed" in text
        assert all(torch.equal(parameters[n], wanted[n]) for n in wanted)


def test_a_non_finite_step_can_be_left_out_and_is_counted(tmp_path: Path) -> None:
    kind, steps, counters, parameters = poisoned(tiny_job(train__non_finite="skip"), tmp_path, 0, 2)
    assert kind == "done"
    assert counters["skipped"] == 1
    assert [s["skipped"] for s in steps] == [0, 1, 1, 1]
    assert all(torch.isfinite(p).all() for p in parameters.values())


def test_endless_skipping_stops(tmp_path: Path) -> None:
    job = tiny_job(train__non_finite="skip", train__max_skips=2, train__steps=9)
    trainer = make_trainer(job, tmp_path)
    with torch.no_grad():
        next(trainer.model.parameters()).fill_(torch.nan)
    with pytest.raises(UserError, match="the run stops"):
        trainer.run(Records(), StopRequest())
    assert trainer.step == 2


def test_loss_is_the_mean_over_the_step_not_a_mean_of_means(tmp_path: Path) -> None:
    """A step of very unequal rows: the loss is the sum over all tokens divided by their number."""
    job = tiny_job(batch__row_tokens=48, batch__tokens=120, train__steps=1)
    trainer = make_trainer(job, tmp_path)
    batch = Stream(job.data, job.batch, job.seed, byte_tokenizer()).next_batch()
    total = 0.0
    with torch.no_grad():
        from equigrad.rows import row_tensors

        for ref in batch.samples:
            row = row_tensors(trainer.stream, [ref], trainer.world)
            total += float(trainer.model(row.ids, row.row, row.labels, row.at).double().sum())
    records = Records()
    trainer.run(records, StopRequest())
    assert records.steps[0]["loss"] == pytest.approx(total / batch.tokens, rel=1e-6)


def test_prompts_are_read_but_not_learned(tmp_path: Path) -> None:
    """Fine-tuning against a loop over ``transformers`` with the usual -100 labels, idle lanes' rows included."""
    import json

    from transformers import AutoConfig, AutoModelForCausalLM

    lines = [{"prompt": f"Question {i}? ", "completion": "Yes. " * (i % 4 + 1)} for i in range(30)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    job = tiny_job(data__sources=[str(tmp_path / "data.jsonl")], data__held_out_every=0, batch__tokens=300)
    records, _ = train(job, tmp_path / "run")
    raw = to_huggingface(job.model, None, None, "float32")
    hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(raw.pop("model_type"), **raw))
    hf.load_state_dict(make_trainer(job, tmp_path / "b").model.state_dict(), strict=False)
    stream = Stream(job.data, job.batch, job.seed, byte_tokenizer())
    batch = stream.next_batch()
    total = 0.0
    for ref in batch.samples:
        sample = stream.read(ref)
        labels = torch.from_numpy(sample.labels.astype("int64")).masked_fill(~torch.from_numpy(sample.loss), -100)
        logits = hf(torch.from_numpy(sample.ids.astype("int64"))[None]).logits[0]
        total += F.cross_entropy(logits, labels, reduction="sum").item()
    assert batch.loss_tokens < batch.tokens
    assert records[0]["loss"] == pytest.approx(total / batch.loss_tokens, rel=1e-5)
    assert records[0]["executed_tokens"] == batch.tokens


@pytest.mark.parametrize("rule", ["adamw", "lion", "muon"])
def test_every_rule_reports_the_seconds_of_its_updates_and_none_for_one_that_was_refused(
    tmp_path: Path, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tiny_job(optim__name=rule, train__non_finite="skip"), tmp_path)
    began = time.perf_counter()
    updated, _ = trainer.update(trainer.stream.next_batch(), StopRequest())
    assert 0 < updated["optimizer_seconds"] < time.perf_counter() - began
    assert ("optimizer_bytes" in updated) == (rule == "muon")
    monkeypatch.setattr(trainer, "norm", lambda _: math.inf)
    refused, _ = trainer.update(trainer.stream.next_batch(), StopRequest())
    assert (refused["skipped"], refused["optimizer_seconds"]) == (1, 0.0)


def test_a_checkpoint_is_saved_before_its_evaluation_and_a_stop_evaluates_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tiny_job(train__steps=6, train__eval_every=2, checkpoint__every=2), tmp_path)
    seen: list[tuple[str, int]] = []
    monkeypatch.setattr(trainer, "save", lambda: seen.append(("save", trainer.step)))
    monkeypatch.setattr(trainer, "evaluate", lambda *_: seen.append(("evaluate", trainer.step)))
    stop = StopRequest()

    class StopAtFour(Records):
        def step(self, record: dict[str, Any], batch: Any) -> None:
            stop.asked = record["step"] == 3

    trainer.run(StopAtFour(), stop)
    assert seen == [("save", 2), ("evaluate", 2), ("save", 4)]


def stopped_evaluation(job: Job, folder: Path, stopping: int) -> tuple[list[int], int, bool]:
    """One rank is asked to stop in the evaluation after the second step, when the first of its rounds is done."""
    trainer, stop, done = make_trainer(job, folder), StopRequest(), []
    whole = trainer.execution.evaluate

    def counted(*args: Any) -> Any:
        done.append(len(args[-1].rounds))
        stop.asked = trainer.world.rank == stopping
        return whole(*args)

    trainer.execution.evaluate = counted  # type: ignore[method-assign]
    finished = trainer.run(Records(), stop)
    return done, trainer.step, finished


@pytest.mark.parametrize("layout", [{}, {"dp_shard": 2}, {"pp": 2}], ids=str)
def test_a_stop_ends_an_evaluation_on_all_ranks_and_the_step_is_saved(
    workers: Pools, tmp_path: Path, layout: dict[str, Any]
) -> None:
    changes = {f"layout__{key}": value for key, value in layout.items()}
    job = tiny_job(train__steps=4, train__eval_every=2, data__held_out_every=3, batch__row_tokens=48, **changes)
    size = job.layout.world_size
    arguments = (stopped_evaluation, job, tmp_path / "run", size - 1)
    results = workers(size).run(*arguments) if size > 1 else [stopped_evaluation(*arguments[1:])]
    rounds_at_once = 16 if layout == {"pp": 2} else 8
    assert results == [([rounds_at_once], 2, False)] * size
    assert str(latest(tmp_path / "run" / "checkpoints")).endswith("step-00000002")
