"""What follows from a template: layers of each stage, samples of each pipeline, seconds of a step, bytes of each stage.

Layers   go to stages in proportion to what these compute in a second: such that the stage that takes longest for its
         share of micro-batches takes as little as can be, among all cuts that memory allows.
Samples  go to pipelines such that all end together, as far as whole micro-batches allow.

A pipeline runs 1F1B. A lane of stage s computes every lanes(s)-th micro-batch and holds as many as the lanes from s on
can be at work on, sum of lanes(u >= s) / lanes(s): with equal lanes that is 1F1B's p - s. With uneven ones passes do
not fall into step, and it holds ``SPARE`` more. A step takes one micro-batch's way through all stages, and what the
slowest lane has left of its micro-batches. On one kind of nodes with equal lanes this is ``plan.step``; with uneven
lanes it is an estimate (the tests play such pipelines).
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import ceil, inf

from equigrad.plan.collectives import Group
from equigrad.plan.hardware import TERA
from equigrad.plan.memory import Memory, rank_memory
from equigrad.plan.mixed.cost import Choice, Costs, StageCost
from equigrad.plan.mixed.template import Pipeline, Stage, Template
from equigrad.plan.step import Clock, Parts, Step
from equigrad.plan.workload import LOW, Workload

SPARE = 2
"""Micro-batches. Of 60 uneven pipelines drawn at random, played takes 6 % longer than computed in the mean with none to
spare (48 % at worst), 2 % with one (31 %), 1 % with two (21 %)."""
EVEN = 1e-9
"""Relative: differences that are rounding."""


@dataclass(frozen=True)
class Placed:
    """A pipeline with its layers.

    bounds:   where stages begin, and the number of layers
    held:     micro-batches that a lane of each stage holds at most
    passes:   seconds of one micro-batch on a lane of each stage, forward and backward
    messages: seconds of one, between each stage and the next
    tight:    whether memory decided about layers
    """

    pipeline: Pipeline
    choice: Choice
    costs: Sequence[StageCost]
    bounds: tuple[int, ...]
    held: tuple[int, ...]
    passes: Sequence[tuple[float, float]]
    messages: Sequence[float]
    tight: bool

    @cached_property
    def both(self) -> list[float]:
        return [forward + backward for forward, backward in self.passes]

    @cached_property
    def through(self) -> float:
        """Seconds of one micro-batch through all stages and back."""
        return sum(self.both)

    @cached_property
    def lanes(self) -> list[int]:
        return [stage.lanes for stage in self.pipeline]

    def slowest(self, batches: int) -> int:
        """The stage that ends last."""
        left = [(ceil(batches / lanes) - 1) * one for lanes, one in zip(self.lanes, self.both, strict=True)]
        return max(range(len(left)), key=lambda s: (left[s], self.both[s]))

    def seconds(self, samples: int, pipelines: int = 1) -> float:
        """Of a step with so many samples here, and gradients to be added up over so many pipelines."""
        return sum(self.parts(samples, pipelines).values())

    def parts(self, samples: int, pipelines: int = 1) -> Parts:
        """The same by part: passes and bubble, and what ``plan.step`` has beside."""
        batches = ceil(samples / self.choice.micro_batch)
        s = self.slowest(batches)
        rows, bubble = ceil(batches / self.lanes[s]), self.through - self.both[s]
        first, last = (one + bubble / 2 for one in self.passes[s])
        parts = {"passes": rows * self.both[s], "bubble": bubble, "pipeline": 2 * sum(self.messages)}
        return parts | self.once(s, first, last, pipelines)

    def detailed(self, samples: int, pipelines: int = 1) -> Parts:
        """The same, and what the slowest stage's passes are made of."""
        parts = self.parts(samples, pipelines)
        batches = ceil(samples / self.choice.micro_batch)
        s = self.slowest(batches)
        cost, rows = self.costs[s], ceil(batches / self.lanes[s])
        work = self.work(s)
        for ways in Clock(work, cost.where.machine, cost.clock.fitted, cost.where.known).rank(s):
            for name, value in ways.items():
                parts[name] = parts.get(name, 0.0) + rows * value
        # Where messages take longer than what a stage computes, the rest is theirs.
        known = sum(parts.values()) - parts["passes"]
        parts["pipeline"] += self.seconds(samples, pipelines) - known
        return {name: value for name, value in parts.items() if name != "passes"}

    @property
    def stages(self) -> list[tuple[Stage, StageCost]]:
        """With what each costs."""
        return list(zip(self.pipeline, self.costs, strict=True))

    def once(self, s: int, first: float, last: float, pipelines: int) -> Parts:
        """What a stage does once a step; the first forward and the last backward pass may hide some of it."""
        cost, start, stop = self.costs[s], self.bounds[s], self.bounds[s + 1]
        weights = cost.weights(start, stop)
        parts = dict(cost.clock.once(*weights, stop - start, first, last))
        if pipelines > 1:
            size = cost.work.state.wire * cost.kept(*weights)
            parts["replicas"] = max(0.0, cost.clock.network.all_reduce(size, Group(pipelines, 1)) - last)
        return parts

    def capacity(self, seconds: float) -> int:
        """Samples that it computes in what a step of one micro-batch takes and so many seconds more, about."""
        if seconds < 0:
            return 0
        return self.choice.micro_batch * min(
            lanes * (1 + int(seconds / one + EVEN)) for lanes, one in zip(self.lanes, self.both, strict=True)
        )

    def work(self, s: int) -> Workload:
        """A stage as the cost model has it: one of a pipeline whose stages have as many lanes as it."""
        layout = self.costs[s].work.layout.model_copy(update={"pp": len(self.pipeline)})
        return replace(self.costs[s].work, layout=layout, cuts=self.bounds[1:-1])

    def memory(self, s: int) -> Memory:
        """Of a rank of a stage."""
        return rank_memory(self.work(s), s, held=self.held[s])


