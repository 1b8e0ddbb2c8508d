"""What the scorer sees of a template's beginning: a few numbers, each also times the share of the cluster's speed that
is left, for what is left may yet mend what is wrong. Estimates by closed forms, for a search asks for ten thousands.
"""

from collections.abc import Sequence
from math import log
from operator import mul
from typing import NamedTuple

from equigrad.plan.mixed.cost import Costs
from equigrad.plan.mixed.template import Pipeline, Stage, Template, runs_of

NAMES = (
    "one",
    "speed lost",  # of the GPUs in use, to tensor parallelism and small groups of experts
    "idle",
    "pipelines",
    "bubble",
    "rounding",  # of layers to whole ones, as a logarithm
    "head",  # seconds behind the last layer, of those of all layers
    "again",  # the share of what layers leave that memory has no room for, in the worst stage
    "again on average",
    "full",  # bytes over the memory that may be used, with nearly all of that computed again
    "full at all",
    "sharding",  # seconds to gather and reduce weights once, of those of the step
    "messages",  # seconds to send what stages send, of those that the stage computes
    "kinds",  # of nodes in a pipeline
    "lanes",  # log of the most by the fewest of a pipeline
    "worst",  # bubble and rounding of the worst pipeline; all others are averages by speed
)
LEAST = 0.1
"""Of what layers leave for the backward pass, about what is left of it where every block is computed again."""
MOST = 4.0
"""Of any of them but the first: beyond it things are bad, and how bad is no matter."""


class Facts(NamedTuple):
    """Of one stage, as if it had the whole model.

    speed:    samples a second
    own:      bytes of its layers' weights, gradients and moments
    ends:     the same of an embedding or a head
    saved:    bytes that a micro-batch leaves for the backward pass
    top:      bytes of the layer at work
    memory:   bytes that may be used
    sharding: seconds of gathering and reducing all weights once
    message:  seconds of a micro-batch's, both ways
    head:     layers that would take as long as what follows the last
    """

    speed: float
    own: float
    ends: float
    saved: float
    top: float
    memory: float
    sharding: float
    message: float
    head: float


class Run(NamedTuple):
    """Alike stages, one behind the other."""

    stage: Stage
    times: int
    facts: Facts


class Features:
    """Of templates for a job on mixed nodes."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.whole = sum(costs.fastest[name] * where.gpus for name, where in costs.kinds.items())
        self.layers = len(costs.dense) - 1
        self._known: dict[Pipeline, list[Run]] = {}
        self._facts: dict[tuple[Stage, bool], Facts] = {}

    def of(self, template: Template) -> list[float]:
        """As many as ``NAMES``, twice."""
        rows, speeds, best = [], [], 0.0
        runs = [self._runs(pipeline) for pipeline in template]
        for pipeline in runs:
            best += sum(run.times * run.stage.gpus * self.costs.fastest[run.stage.nodes] for run in pipeline)
            speeds.append(sum(run.times * run.facts.speed for run in pipeline))
        total = sum(speeds)
        shares = [speed / total for speed in speeds]
        rows = [self._pipeline(*one) for one in zip(runs, speeds, shares, strict=True)]
        mean = [sum(map(mul, shares, column)) for column in zip(*rows, strict=True)]
        worst, idle = max(row[0] + row[1] for row in rows), max(0.0, 1 - best / self.whole)
        found = [log(best / total), -log(best / self.whole), len(template) - 1.0, *mean, worst]
        found = [1.0, *[MOST if one > MOST else one for one in found]]
        return [*found, *[idle * one for one in found]]

    def _runs(self, pipeline: Pipeline) -> list[Run]:
        """Of alike stages."""
        if pipeline not in self._known:
            several = len(pipeline) > 1
            self._known[pipeline] = [Run(run[0], len(run), self.facts(run[0], several)) for run in runs_of(pipeline)]
        return self._known[pipeline]

    def _pipeline(self, runs: list[Run], speed: float, share: float) -> tuple[float, ...]:
        """If it computes a share of the samples."""
        samples, layers = max(1.0, share * self.costs.samples), self.layers
        behind = lanes = sum([run.times * run.stage.lanes for run in runs])
        several = len(runs) > 1 or runs[0].times > 1
        again = average = full = sharding = messages = 0.0
        for run in runs:
            facts, own, part = run.facts, run.stage.lanes, run.facts.speed / speed
            state = part * facts.own + facts.top
            if run is runs[0] or run is runs[-1]:
                state += facts.ends
            left = part * facts.saved * min(behind, samples) / own
            if state + left > facts.memory:
                missing = min(1.0, (state + left - facts.memory) / left)
                again, average = max(again, missing), average + run.times * part * missing
                full = max(full, (state + LEAST * left) / facts.memory - 1)
            sharding = max(sharding, facts.sharding * facts.speed / samples)
            if several:
                messages = max(messages, facts.message * facts.speed / own / part)
            behind -= run.times * own
        every = [run.stage.lanes for run in runs]
        head = runs[-1].facts.head
        rounding = log(_largest(runs, speed, layers, head)) if several else 0.0
        return (
            (lanes - min(every)) / samples, rounding, head / layers, again, average, full, float(full > 0), sharding,
            messages, len({run.stage.nodes for run in runs}) - 1.0, log(max(every) / min(every)),
        )  # fmt: skip

    def facts(self, stage: Stage, several: bool) -> Facts:
        """Of a stage, of several of a pipeline or not."""
        if (stage, several) not in self._facts:
            costs = self.costs
            cost = costs.stage(stage, several, costs.choices[0])
            work, state, network = cost.work, cost.work.state, cost.clock.network
            tp, ep, shape = stage.tp, work.layout.ep, work.shape
            dense, routed = costs.dense[-1] / tp, costs.routed[-1] / tp / ep
            own = (state.kept + state.moments) * cost.kept(dense, routed)
            whole = (state.gradient + state.gathered * (stage.lanes > 1)) * several
            moved = (state.gathered + state.wire) * (stage.lanes > 1)
            self._facts[stage, several] = Facts(
                costs.speed(stage),
                own + whole * (dense + routed),
                (whole + (state.kept + state.moments) / stage.lanes) * shape.vocab * shape.hidden / tp,
                cost.layers.saved[-1],
                cost.layers.top,
                cost.where.memory,
                moved * (dense + routed) / network.between,
                2 * state.residual * work.row_tokens * shape.hidden / tp / network.between,
                sum(cost.layers.head) / cost.layers.both[-1] * self.layers,
            )
        return self._facts[stage, several]


def _largest(runs: Sequence[Run], speed: float, layers: int, head: float) -> float:
    """Seconds of the slowest stage where layers are whole, of those where they are not: each stage gets what it would
    have if they were not, rounded down, and those that it costs least one more, until all are somewhere."""
    left, more, largest = layers, [], 0.0
    for run in runs:
        each = (layers + head) * run.facts.speed / speed
        for alike, behind in ((run.times - 1, 0.0), (1, head)) if run is runs[-1] else ((run.times, 0.0),):
            if alike:
                whole = max(1, int(each - behind))
                left -= alike * whole
                largest = max(largest, (whole + behind) / each)
                more.append(((whole + 1 + behind) / each, alike))
    for then, alike in sorted(more):
        if left <= 0:
            break
        largest, left = max(largest, then), left - alike
    return largest
