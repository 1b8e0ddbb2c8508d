"""Plans that one would make without a search, in the same cost model. A search begins with them: it is never worse."""

from collections.abc import Iterator
from math import inf

from equigrad.plan.mixed.exhaustive import fastest
from equigrad.plan.mixed.rule import Plan, Rule
from equigrad.plan.mixed.template import MOST_STAGES, Pipeline, Space, Stage, Template, ordered


def baselines(rule: Rule) -> dict[str, Plan]:
    """By name, those that fit."""
    space = rule.costs.space
    found = {
        "uniform": uniform(rule, space),
        "one pipeline per type": per_type(rule, space, MOST_STAGES),
        "dp across types": per_type(rule, space, 1),
        "greedy stages": greedy(rule, space),
    }
    return {name: plan for name, plan in found.items() if plan is not None}


def uniform(rule: Rule, space: Space) -> Plan | None:
    """As if all GPUs were alike: stages of as many GPUs and as many layers as each other, the fastest of such. Without
    stages, each kind of nodes computes a part of the samples that its number of GPUs is of all."""
    plans = []
    layers, gpus = space.stages, sum(kind.gpus for kind in space.kinds.values())
    for tp in set.intersection(*(set(kind.tensor) for kind in space.kinds.values())):
        for stages in range(1, min(layers, gpus) + 1):
            count, rest = divmod(gpus, stages)
            if rest or count % tp:
                continue
            if any(kind.gpus % count for kind in space.kinds.values()):
                continue
            pipeline = tuple(
                Stage(name, count, tp) for name, kind in space.kinds.items() for _ in range(kind.gpus // count)
            )
            even = tuple(layers * s // stages for s in range(stages + 1))
            samples = rule.costs.samples
            for placed in rule.placed(pipeline, even):
                plans.append(Plan((pipeline,), (placed,), (samples,), placed.seconds(samples)))
        plans += _even_shares(rule, space, tp)
    return min(plans, key=lambda plan: plan.seconds, default=None)


def _even_shares(rule: Rule, space: Space, tp: int) -> Iterator[Plan]:
    gpus = sum(kind.gpus for kind in space.kinds.values())
    if any(kind.gpus % tp for kind in space.kinds.values()):
        return
    template: Template = tuple((Stage(name, kind.gpus, tp),) for name, kind in space.kinds.items())
    left, shares = rule.costs.samples, []
    for kind in space.kinds.values():
        shares.append(min(left, -(-rule.costs.samples * kind.gpus // gpus)))
        left -= shares[-1]
    placed = [min(rule.options(pipeline), key=lambda way: way.seconds(share, len(template)), default=None)
              for pipeline, share in zip(template, shares, strict=True) if share]  # fmt: skip
    ways = [way for way in placed if way is not None]
    if len(ways) == len(template):
        seconds = max(way.seconds(share, len(ways)) for way, share in zip(ways, shares, strict=True))
        yield Plan(template, tuple(ways), tuple(shares), seconds)


def per_type(rule: Rule, space: Space, most: int) -> Plan | None:
    """Each kind of nodes has a pipeline of its own of at most so many alike stages, the one that is fastest with
    its part of the samples by GPUs; then samples go by speed. Kinds on which nothing fits are idle. With one stage:
    data parallelism across types."""
    template = tuple(best for name in space.kinds if (best := _alone(rule, space, name, most)) is not None)
    return rule.plan(ordered(template))


def _alone(rule: Rule, space: Space, name: str, most: int) -> Pipeline | None:
    kind, samples = space.kinds[name], rule.costs.samples
    share = max(1, round(samples * kind.gpus / sum(one.gpus for one in space.kinds.values())))

    def seconds(pipeline: Pipeline) -> float:
        return min((way.seconds(share, len(space.kinds)) for way in rule.options(pipeline)), default=inf)

    pipelines = [
        (Stage(name, kind.gpus // stages, tp),) * stages
        for stages in range(1, min(most, kind.gpus, space.stages) + 1)
        for tp in kind.tensor
        if kind.gpus % (stages * tp) == 0
    ]
    best = min(pipelines, key=seconds, default=None)
    return best if best is not None and seconds(best) < inf else None


def greedy(rule: Rule, space: Space) -> Plan | None:
    """Stages are added one run at a time, each time the run that shortens the step most, as long as one does."""
    best: Plan | None = None
    while True:
        grown = {ordered(template) for template in space.grown(best.template if best is not None else ())}
        step = fastest(rule, grown, best)
        if step is None or step is best:
            return best
        best = step