@dataclass(frozen=True)
class Plan:
    """A template with what follows. ``samples``: of a step, for each pipeline."""

    template: Template
    placed: tuple[Placed, ...]
    samples: tuple[int, ...]
    seconds: float

    @property
    def slowest(self) -> int:
        """The pipeline that ends last."""
        return max(range(len(self.placed)), key=lambda p: self._seconds(p))

    def _seconds(self, p: int) -> float:
        return self.placed[p].seconds(self.samples[p], len(self.placed))

    @property
    def step(self) -> Step:
        """Of the pipeline that ends last, as ``plan.step`` tells it; utilisation is of the mean peak of GPUs in use."""
        p = self.slowest
        way, stages = self.placed[p], [(stage, cost) for way in self.placed for stage, cost in way.stages]
        gpus = sum(stage.gpus for stage, _ in stages)
        peak = sum(stage.gpus * cost.clock.device.peak.value * TERA for stage, cost in stages) / gpus
        work = way.costs[0].work
        parts = way.detailed(self.samples[p], len(self.placed))
        return Step(parts, work.sequence * sum(self.samples), gpus, work.shape.model_flops(work.sequence), peak)


class Rule:
    """Plans of templates, each made once."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.priced = 0
        self._options: dict[Pipeline, list[Placed]] = {}
        self._plans: dict[Template, Plan | None] = {}

    def plan(self, template: Template, below: float = inf) -> Plan | None:
        """The fastest of the priced choices, or None where nothing fits or where it must take as long as ``below``."""
        if not template:
            return None
        if template not in self._plans:
            if self.costs.bound(template) >= below:
                return None
            self.priced += 1
            self._plans[template] = self._plan(template)
        return self._plans[template]

    def _plan(self, template: Template) -> Plan | None:
        options = [self.options(pipeline) for pipeline in template]
        if not all(options):
            return None
        samples, count = self._divided(options), len(template)
        if any(share == 0 for share in samples):
            return None
        placed = tuple(
            min(ways, key=lambda way: way.seconds(share, count)) for ways, share in zip(options, samples, strict=True)
        )
        seconds = max(way.seconds(share, count) for way, share in zip(placed, samples, strict=True))
        return Plan(template, placed, tuple(samples), seconds)

    def _divided(self, options: Sequence[Sequence[Placed]]) -> list[int]:
        """Samples of each pipeline: in the least time, up to a thousandth, in which all together can compute them."""
        whole, count = self.costs.samples, len(options)
        if count == 1:
            return [whole]
        least = [[(way, way.seconds(way.choice.micro_batch, count)) for way in ways] for ways in options]

        def most(seconds: float) -> list[int]:
            return [max(way.capacity(seconds - one) for way, one in ways) for ways in least]

        low, high = 0.0, min(way.seconds(whole, count) for ways in options for way in ways)
        while high - low > high / 1024:
            middle = (low + high) / 2
            low, high = (low, middle) if sum(most(middle)) >= whole else (middle, high)
        return _shares(most(high), whole)

    def options(self, pipeline: Pipeline) -> list[Placed]:
        """A pipeline by choice, those that fit."""
        if pipeline not in self._options:
            refused = any(self.costs.refused(stage, len(pipeline)) for stage in set(pipeline))
            self._options[pipeline] = [] if refused else list(self.placed(pipeline))
        return self._options[pipeline]

    def placed(self, pipeline: Pipeline, given: tuple[int, ...] | None = None) -> Iterator[Placed]:
        """By choice, those that fit; none that computes more again where less has room enough. ``given``: bounds that
        are not by rule."""
        roomy = set[int]()
        for choice in self.costs.choices:
            if choice.micro_batch not in roomy:
                placed = self.place(pipeline, choice, given)
                if placed is not None:
                    yield placed
                    if not placed.tight:
                        roomy.add(choice.micro_batch)

    def place(self, pipeline: Pipeline, choice: Choice, given: tuple[int, ...] | None = None) -> Placed | None:
        """With this choice, or None where memory does not allow it."""
        if len(pipeline) == 1:
            return self._alone(pipeline, choice)
        costs = [self.costs.stage(stage, True, choice) for stage in pipeline]
        held = self._held(pipeline, choice)
        found = cut(costs, [stage.lanes for stage in pipeline], held) if given is None else _fits(costs, given, held)
        if found is None:
            return None
        bounds, tight = found
        messages = self._messages(pipeline, costs)
        # A stage takes as long as what it receives does, at least.
        passes = [cost.seconds(*ends) for cost, ends in zip(costs, pairwise(bounds), strict=True)]
        passes = [
            (max(forward, before), max(backward, behind))
            for (forward, backward), before, behind in zip(passes, (0.0, *messages), (*messages, 0.0), strict=True)
        ]
        return Placed(pipeline, choice, costs, bounds, held, passes, messages, tight)

    def _alone(self, pipeline: Pipeline, choice: Choice) -> Placed | None:
        for early in (False, True):
            cost = self.costs.stage(pipeline[0], False, choice, early)
            if rank_memory(cost.work, 0).total <= cost.where.memory:
                passes = [_sums(cost.clock.rank(0))]
                return Placed(pipeline, choice, [cost], (0, len(cost.dense) - 1), (1,), passes, (), early)
        return None

    def _held(self, pipeline: Pipeline, choice: Choice) -> tuple[int, ...]:
        batches = ceil(self.costs.samples / choice.micro_batch)
        lanes = [stage.lanes for stage in pipeline]
        spare = SPARE if len(set(lanes)) > 1 else 0
        return tuple(
            min(ceil(batches / own), ceil(sum(lanes[s:]) / own) + spare * (s < len(lanes) - 1))
            for s, own in enumerate(lanes)
        )

    def _messages(self, pipeline: Pipeline, costs: Sequence[StageCost]) -> list[float]:
        """Between neighbours: by the link of the slower, inside a node where the whole pipeline has room in it."""
        kinds, gpus = {stage.nodes for stage in pipeline}, sum(stage.gpus for stage in pipeline)
        found = []
        for one, other, cost, next_cost in zip(pipeline, pipeline[1:], costs, costs[1:], strict=False):
            size = LOW * cost.work.row_tokens * cost.work.shape.hidden / min(one.tp, other.tp)
            networks = [cost.clock.network, next_cost.clock.network]
            inside = len(kinds) == 1 and gpus <= networks[0].machine.per_node.value
            found.append(max(network.send(size, Group(2, 2 if inside else 1)) for network in networks))
        return found


def cut(costs: Sequence[StageCost], lanes: Sequence[int], held: Sequence[int]) -> tuple[tuple[int, ...], bool] | None:
    """Bounds of stages, such that the largest of seconds / lanes is as small as memory allows; and whether memory
    decided anything. None where layers do not fit.

    The first stages take as many layers as a limit allows. Where too many are left for the last, the limit is raised to
    the least with which any stage could take one more, so that the first that suffices is the best. It begins a tenth
    below what layers that can be cut anywhere would have.
    """
    layers, stages = len(costs[0].dense) - 1, len(costs)
    whole = [sum(cost.seconds(0, layers)) / own for cost, own in zip(costs, lanes, strict=True)]
    limit = 0.9 / sum(1 / one for one in whole)
    while True:
        bounds, above, tight = [0], [], False
        for s, (cost, own) in enumerate(zip(costs[:-1], lanes, strict=False)):
            start, sums, end = bounds[-1], cost.layers.both, layers - (stages - 1 - s)
            stop = bisect_right(sums, sums[start] + limit * own * (1 + EVEN)) - 1
            stop = min(max(stop, start + 1), end)
            if cost.bytes(start, stop, held[s]) > cost.where.memory:
                tight, stop = True, cost.most(start, range(start + 1, stop), held[s])
                if stop == start:
                    return None
            elif stop < end:
                above.append((sums[stop + 1] - sums[start]) / own)
            bounds.append(stop)
        last, start = costs[-1], bounds[-1]
        takes = sum(last.seconds(start, layers)) / lanes[-1]
        if last.bytes(start, layers, held[-1]) > last.where.memory:
            tight = True
        elif takes <= limit * (1 + EVEN):
            return (*bounds, layers), tight
        else:
            above.append(takes)
        limit = min((one for one in above if one > limit * (1 + EVEN)), default=inf)
        if limit == inf:
            return None


def _fits(
    costs: Sequence[StageCost], bounds: tuple[int, ...], held: Sequence[int]
) -> tuple[tuple[int, ...], bool] | None:
    needs = (cost.bytes(*ends, own) <= cost.where.memory
             for cost, ends, own in zip(costs, pairwise(bounds), held, strict=True))  # fmt: skip
    return (bounds, False) if all(needs) else None


def _shares(most: Sequence[int], whole: int) -> list[int]:
    """So many in all, in proportion to the most of each, rounded up as long as there are any left."""
    total, left, found = sum(most), whole, []
    for one in most:
        share = min(left, ceil(whole * one / total), one)
        found.append(share)
        left -= share
    return found


def _sums(ways: tuple[Parts, Parts]) -> tuple[float, float]:
    return sum(ways[0].values()), sum(ways[1].values())
