"""What follows from a template: the cost model's own answers where there is one kind of nodes, and best cuts."""

from itertools import combinations, pairwise
from math import ceil, inf
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from equigrad.config.layout import Layout
from equigrad.plan.memory import rank_memory
from equigrad.plan.mixed.exhaustive import templates
from equigrad.plan.mixed.rule import Placed, Rule, cut
from equigrad.plan.mixed.template import Stage
from equigrad.plan.step import step
from tests.plan.mixed.cases import SPARSE, on, small

LANES = st.sampled_from([1, 2, 3, 4, 8])


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_on_one_kind_of_nodes_with_equal_lanes_seconds_and_bytes_are_those_of_the_cost_model(
    data: st.DataObject,
) -> None:
    sparse, lanes, stages = data.draw(st.booleans()), data.draw(LANES), data.draw(st.integers(1, 6))
    tp, rows = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.integers(1, 9))
    costs = on(small(1, **(SPARSE if sparse else {})), dgx_h100=(32, 8))
    choice = data.draw(st.sampled_from(costs.choices))
    costs.samples = lanes * rows * choice.micro_batch
    placed = Rule(costs).place((Stage("dgx_h100", lanes * tp, tp),) * stages, choice)
    assert placed is not None
    work = placed.work(0)
    work = type(work)(**(vars(work) | {"micro_batches": rows}))
    assert work.layout.model_copy(update={"ep": 1}) == Layout(
        dp_shard=lanes, tp=tp, pp=stages, reshard_after_forward=stages > 1
    )
    where = costs.kinds["dgx_h100"]
    told = step(work, where.machine, known=where.known)
    assert placed.seconds(costs.samples) == pytest.approx(told.seconds, rel=1e-9)
    parts = placed.detailed(costs.samples)
    assert {name: value for name, value in told.parts.items() if value > 1e-12} == pytest.approx(
        {name: value for name, value in parts.items() if value > 1e-12}, rel=1e-6
    )
    for s in range(stages):
        needs = rank_memory(work, s)
        assert placed.memory(s) == needs
        if stages > 1:
            own = placed.costs[s].bytes(placed.bounds[s], placed.bounds[s + 1], placed.held[s])
            assert own == pytest.approx(needs.total, rel=1e-6)


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_layers_are_cut_as_well_as_can_be(data: st.DataObject) -> None:
    """The slowest stage is as fast as the fastest of all cuts that memory allows."""
    model: dict[str, Any] = data.draw(st.sampled_from([{}, SPARSE, {"num_hidden_layers": 9}]))
    share = data.draw(st.sampled_from([0.9, 0.08, 0.06]))
    costs = on(small(**model), share, dgx_h100=(1, 8), dgx_a100=(2, 8))
    names = st.sampled_from(["dgx_h100", "dgx_a100"])
    pipeline = [
        Stage(data.draw(names), data.draw(st.sampled_from([1, 2, 4])), 1) for _ in range(data.draw(st.integers(2, 4)))
    ]
    lanes = [stage.lanes for stage in pipeline]
    held = [ceil(sum(lanes[s:]) / lanes[s]) for s in range(len(lanes))]
    stages = [costs.stage(stage, True, costs.choices[0]) for stage in pipeline]
    layers = len(costs.dense) - 1

    def slowest(bounds: tuple[int, ...]) -> float:
        ends = list(pairwise(bounds))
        if any(one.bytes(*end, own) > one.where.memory for one, end, own in zip(stages, ends, held, strict=True)):
            return inf
        return max(sum(one.seconds(*end)) / own for one, end, own in zip(stages, ends, lanes, strict=True))

    best = min(slowest((0, *inner, layers)) for inner in combinations(range(1, layers), len(stages) - 1))
    found = cut(stages, lanes, held)
    assert (found is None) == (best == inf)
    if found is not None:
        assert slowest(found[0]) == pytest.approx(best)


@pytest.mark.parametrize("share", [0.9, 0.1, 0.06])
def test_layers_and_samples_add_up_and_no_stage_takes_more_memory_than_it_may(share: float) -> None:
    costs = on(small(**SPARSE), share, dgx_h100=(1, 2), a100_40gb_roce=(1, 2))
    rule, plans = Rule(costs), 0
    for template in templates(costs.space):
        plan = rule.plan(template)
        if plan is None:
            continue
        plans += 1
        assert sum(plan.samples) == costs.samples
        assert min(plan.samples) > 0
        assert plan.seconds >= costs.bound(template) * (1 - 1e-9)
        for way in plan.placed:
            assert (way.bounds[0], way.bounds[-1]) == (0, len(costs.base.shape.layers))
            assert all(start < stop for start, stop in pairwise(way.bounds))
            for s, (_, cost) in enumerate(way.stages):
                assert way.memory(s).total <= cost.where.memory * (1 + 1e-9)
    assert plans > 0


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_pipelines_with_uneven_lanes_take_as_long_as_when_they_are_played(data: st.DataObject) -> None:
    """Each lane in turn computes what is there, backward passes first, and holds no more than it may. The closed form
    is an estimate: a quarter off at most, where the slowest stage has eight micro-batches a lane."""
    costs = on(small(64, num_hidden_layers=8), dgx_h100=(4, 8), dgx_a100=(4, 8))
    names = st.sampled_from(["dgx_h100", "dgx_a100"])
    pipeline = tuple(Stage(data.draw(names), data.draw(LANES), 1) for _ in range(data.draw(st.integers(2, 4))))
    placed = Rule(costs).place(pipeline, costs.choices[0])
    assert placed is not None
    assume(ceil(64 / placed.lanes[placed.slowest(64)]) >= 8)
    computed = placed.through + (ceil(64 / placed.lanes[placed.slowest(64)]) - 1) * placed.both[placed.slowest(64)]
    assert played(placed, 64) == pytest.approx(computed, rel=0.25)


def played(placed: Placed, batches: int) -> float:
    """Seconds until the last backward pass of the first stage."""
    stages = len(placed.pipeline)
    done: dict[tuple[str, int, int], float] = {}
    free = [[0.0] * lanes for lanes in placed.lanes]
    todo = [[list(range(lane, batches, lanes)) for lane in range(lanes)] for lanes in placed.lanes]
    back = [[list(range(lane, batches, lanes)) for lane in range(lanes)] for lanes in placed.lanes]
    while any(lane for stage in back for lane in stage):
        options = []
        for s in range(stages):
            for lane in range(placed.lanes[s]):
                held = len(back[s][lane]) - len(todo[s][lane])
                if back[s][lane]:
                    j = back[s][lane][0]
                    ready = done.get(("f", s, j)) if s == stages - 1 else done.get(("b", s + 1, j))
                    if ready is not None and ("f", s, j) in done:
                        options.append((max(ready, free[s][lane]), 0, s, lane, j))
                if todo[s][lane] and held < placed.held[s]:
                    j = todo[s][lane][0]
                    start = 0.0 if s == 0 else done.get(("f", s - 1, j))
                    if start is not None:
                        options.append((max(start, free[s][lane]), 1, s, lane, j))
        start, way, s, lane, j = min(options)
        free[s][lane] = done["bf"[way], s, j] = start + placed.passes[s][1 - way]
        (back, todo)[way][s][lane].pop(0)
    return max(done["b", 0, j] for j in range(batches))
