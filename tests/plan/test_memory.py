"""Memory: closed forms of publications, measured peaks, and equigrad's own estimate."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equigrad.config.layout import Layout
from equigrad.config.load import make_job
from equigrad.memory.estimate import estimate
from equigrad.plan.hardware import GIB, hardware
from equigrad.plan.memory import in_flight, memory, rank_memory, saved_bytes
from equigrad.plan.ops import layer_ops
from equigrad.plan.published import runs
from equigrad.plan.shape import Shape
from equigrad.plan.workload import DEEPSPEED, MEGATRON, State, Workload
from equigrad.schedule.pipeline import pipeline, simulate

S, B, H, A = 2048, 4, 6144, 64
GPT = Shape.gpt(hidden=H, layers=8, heads=A, vocab=51200, positions=S)
WORK = Workload(GPT, S, B, 8, Layout(tp=8), MEGATRON, attention="unfused", dropout=True, keeps_gathered=False)
SBH = S * B * H


def test_activations_of_a_layer_are_the_published_closed_forms() -> None:
    """Korthikanti et al., arXiv 2205.05198, table 2."""
    whole, layer = replace(WORK, sequence_parallel=False), GPT.layers[0]
    scores = 5 * A * S / H
    assert saved_bytes(replace(WORK, layout=Layout()), layer) == pytest.approx(SBH * (34 + scores))
    assert saved_bytes(whole, layer) == pytest.approx(SBH * (10 + 24 / 8 + scores / 8))
    assert saved_bytes(WORK, layer) == pytest.approx(SBH / 8 * (34 + scores))
    assert saved_bytes(replace(WORK, recompute="selective"), layer) == pytest.approx(SBH / 8 * 34)
    assert saved_bytes(replace(whole, recompute="block"), layer) == pytest.approx(SBH * 2)


def test_state_takes_the_published_bytes_a_parameter() -> None:
    """18 with float32 gradients (arXiv 2104.04473), 16 without, and K of 12 sharded (arXiv 1910.02054)."""
    for state, each in ((MEGATRON, 18), (DEEPSPEED, 16)):
        found = memory(Workload(GPT, S, 1, 1, state=state))
        assert found.parameters + found.gradients + found.optimizer == each * GPT.parameters


def test_attention_in_tiles_keeps_no_scores() -> None:
    flash = replace(WORK, attention="flash")
    assert saved_bytes(flash, GPT.layers[0]) == pytest.approx(SBH / 8 * 34, rel=0.01)  # and a sum a query and head


@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("layout", [{}, {"dp_shard": 4}, {"tp": 2, "dp_shard": 2}, {"pp": 2}, {"pp": 4, "pp_stages": 2,
                                    "pp_schedule": "interleaved"}], ids=str)  # fmt: skip
def test_for_jobs_of_equigrad_the_own_estimate_is_met(layout: dict[str, object], recompute: str) -> None:
    model = {"vocab_size": 64, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8,
             "num_attention_heads": 8, "num_key_value_heads": 8}  # fmt: skip
    job = make_job(
        {"model": model, "layout": layout, "memory": {"recompute": recompute}, "numerics": {"dtype": "bfloat16"},
         "data": {"context": 1024}, "batch": {"tokens": 8 * 4 * 4096, "row_tokens": 4096}}, "test",
    )  # fmt: skip
    work = Workload.of(job)
    schedule = pipeline(job.layout.pp_schedule, job.layout.pp, job.layout.pp_stages, work.micro_batches)
    own, here = estimate(job, simulate(schedule).alive), memory(work)
    alive = saved_bytes(replace(work, recompute="none"), work.shape.layers[0]) if recompute == "block" else 0
    assert here.parameters + here.gathered == pytest.approx(own.parameters, rel=0.02)
    assert here.gradients == pytest.approx(own.gradients, rel=0.02)
    assert here.optimizer == pytest.approx(own.optimizer, rel=0.02)
    assert here.activations + alive == pytest.approx(own.activations, rel=0.12)


@pytest.mark.parametrize("name", ["adamw", "lion", "muon", "normuon", "lionmuon", "signmuon", "meqmuon"])
def test_every_optimizer_keeps_what_the_own_estimate_says(name: str) -> None:
    job = make_job(
        {"model": {"vocab_size": 2048}, "optim": {"name": name}, "numerics": {"dtype": "bfloat16"},
         "layout": {"dp_shard": 2}, "batch": {"tokens": 8192}}, "test",
    )  # fmt: skip
    assert memory(Workload.of(job)).optimizer == pytest.approx(estimate(job).optimizer, rel=1e-3)


def test_in_flight_micro_batches_are_those_of_the_simulated_schedule() -> None:
    for kind in ("gpipe", "1f1b", "interleaved", "zero_bubble"):
        for ranks in (1, 2, 4):
            for per_rank in (1, 2):
                for number in (1, 3, 8, 13, 30):
                    played = simulate(pipeline(kind, ranks, per_rank, number)).alive
                    assert in_flight(kind, ranks, per_rank, number) == (played if ranks > 1 else (1,))


def test_every_published_run_is_told_to_fit_its_device() -> None:
    known = hardware()
    for run in runs():
        room = known.device(known.machine(run.machine).device).memory.value * GIB
        assert memory(run.work).total <= room, run.name


@given(micro_batch=st.integers(1, 8), shards=st.sampled_from([2, 8, 64]), sequence=st.sampled_from([256, 1024]))
def test_memory_grows_with_tokens_and_shrinks_with_ranks(micro_batch: int, shards: int, sequence: int) -> None:
    work = Workload(GPT, sequence, micro_batch, 1, Layout(dp_shard=shards))
    assert memory(replace(work, micro_batch=micro_batch + 1)).total > memory(work).total
    assert memory(replace(work, layout=Layout(dp_shard=2 * shards))).total < memory(work).total
    assert memory(replace(work, recompute="block")).activations < memory(work).activations
    assert memory(replace(work, offload=True)).optimizer == 0


def test_the_parts_of_ranks_add_up_to_the_model() -> None:
    work = Workload(GPT, S, 1, 8, Layout(pp=4, dp_shard=2), State(2, 0, 4, 12, 4))
    kept = sum(rank_memory(work, rank).parameters for rank in range(4)) / 2 * 2
    # The tied embedding is on the first and on the last rank.
    assert kept == GPT.parameters + GPT.vocab * GPT.hidden


def test_no_layer_saves_what_no_op_has_left() -> None:
    assert saved_bytes(WORK, GPT.layers[0]) == sum(op.saved for op in layer_ops(WORK, GPT.layers[0]))
