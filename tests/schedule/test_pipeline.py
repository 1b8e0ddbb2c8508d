"""Pipeline schedules: complete, free of deadlock, within their memory, and as fast as the papers say."""

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest

from equigrad.schedule.pipeline import (
    Action,
    Exchange,
    PipelineDeadlock,
    PipelineKind,
    PipelineSchedule,
    Program,
    Simulation,
    StageAction,
    Transfer,
    forward_pipeline,
    pipeline,
    programs,
    simulate,
    sized_cost,
)

KINDS: tuple[PipelineKind, ...] = ("gpipe", "1f1b", "interleaved", "zero_bubble")
every_kind = pytest.mark.parametrize("kind", KINDS)


@cache
def played(kind: PipelineKind, ranks: int, per_rank: int, microbatches: int) -> Simulation:
    return simulate(pipeline(kind, ranks, per_rank, microbatches))


def sizes(ranks: int = 8, per_rank: int = 3, microbatches: int = 17) -> Iterator[tuple[int, int, int]]:
    """All sizes up to the given ones."""
    for p in range(1, ranks + 1):
        for v in range(1, per_rank + 1):
            yield from ((p, v, m) for m in range(1, microbatches + 1))


@every_kind
def test_every_action_is_there_once_and_after_what_it_needs(kind: PipelineKind) -> None:
    for size in sizes():
        ranks, per_rank, microbatches = size
        starts, ends = {}, {}
        for rank, spans in enumerate(played(kind, *size).spans):
            for span in spans:
                assert span.action not in starts
                assert span.action.stage % ranks == rank
                starts[span.action], ends[span.action] = span.start, span.end
        stages = ranks * per_rank
        split = kind == "zero_bubble"
        back = "input_backward" if split else "backward"
        for s in range(stages):
            for m in range(microbatches):
                forward, backward = Action("forward", s, m), Action(back, s, m)  # type: ignore[arg-type]
                assert ends[forward] <= starts[backward]
                if s:
                    assert ends[Action("forward", s - 1, m)] <= starts[forward]
                    assert ends[backward] <= starts[Action(back, s - 1, m)]  # type: ignore[arg-type]
                if split:
                    assert ends[backward] <= starts[Action("weight_backward", s, m)]
        assert len(starts) == stages * microbatches * (3 if split else 2) + 2 * stages


@every_kind
def test_a_stage_is_gathered_ahead_of_its_first_action_and_reduced_right_after_its_last(kind: PipelineKind) -> None:
    for size in sizes(4, 3, 7):
        schedule = pipeline(kind, *size)
        for actions in schedule.actions:
            for stage in {action.stage for action in actions}:
                own = [i for i, action in enumerate(actions) if action.stage == stage]
                assert actions[own[0]] == StageAction("unshard", stage)
                assert actions[own[-1]] == StageAction("reduce", stage)
                between = [a for a in actions[own[0] : own[1]] if isinstance(a, Action)]
                assert len(between) <= 1
                assert all(isinstance(a, StageAction) for a in actions[own[-2] + 1 : own[-1]])


@every_kind
def test_gradients_are_added_in_the_order_of_micro_batches(kind: PipelineKind) -> None:
    for size in sizes(5, 3, 9):
        for actions in pipeline(kind, *size).actions:
            added: dict[int, list[int]] = {}
            for action in actions:
                if isinstance(action, Action) and action.kind in ("backward", "weight_backward"):
                    added.setdefault(action.stage, []).append(action.microbatch)
            assert all(order == list(range(size[2])) for order in added.values())


def test_1f1b_holds_no_more_micro_batches_than_ranks_follow() -> None:
    for ranks, _, microbatches in sizes(8, 1, 17):
        alive = played("1f1b", ranks, 1, microbatches).alive
        assert alive == tuple(min(microbatches, ranks - rank) for rank in range(ranks))


def test_zero_bubble_holds_no_more_than_1f1b_on_its_fullest_rank() -> None:
    for size in sizes():
        assert max(played("zero_bubble", *size).alive) <= max(played("1f1b", *size).alive)


def test_memory_under_1f1b_does_not_grow_with_the_number_of_micro_batches() -> None:
    for kind in ("1f1b", "interleaved", "zero_bubble"):
        assert simulate(pipeline(kind, 4, 2, 64)).alive == simulate(pipeline(kind, 4, 2, 32)).alive


def test_bubbles_shrink_from_gpipe_to_1f1b_to_zero_bubble() -> None:
    for size in sizes():
        gpipe, flush, zero = (played(kind, *size).bubble for kind in ("gpipe", "1f1b", "zero_bubble"))
        assert zero <= flush + 1e-9
        assert flush <= gpipe + 1e-9
        assert zero < flush - 1e-9 or size[0] == 1


