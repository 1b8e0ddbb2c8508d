"""Plans for mixed nodes as lines, and as values for JSON. Every one says that it is unvalidated."""

from collections.abc import Iterator, Mapping
from typing import Any

from equigrad.plan.gates import Answer, evidence, mixed, state
from equigrad.plan.hardware import GIB
from equigrad.plan.mixed.beam import Found
from equigrad.plan.mixed.cost import Costs
from equigrad.plan.mixed.rule import Placed, Plan
from equigrad.plan.mixed.template import shown
from equigrad.plan.text import columns, parts_shown, recompute_shown

DAY = 86_400


def answer(plan: Plan, costs: Costs) -> Answer[Plan]:
    """With what is known of its kind: the time of mixed nodes."""
    which = mixed("throughput", costs.base, [where.machine for where in costs.kinds.values()], costs.gpus)
    return Answer(plan, which, state(which), evidence().get(which))


def plan_lines(found: Found, costs: Costs) -> Iterator[str]:
    """The best few in a table, what each of them is made of, and what others would take."""
    rows = [["", "state", "template", "seconds", "MFU", "tokens/day", "limit"]]
    for n, plan in enumerate(found.plans, 1):
        step, kind = plan.step, answer(plan, costs).state
        per_day = step.tokens / step.seconds * DAY
        rows.append([str(n), kind.upper(), shown(plan.template), f"{step.seconds:.3f}", f"{step.mfu:.1%}",
                     f"{per_day:.3g}", step.limit])  # fmt: skip
    yield from columns(rows)
    for n, plan in enumerate(found.plans, 1):
        yield ""
        yield f"{n}  seconds  {parts_shown(plan.step.parts, 1, 0.0005)}"
        for number, (way, samples) in enumerate(zip(plan.placed, plan.samples, strict=True), 1):
            yield from _pipeline_lines(way, samples, f"pipeline {number}: " if len(plan.placed) > 1 else "")
        yield f"   time and memory  {answer(plan, costs).label}"
    yield ""
    yield f"{costs.gpus:,} GPUs ({_kinds(costs)}); {found.scored:,} templates were looked at, {found.priced:,} computed"
    for name, plan in sorted(found.baselines.items(), key=lambda one: one[1].seconds):
        yield f"{name + ':':<24} {plan.seconds:.3f} seconds with {shown(plan.template)}"
    yield from left_out_lines(costs)


def left_out_lines(costs: Costs) -> Iterator[str]:
    """Kinds of stages that may not be answered for, by reason."""
    for why, number in sorted(costs.left_out.items()):
        yield f"left out: {number:,} kinds of stages that alone are {why}"


def misfit_lines(costs: Costs) -> Iterator[str]:
    """Where nothing fits."""
    yield f"no plan was found that fits on {_kinds(costs)}"
    yield "more GPUs, a shorter data.context, or a smaller model need less of each"
    yield from left_out_lines(costs)


def _kinds(costs: Costs) -> str:
    return ", ".join(
        f"{where.gpus} of {name} with {where.memory / GIB:.1f} GiB each"
        + f" (not {where.machine}: {where.changed})" * bool(where.changed)
        for name, where in costs.kinds.items()
    )


def _pipeline_lines(way: Placed, samples: int, name: str) -> Iterator[str]:
    size = way.choice.micro_batch
    yield (
        f"   {name}{samples} samples, {size} a micro-batch, recomputing"
        f" {recompute_shown(way.choice.recompute, way.choice.every)}"
    )
    slowest = way.slowest(-(-samples // size))
    for s, (stage, cost) in enumerate(way.stages):
        first, stop = way.bounds[s], way.bounds[s + 1]
        yield (
            f"     layers {first}-{stop - 1} on {shown(((stage,),))}: {stage.lanes} lanes,"
            f" {1e3 * way.both[s]:.1f} ms a micro-batch, {way.memory(s).total / GIB:.1f} of"
            f" {cost.where.memory / GIB:.1f} GiB" + ", ends last" * (s == slowest)
        )


def record(found: Found, costs: Costs) -> dict[str, Any]:
    """Everything that is printed as JSON values. Seconds, bytes."""
    return {
        "kinds": {name: {"machine": where.machine, "gpus": where.gpus, "memory_bytes": where.memory,
                         "changed": where.changed} for name, where in costs.kinds.items()},
        "templates": found.scored,
        "computed": found.priced,
        "left_out": costs.left_out,
        "baselines": {name: plan_record(plan, costs) for name, plan in found.baselines.items()},
        "plans": [plan_record(plan, costs) for plan in found.plans],
    }  # fmt: skip


def plan_record(plan: Plan, costs: Costs) -> Mapping[str, Any]:
    """One plan."""
    step, told = plan.step, answer(plan, costs)
    return {
        "state": told.state,
        "label": told.label,
        "template": shown(plan.template),
        "seconds": step.seconds,
        "seconds_by_part": dict(step.parts),
        "mfu": step.mfu,
        "limit": step.limit,
        "pipelines": [
            {
                "samples": samples,
                "micro_batch": way.choice.micro_batch,
                "recompute": recompute_shown(way.choice.recompute, way.choice.every),
                "stages": [
                    {"nodes": stage.nodes, "gpus": stage.gpus, "tp": stage.tp,
                     "layers": [way.bounds[s], way.bounds[s + 1]], "micro_batch_seconds": way.both[s],
                     "bytes": way.memory(s).total}
                    for s, stage in enumerate(way.pipeline)
                ],
            }
            for way, samples in zip(plan.placed, plan.samples, strict=True)
        ],
    }  # fmt: skip
