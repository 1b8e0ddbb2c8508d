"""What stages cost on each kind of nodes, by the cost model (``plan.step``, ``plan.memory``): sums over layers, kept,
for a search asks for thousands of stages. No answer is given here: ``rule`` makes plans of it.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import gcd
from typing import NamedTuple

from equigrad.config.fit import misfits
from equigrad.config.job import Job
from equigrad.config.layout import Layout
from equigrad.plan.calibration import calibration
from equigrad.plan.gates import capability, contradiction
from equigrad.plan.memory import loss_bytes, what_is_left
from equigrad.plan.mixed.template import TENSOR, Kind, Space, Stage, Template
from equigrad.plan.space import RECOMPUTE
from equigrad.plan.step import Clock
from equigrad.plan.target import Target
from equigrad.plan.workload import Recompute, Workload

MICRO_BATCHES = (1, 2, 4, 8)
"""Samples of one, where a step has as many."""


class Choice(NamedTuple):
    """What is priced for each pipeline: samples of a micro-batch, and what is computed again in which of the layers."""

    micro_batch: int
    recompute: Recompute
    every: int


@dataclass(frozen=True)
class Layers:
    """Of one micro-batch on one lane, sums over all layers before each: seconds, bytes left for the backward pass.

    head: seconds, forward and backward, of what follows the last layer
    top:  bytes that the backward pass of a layer takes beside, at most; and the loss
    """

    forward: Sequence[float]
    backward: Sequence[float]
    both: Sequence[float]
    saved: Sequence[float]
    head: tuple[float, float]
    top: float
    loss: float


@dataclass(frozen=True)
class StageCost:
    """A stage on so many lanes, whatever layers it has."""

    work: Workload
    clock: Clock
    where: Target
    layers: Layers
    dense: Sequence[int]
    routed: Sequence[int]

    def weights(self, start: int, stop: int) -> tuple[int, int]:
        """On one tensor rank, gathered: those that all expert ranks have, and this rank's experts."""
        shape, tp, whole = self.work.shape, self.work.layout.tp, len(self.dense) - 1
        dense = self.dense[stop] - self.dense[start]
        if start == 0:
            dense += shape.embedding_parameters
        if stop == whole:
            dense += shape.head_parameters + (shape.vocab * shape.hidden if shape.tied and start > 0 else 0)
        return -(-dense // tp), -(-(self.routed[stop] - self.routed[start]) // (tp * self.work.layout.ep))

    def kept(self, dense: float, routed: float) -> float:
        """Those of them that a rank keeps, for they are sharded over the stage's lanes."""
        return dense / self.work.shards + routed / max(1, self.work.shards // self.work.layout.ep)

    def seconds(self, start: int, stop: int) -> tuple[float, float]:
        """Of one micro-batch in layers [start, stop), forward and backward."""
        layers = self.layers
        forward = layers.forward[stop] - layers.forward[start]
        backward = layers.backward[stop] - layers.backward[start]
        if stop == len(self.dense) - 1:
            return forward + layers.head[0], backward + layers.head[1]
        return forward, backward

    @cached_property
    def state(self) -> tuple[float, float, float, float]:
        """Bytes that a rank keeps of weights, gradients and moments: for each weight that all expert ranks have, and
        for each of experts; for what is before the first layer and behind the last."""
        kind, layout, shape = self.work.state, self.work.layout, self.work.shape
        whole = kind.gradient + kind.gathered * (self.work.shards > 1)
        dense = (self.kept(kind.kept + kind.moments, 0) + whole) / layout.tp
        routed = (self.kept(0, kind.kept + kind.moments) + whole) / layout.tp / layout.ep
        behind = shape.head_parameters + shape.vocab * shape.hidden * shape.tied
        return dense, routed, dense * shape.embedding_parameters, dense * behind

    def bytes(self, start: int, stop: int, held: int) -> float:
        """As ``memory.rank_memory`` has it for one of several stages that holds so many micro-batches; or more where
        layers differ, for the most that any of them takes beside is taken for each."""
        dense, routed, first, last = self.state
        layers = self.layers
        needs = dense * (self.dense[stop] - self.dense[start]) + routed * (self.routed[stop] - self.routed[start])
        needs += held * (layers.saved[stop] - layers.saved[start])
        if start == 0:
            needs += first
        if stop == len(self.dense) - 1:
            return needs + last + max(layers.top, layers.loss)
        return needs + layers.top

    def most(self, start: int, stops: range, held: int) -> int:
        """The last of ``stops`` up to which layers from ``start`` fit, or ``start`` where none does."""
        fits = bisect_right(stops, self.where.memory, key=lambda stop: self.bytes(start, stop, held))
        return stops[fits - 1] if fits else start


class Costs:
    """A job on the nodes of a cluster, by their names. ``sound``: stages whose division the cost model was tested on
    and failed (``gates``) are not used."""

    def __init__(self, job: Job, kinds: Mapping[str, Target], sound: bool = True) -> None:
        self.job, self.kinds, self.sound = job, dict(kinds), sound
        self.base = Workload.of(job.model_copy(update={"layout": Layout()}))
        self.samples = -(-(job.batch.tokens or 0) // job.data.context)
        self.choices = [
            Choice(size, *again) for size in MICRO_BATCHES if size <= self.samples for again in RECOMPUTE
        ]  # fmt: skip
        parameters = [self.base.shape.layer_parameters(layer) for layer in self.base.shape.layers]
        self.dense = list(accumulate((dense for dense, _ in parameters), initial=0))
        self.routed = list(accumulate((routed for _, routed in parameters), initial=0))
        self._layers: dict[tuple[str, int, int, Choice], Layers] = {}
        self._stages: dict[tuple[Stage, bool, Choice, bool], StageCost] = {}
        self._speeds: dict[tuple[str, int, int], float] = {}
        self._refused: dict[tuple[Stage, int], str] = {}

    @property
    def gpus(self) -> int:
        """Of all kinds."""
        return sum(where.gpus for where in self.kinds.values())

    @property
    def left_out(self) -> Counter[str]:
        """Kinds of stages that were asked for and refused, by reason."""
        return Counter(why for why in self._refused.values() if why)

    @cached_property
    def space(self) -> Space:
        """What the model and the nodes allow."""
        kinds = {
            name: Kind(where.gpus, per_node := _per_node(where), tuple(self._tensor(per_node)))
            for name, where in self.kinds.items()
        }
        return Space(kinds, len(self.base.shape.layers), len(kinds) + 1)

    def _tensor(self, per_node: int) -> list[int]:
        return [tp for tp in TENSOR if per_node % tp == 0 and not any(misfits(Layout(tp=tp), self.job.model))]

    def stage(self, stage: Stage, several: bool, choice: Choice, early: bool = False) -> StageCost:
        """What a stage costs, whatever its layers, as the only one of its pipeline or as one of several. ``early``:
        sharded weights are freed and gradients reduced as soon as can be, where it is the only one."""
        key = stage, several, choice, early
        if key not in self._stages:
            where = self.kinds[stage.nodes]
            layout = self._layout(stage, 1 + several).model_copy(
                update={"reshard_after_forward": early or several, "reduce_every_round": early}
            )
            work = replace(self.base, layout=layout, micro_batch=choice.micro_batch, recompute=choice.recompute,
                           recompute_every=choice.every)  # fmt: skip
            clock = Clock(work, where.machine, calibration(), where.known)
            layers = self._of(stage.nodes, work, clock, choice)
            self._stages[key] = StageCost(work, clock, where, layers, self.dense, self.routed)
        return self._stages[key]

    def speed(self, stage: Stage) -> float:
        """Of all lanes of a stage, samples a second at most, with any choice and nothing but layers. Where layers of
        several kinds differ in how much faster one stage is than another, that of the kind where it gains most."""
        layout = self._layout(stage, 2)
        key = stage.nodes, stage.tp, layout.ep
        if key not in self._speeds:
            ways = [(choice.micro_batch, self.stage(stage, True, choice).layers.both) for choice in self.choices]
            first = next(iter(self.kinds))
            alone = self.stage(Stage(first, 1, 1), True, self.choices[0]).layers.both
            each = [after - before for before, after in pairwise(alone)]
            self._speeds[key] = max(
                size * one / (after - before)
                for size, both in ways
                for one, (before, after) in zip(each, pairwise(both), strict=True)
            ) / sum(each)
        return stage.lanes * self._speeds[key]

    @cached_property
    def fastest(self) -> dict[str, float]:
        """Of one GPU of each kind, samples a second at most, in any stage."""
        space = self.space
        return {
            name: max(self.speed(Stage(name, tp * lanes, tp)) / (tp * lanes)
                      for tp in kind.tensor for lanes in range(1, kind.per_node // tp + 1))
            for name, kind in space.kinds.items()
        }  # fmt: skip

    @cached_property
    def ideal(self) -> float:
        """Seconds of a step that is never less: all GPUs at their fastest."""
        return self.samples / sum(self.fastest[name] * where.gpus for name, where in self.kinds.items())

    def bound(self, template: Template) -> float:
        """Seconds that a template takes at least."""
        return self.samples / sum(self.speed(stage) for pipeline in template for stage in pipeline)

    def _layout(self, stage: Stage, stages: int) -> Layout:
        """As the cost model has it: that of a pipeline whose stages are all like this one."""
        where = self.kinds[stage.nodes]
        return Layout(dp_shard=stage.lanes, tp=stage.tp, pp=stages, ep=self._experts(stage, where))

    def refused(self, stage: Stage, stages: int) -> str:
        """Why a stage of a pipeline of so many may not be used: what the cost model has failed on, or nothing."""
        key = stage, stages
        if key not in self._refused:
            where = self.kinds[stage.nodes]
            work, why = replace(self.base, layout=self._layout(stage, stages)), ""
            for which in (capability("throughput", work, where.machine), capability("memory", work, where.machine)):
                if self.sound and contradiction(which):
                    why = f"withdrawn: {which}"
            self._refused[key] = why
        return self._refused[key]

    def hopeless(self, template: Template) -> bool:
        """Whether some stage may not be used, alone or with others."""
        stages = {stage for pipeline in template for stage in pipeline}
        return self.sound and any(self.refused(stage, 1) and self.refused(stage, 2) for stage in stages)

    def _experts(self, stage: Stage, where: Target) -> int:
        """Experts are divided over as many lanes as share a node and divide both."""
        experts = self.base.shape.experts
        if experts is None:
            return 1
        return gcd(gcd(stage.lanes, max(1, _per_node(where) // stage.tp)), experts.num_experts)

    def _of(self, nodes: str, work: Workload, clock: Clock, choice: Choice) -> Layers:
        key = nodes, work.layout.tp, work.layout.ep, choice
        if key not in self._layers:
            left, of, head = what_is_left(work), work.shape.layers, clock.head()
            seconds = {layer: tuple(sum(parts.values()) for parts in clock.layer(layer)) for layer in set(of)}
            forward, backward = (list(accumulate((seconds[one][way] for one in of), initial=0.0)) for way in (0, 1))
            self._layers[key] = Layers(
                forward, backward, [a + b for a, b in zip(forward, backward, strict=True)],
                list(accumulate((left[one][0] for one in of), initial=0.0)), (sum(head[0].values()),
                sum(head[1].values())), max(beside for _, beside in left.values()), loss_bytes(work),
            )  # fmt: skip
        return self._layers[key]


def _per_node(where: Target) -> int:
    return int(where.known.machine(where.machine).per_node.value)