def test_bubbles_are_those_of_the_papers_where_ranks_divide_the_micro_batches() -> None:
    for ranks in range(1, 9):
        for microbatches in (ranks, 2 * ranks, 4 * ranks):
            for per_rank in (1, 2, 3):
                share = (ranks - 1) / (per_rank * microbatches + ranks - 1)
                assert played("interleaved", ranks, per_rank, microbatches).bubble == pytest.approx(share)
    # ZB-H1 waits for one third of what 1F1B waits for, where all three parts take equally long.
    for ranks in (2, 4):
        waits = [
            r.bubble * r.time for r in (simulate(pipeline(k, ranks, 1, 2 * ranks)) for k in ("zero_bubble", "1f1b"))
        ]
        assert waits[0] <= 0.6 * waits[1]


@every_kind
def test_any_cost_of_micro_batches_can_be_played(kind: PipelineKind) -> None:
    draw = random.Random(7)
    for size in sizes(4, 2, 6):
        cost = sized_cost([draw.choice([1e-3, 1, 7, 100]) for _ in range(size[2])])
        simulation = simulate(pipeline(kind, *size), cost, latency=0.5)
        assert 0 <= simulation.bubble < 1


def test_an_evaluation_keeps_nothing_and_waits_only_at_its_ends() -> None:
    for ranks, per_rank, microbatches in sizes(4, 3, 9):
        schedule = forward_pipeline(ranks, per_rank, microbatches)
        simulation = simulate(schedule)
        assert set(simulation.alive) == {1}
        assert not schedule.backward
        assert {a.kind for actions in schedule.actions for a in actions} == {"unshard", "forward", "reshard"}
        if microbatches >= ranks:
            assert simulation.time == per_rank * microbatches + ranks - 1


def test_latency_counts_between_ranks_only() -> None:
    assert simulate(pipeline("gpipe", 1, 3, 2), latency=5.0).time == simulate(pipeline("gpipe", 1, 3, 2)).time
    assert simulate(pipeline("gpipe", 2, 1, 1), latency=5.0).time == 6 + 10


def run_with_one_queue(written: tuple[Program, ...]) -> None:
    """The strictest network: a rank goes on only when both sides have posted each message of an exchange.

    Checks that everything is delivered once, before it is needed.
    """
    at = [0] * len(written)
    had: list[set[tuple[str, int, int]]] = [set() for _ in written]
    delivered: set[Transfer] = set()

    def exchange(rank: int) -> tuple[Transfer, ...]:
        steps = written[rank].steps
        step = steps[at[rank]] if at[rank] < len(steps) else None
        return step.transfers if isinstance(step, Exchange) else ()

    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(written):
            while at[rank] < len(program.steps):
                step = program.steps[at[rank]]
                if isinstance(step, Exchange):
                    for transfer in step.transfers:
                        peer = transfer.target if rank == transfer.source else transfer.source
                        if transfer in exchange(peer):
                            delivered.add(transfer)
                    if not delivered.issuperset(step.transfers):
                        break
                    had[rank] |= {(t.what, t.stage, t.microbatch) for t in step.transfers if t.target == rank}
                elif isinstance(step, Action):
                    needs = consumed(step, program)
                    assert needs is None or needs in had[rank]
                    had[rank].discard(needs)
                    makes = produced(step, program)
                    if makes is not None and makes[1] % program.ranks == rank:
                        had[rank].add(makes)
                at[rank] += 1
                moved = True
    assert [len(program.steps) for program in written] == at
    assert not any(had)
    assert all(len({t for e in exchanges(p) for t in e}) == sum(map(len, exchanges(p))) for p in written)


def exchanges(program: Program) -> list[tuple[Transfer, ...]]:
    return [step.transfers for step in program.steps if isinstance(step, Exchange)]


def consumed(action: Action, program: Program) -> tuple[str, int, int] | None:
    if action.kind == "forward" and action.stage > 0:
        return "activation", action.stage, action.microbatch
    if action.kind in ("backward", "input_backward") and action.stage + 1 < program.stages:
        return "gradient", action.stage, action.microbatch
    return None


def produced(action: Action, program: Program) -> tuple[str, int, int] | None:
    if action.kind == "forward" and action.stage + 1 < program.stages:
        return "activation", action.stage + 1, action.microbatch
    if action.kind in ("backward", "input_backward") and action.stage > 0:
        return "gradient", action.stage - 1, action.microbatch
    return None


