"""The time of a step: its parts add up, pipelines wait as the simulator has it, more of anything good never hurts."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equigrad.config.layout import Layout
from equigrad.config.model import Experts
from equigrad.errors import UserError
from equigrad.plan.hardware import hardware
from equigrad.plan.shape import Layer, Shape
from equigrad.plan.step import LIMITS, step
from equigrad.plan.workload import FSDP_PURE, Workload
from equigrad.schedule.pipeline import Action, PipelineKind, pipeline, simulate

SHAPE = Shape.gpt(hidden=4096, layers=16, heads=32, vocab=50368, positions=2048)
WORK = Workload(SHAPE, 2048, 2, 8, state=FSDP_PURE)


def seconds(work: Workload, machine: str = "dgx_h100") -> float:
    return step(work, machine).seconds


PIPELINES: list[tuple[PipelineKind, int, int]] = [
    *((kind, ranks, 1) for kind in ("gpipe", "1f1b", "zero_bubble") for ranks in (2, 4, 8)),  # type: ignore[misc]
    *(("interleaved", ranks, 2) for ranks in (2, 4, 8)),
    ("interleaved", 4, 4),
]


@pytest.mark.parametrize(("kind", "ranks", "per_rank"), PIPELINES)
def test_a_pipeline_waits_as_long_as_its_simulation(kind: PipelineKind, ranks: int, per_rank: int) -> None:
    """Played with the model's own seconds of each stage, the head on the last, messages free."""
    layout = Layout(pp=ranks, pp_stages=per_rank, pp_schedule=kind)
    work = replace(WORK, micro_batches=4 * ranks, layout=layout, cuts=even_cuts(ranks * per_rank))
    parts = step(work, "dgx_h100").parts
    alone = [
        step(replace(work, layout=Layout(), cuts=(), micro_batches=1, shape=piece), "dgx_h100")
        for piece in (replace(SHAPE, layers=work.stage(s)) for s in range(work.stages))
    ]
    # A stage without the head: of one layer more, less one of two.
    head = seconds_of_head()
    last = work.stages - 1
    whole = [one.seconds - one.parts["optimizer"] - (head if s != last else 0) for s, one in enumerate(alone)]

    def cost(action: object) -> float:
        if not isinstance(action, Action):
            return 0.0
        share = {"forward": 1 / 3, "backward": 2 / 3, "input_backward": 1 / 3, "weight_backward": 1 / 3}
        return whole[action.stage] * share[action.kind]

    played = simulate(pipeline(kind, ranks, per_rank, work.micro_batches), cost)
    predicted = sum(parts.values()) - parts["optimizer"] - parts["pipeline"]
    assert predicted == pytest.approx(played.time, rel=0.04)


def even_cuts(stages: int) -> tuple[int, ...]:
    return tuple(16 * n // stages for n in range(1, stages))


def seconds_of_head() -> float:
    one, two = (
        step(replace(WORK, micro_batches=1, shape=replace(SHAPE, layers=SHAPE.layers[:n])), "dgx_h100") for n in (1, 2)
    )
    bare = [found.seconds - found.parts["optimizer"] for found in (one, two)]
    return 2 * bare[0] - bare[1]


def test_with_even_stages_the_bubble_is_the_papers_closed_form() -> None:
    """(p - 1) / (v m) of the rest of the time (arXiv 2104.04473, section 2.2); a vocabulary of 2 is no head."""
    for ranks, per_rank in ((4, 1), (4, 2), (8, 2)):
        layout = Layout(pp=ranks, pp_stages=per_rank, pp_schedule="interleaved")
        work = replace(WORK, shape=replace(SHAPE, vocab=2), layout=layout, micro_batches=32)
        parts = step(work, "dgx_h100").parts
        busy = sum(parts[name] for name in ("products", "attention", "elementwise"))
        assert parts["bubble"] / busy == pytest.approx((ranks - 1) / (per_rank * 32), rel=0.06)


def test_parts_have_names_and_add_up() -> None:
    found = step(WORK, "dgx_h100")
    assert set(found.parts) == set(LIMITS)
    assert found.seconds == pytest.approx(sum(found.parts.values()))
    assert found.tokens_per_second == pytest.approx(WORK.tokens / found.seconds)
    assert 0 < found.mfu < 1
    assert found.limit in LIMITS.values()


def test_a_step_on_one_device_communicates_nothing() -> None:
    parts = step(WORK, "dgx_h100").parts
    idle = set(LIMITS) - {"products", "attention", "elementwise", "optimizer"}
    assert all(parts[name] == 0 for name in idle)


def test_computing_again_costs_what_the_forward_pass_of_blocks_does() -> None:
    plain, again = step(WORK, "dgx_h100").parts, step(replace(WORK, recompute="block"), "dgx_h100").parts
    assert again["products"] == plain["products"]
    assert 0.2 < again["recompute"] / sum(plain[name] for name in ("products", "attention", "elementwise")) < 0.34
    unfused = replace(WORK, attention="unfused")
    selective = step(replace(unfused, recompute="selective"), "dgx_h100").parts["recompute"]
    assert 0 < selective < step(replace(unfused, recompute="block"), "dgx_h100").parts["recompute"] / 2


@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(1, 8),
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 4]),
    shards=st.sampled_from([1, 2, 16]),
    recompute=st.sampled_from(["none", "selective", "block"]),
)
def test_more_work_takes_longer_and_a_faster_machine_less(
    rows: int, tp: int, pp: int, shards: int, recompute: str
) -> None:
    layout = Layout(tp=tp, pp=pp, dp_shard=shards, reduce_every_round=pp == 1)
    work = replace(WORK, micro_batch=rows, layout=layout, recompute=recompute)
    assert all(value >= -1e-12 for value in step(work, "dgx_h100").parts.values())
    # Equal where sharded weights hide all computation.
    assert seconds(replace(work, micro_batch=rows + 1)) >= seconds(work) * (1 - 1e-12)
    assert seconds(replace(work, micro_batches=9)) > seconds(work)
    assert seconds(work, "dgx_h100") < seconds(work, "dgx_a100")
    longer = replace(work, shape=replace(SHAPE, layers=SHAPE.layers * 2))
    assert seconds(longer) > seconds(work)