@every_kind
@pytest.mark.parametrize("ranks", range(1, 9))
def test_messages_cannot_deadlock_even_if_each_blocks_its_rank(kind: PipelineKind, ranks: int) -> None:
    draw = random.Random(ranks)
    for _, per_rank, microbatches in sizes(1, 3, 17):
        schedule = pipeline(kind, ranks, per_rank, microbatches)
        run_with_one_queue(programs(schedule))
        if kind == "gpipe":
            run_with_one_queue(programs(forward_pipeline(ranks, per_rank, microbatches)))
        if microbatches < 8:
            costs = [draw.choice([0.25, 1, 3.7, 50]) for _ in range(microbatches)]
            run_with_one_queue(programs(schedule, sized_cost(costs)))


def test_a_message_is_posted_before_the_action_during_which_it_is_made() -> None:
    """So it can arrive while the receiver computes."""
    program = programs(pipeline("1f1b", 2, 1, 3), sized_cost([1, 2, 1]))[1]
    words = [str(step) for step in program.steps if not isinstance(step, StageAction)]
    early = "exchange of the activation for stage 1, micro-batch 1 (rank 0 to 1)"
    assert words.index(early) < words.index("backward of stage 1, micro-batch 0")


def test_programs_refuse_costs_that_leave_the_order_open() -> None:
    with pytest.raises(ValueError, match="cost of the forward of stage 0, micro-batch 0 is not more than 0"):
        programs(pipeline("1f1b", 2, 1, 2), sized_cost([0, 1]))


def test_a_deadlock_says_who_waits_for_what() -> None:
    good = pipeline("1f1b", 2, 1, 2)
    first, second = good.actions
    swapped = (*first[:1], first[3], first[1], first[2], *first[4:])
    assert swapped[1] == Action("backward", 0, 0)
    with pytest.raises(PipelineDeadlock) as caught:
        simulate(replace(good, actions=(swapped, second)))
    assert str(caught.value).splitlines()[1:] == [
        "  rank 0: backward of stage 0, micro-batch 0 waits for the activation of stage 0, micro-batch 0"
        " and the gradient of stage 1, micro-batch 0",
        "  rank 1: forward of stage 1, micro-batch 0 waits for the activation of stage 0, micro-batch 0",
    ]


def test_an_incomplete_schedule_is_refused() -> None:
    good = pipeline("zero_bubble", 2, 1, 2)

    def without(action: Action | StageAction) -> PipelineSchedule:
        return replace(good, actions=tuple(tuple(a for a in actions if a != action) for actions in good.actions))

    problems: list[tuple[Action | StageAction, str]] = [
        (Action("forward", 1, 1), "nothing computes the activation of stage 1, micro-batch 1"),
        (Action("weight_backward", 0, 1), "nothing computes the weights of stage 0, micro-batch 1"),
        (
            StageAction("unshard", 0),
            "rank 0, forward of stage 0, micro-batch 0: the stage's parameters are not gathered",
        ),
        (StageAction("reduce", 1), r"rank 1 does not reduce each of its stages once, but \[1\]"),
    ]
    for action, problem in problems:
        with pytest.raises(ValueError, match=problem):
            simulate(without(action))
    for number, problem in [
        (0, "rank 0, unshard of stage 0: follows unshard"),
        (1, "rank 0, forward of stage 0, micro-batch 0: is there twice"),
    ]:
        twice = (*good.actions[0][: number + 1], *good.actions[0][number:])
        with pytest.raises(ValueError, match=problem):
            simulate(replace(good, actions=(twice, good.actions[1])))
    with pytest.raises(ValueError, match="rank 0, unshard of stage 1: the stage is on rank 1"):
        simulate(replace(good, actions=good.actions[::-1]))


def test_senseless_sizes_and_kinds_are_named() -> None:
    with pytest.raises(ValueError, match="a pipeline needs microbatches >= 1, not 0"):
        pipeline("gpipe", 2, 1, 0)
    with pytest.raises(ValueError, match="no pipeline schedule is called 'dualpipe'; there are gpipe, 1f1b"):
        pipeline("dualpipe", 2, 1, 1)


def test_the_schedule_is_the_same_in_every_process_and_needs_no_torch() -> None:
    code = (
        "import sys; from equigrad.schedule.pipeline import pipeline, programs;"
        "s = pipeline('zero_bubble', 4, 2, 7); print(s, programs(s));"
        "assert 'torch' not in sys.modules"
    )
    outputs = set()
    for seed in ("1", "2"):
        env = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stderr
        outputs.add(done.stdout)
    assert len(outputs) == 1
    assert repr(pipeline("zero_bubble", 4, 2, 7)) in outputs.pop()