def test_larger_products_are_more_efficient() -> None:
    shares = []
    for hidden in (512, 1024, 2048, 4096, 8192):
        shape = Shape.gpt(hidden, 8, hidden // 128, 50368, 2048)
        shares.append(step(replace(WORK, shape=shape), "dgx_h100").mfu)
    assert shares == sorted(shares)


def test_larger_micro_batches_hide_sharding_better() -> None:
    layout = Layout(dp_shard=64, reduce_every_round=True)
    shares = [step(replace(WORK, layout=layout, micro_batch=rows), "dgx_h100").mfu for rows in (1, 2, 4, 8)]
    assert shares == sorted(shares)


def test_tensor_ranks_over_two_nodes_cost_more_than_in_one() -> None:
    inside, across = (step(replace(WORK, layout=Layout(tp=tp)), "dgx_h100").parts["tensor"] for tp in (8, 16))
    assert across > 1.5 * inside


@pytest.mark.parametrize("tp", [2, 8, 16])
def test_pieces_that_travel_beside_products_leave_at_least_one_to_wait_for(tp: int) -> None:
    plain = step(replace(WORK, layout=Layout(tp=tp)), "dgx_h100").parts["tensor"]
    pieces = step(replace(WORK, layout=Layout(tp=tp), overlap_tensor=True), "dgx_h100").parts["tensor"]
    assert plain / tp * (1 - 1e-12) <= pieces < plain


def test_what_overlaps_is_hidden_as_far_as_there_is_anything_to_compute() -> None:
    layout = Layout(dp_shard=64, reduce_every_round=True)
    for rows in (1, 16):
        shown = step(replace(WORK, layout=layout, micro_batch=rows), "dgx_h100").parts
        whole = step(replace(WORK, layout=layout, micro_batch=rows, overlap=False), "dgx_h100").parts
        computing = sum(shown[name] for name in ("products", "attention", "elementwise"))
        assert max(0.0, whole["sharding"] - computing) <= shown["sharding"] * (1 + 1e-9)
        assert shown["sharding"] < whole["sharding"]
    assert shown["sharding"] == 0.0


def test_experts_are_exchanged_only_where_they_are_divided() -> None:
    experts = Experts(num_experts=16, num_experts_per_tok=2, moe_intermediate_size=1024)
    shape = replace(SHAPE, gated=True, experts=experts, layers=(Layer(sparse=True),) * 16)
    whole, divided = (
        step(replace(WORK, shape=shape, layout=Layout(dp_shard=8, ep=ep)), "dgx_h100").parts["expert"] for ep in (1, 8)
    )
    assert whole == 0 < divided


def test_an_unknown_machine_is_named_with_those_that_are_known() -> None:
    with pytest.raises(UserError, match=r"no machine is called 'dgx_h900'; there are .*dgx_h100"):
        step(WORK, "dgx_h900")


def test_every_machine_of_the_data_file_can_be_asked() -> None:
    for name in hardware().machines:
        assert step(WORK, name).seconds > 0
