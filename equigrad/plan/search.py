"""The fastest layouts of a job on a cluster, among all that fit. Exhaustive: what is not computed is proven slower.

Layouts are taken in the order of a lower bound of their step's time, until that bound is above the last of the best
few. Two of the best always differ in degrees: each is another way, not the same one with a detail changed.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf

from equigrad.config.job import Job
from equigrad.config.layout import Layout
from equigrad.plan.gates import Answer, Capability, State, capability, evidence, state
from equigrad.plan.memory import Memory, exceeds, memory, what_is_left
from equigrad.plan.space import Choice, Order, Space
from equigrad.plan.step import Step, stage_seconds, step
from equigrad.plan.target import Target
from equigrad.plan.workload import Workload
from equigrad.schedule.pipeline import PipelineKind

DAY = 86_400
SLACK = 1e-9
"""Relative: what a bound may be above the time that it bounds, for sums are rounded."""


@dataclass(frozen=True)
class Plan:
    """One layout, with what is predicted for it.

    state:  the worse of the two answers', and ``unvalidated`` on a changed machine
    tokens: of the job in a step; the workload's are more where rows are padded
    """

    work: Workload
    time: Answer[Step]
    memory: Answer[Memory]
    state: State
    tokens: int

    @property
    def seconds(self) -> float:
        return self.time.value.seconds

    @property
    def tokens_per_day(self) -> float:
        return self.tokens * DAY / self.seconds

    @property
    def mfu(self) -> float:
        """Padding is no use."""
        return self.time.value.mfu * self.tokens / self.work.tokens

    @property
    def order(self) -> tuple[float, float, tuple[int, ...], str]:
        """Best first, of equals the simplest, and the same in every run."""
        layout = self.work.layout
        simple = (layout.pp, layout.tp, layout.cp, layout.ep, layout.dp_replicate, layout.pp_stages)
        return self.seconds, self.memory.value.total, simple, repr(self.work)


@dataclass
class Found:
    """What a search has found.

    plans:     the best, in order
    degrees:   products of degrees that were searched
    timed:     layouts whose step was computed; all others are proven slower than the last of ``plans``
    left_out:  products of degrees that may not be answered for, by reason
    least:     where nothing fits: the least memory of any layout, in bytes, with its workload
    """

    plans: list[Plan] = field(default_factory=list)
    degrees: int = 0
    timed: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    least: tuple[float, Workload] | None = None


def search(job: Job, where: Target, top: int = 5, unvalidated: bool = False) -> Found:
    """The best ``top``. ``UserError`` for jobs whose cost is not known."""
    return _Search(Space.of(job, where.gpus), where, top, unvalidated).run()


def answers(work: Workload, where: Target) -> tuple[Capability, Capability, State, str]:
    """The capabilities of a workload's time and memory, the worse state, and why it is not validated."""
    asked = capability("throughput", work, where.machine), capability("memory", work, where.machine)
    worse: tuple[State, State] = ("withdrawn", "unvalidated")
    for bad in worse:
        for which in asked:
            if state(which) == bad:
                return *asked, bad, f"{bad}: {which}"
    if where.changed:
        return *asked, "unvalidated", f"unvalidated: the cluster is not {where.machine} ({where.changed})"
    return *asked, "validated", ""


class _Search:
    """Kept by what they depend on, which is neither how weights are sharded nor the pipeline:

    through: seconds of one micro-batch through the whole model, forward and backward
    left:    parameters of a tensor rank, those of all expert ranks and its own experts; bytes that all layers leave for
             the backward pass of a micro-batch; bytes that this pass takes in any layer beside
    """

    def __init__(self, space: Space, where: Target, top: int, unvalidated: bool) -> None:
        self.space, self.where, self.top, self.unvalidated = space, where, top, unvalidated
        self.found = Found()
        self.best: dict[Layout, Plan] = {}
        self.through: dict[tuple[int, int, int, Choice], tuple[float, float]] = {}
        self.left: dict[tuple[int, int, int, Choice], tuple[int, int, float, float]] = {}

    def run(self) -> Found:
        """Degrees with choices, by bound; each is taken apart into orders of the pipeline, by bound again."""
        waiting: list[tuple[float, int, Layout, Choice, Order | None]] = []
        for layout in self.permitted():
            for choice in self.space.choices(layout):
                if self.least_bytes(layout, choice) > self.where.memory:
                    continue
                waiting.append((self.bound(layout, choice), len(waiting), layout, choice, None))
        heapify(waiting)
        number = len(waiting)
        while waiting:
            bound, _, layout, choice, order = heappop(waiting)
            if bound > self.threshold(layout):
                if bound > self.threshold():
                    break
                continue
            if order is None:
                for order in self.space.orders(layout, choice):
                    number += 1
                    heappush(waiting, (self.bound(layout, choice, order), number, layout, choice, order))
                continue
            self.consider(layout, list(self.space.works(layout, choice, order)))
        self.found.plans = sorted(self.best.values(), key=lambda plan: plan.order)[: self.top]
        if not self.found.plans:
            self.found.least = self.leanest()
        return self.found

    def permitted(self) -> Iterator[Layout]:
        """Products of degrees that may be answered for; the others are counted."""
        self.found.degrees, self.found.left_out = 0, Counter()
        for layout in self.space.degrees():
            choice = next(self.space.choices(layout))
            *_, found, why = answers(self.space.work(layout, choice), self.where)
            if found == "validated" or (found == "unvalidated" and self.unvalidated):
                self.found.degrees += 1
                yield layout
            else:
                self.found.left_out[why] += 1

    def threshold(self, layout: Layout | None = None) -> float:
        """Seconds above which nothing changes the best few; with ``layout``, nothing of the same degrees."""
        if layout is not None and layout in self.best:
            return self.best[layout].seconds
        if len(self.best) < self.top:
            return inf
        return sorted(plan.seconds for plan in self.best.values())[self.top - 1]

    def bound(self, layout: Layout, choice: Choice, order: Order | None = None) -> float:
        """Seconds that no layout with these takes less than; without ``order``, with any order."""
        key = layout.tp, layout.cp, layout.ep, choice
        if key not in self.through:
            alone = layout.model_copy(update={"pp": 1, "cp_strategy": choice.strategy})
            [self.through[key]] = stage_seconds(
                self.space.work(alone, choice), self.where.machine, known=self.where.known
            )
        forward, backward = self.through[key]
        rows = -(-self.space.samples // (choice.micro_batch * layout.data_lanes))
        if order is None:
            ways: list[PipelineKind] = ["1f1b", "zero_bubble"] if layout.pp > 1 else ["1f1b"]
            # As more stages a rank come closer and closer to, but for a zero-bubble pipeline, which has one.
            least = min(least_seconds(forward, backward, rows, layout.pp, kind, inf if kind == "1f1b" else 1)
                        for kind in ways)  # fmt: skip
        else:
            least = least_seconds(forward, backward, rows, layout.pp, order.schedule, order.stages)
        return least * (1 - SLACK)

    def least_bytes(self, layout: Layout, choice: Choice) -> float:
        """Bytes that some rank takes at least, with any order and any rest.

        The rank that takes most takes what ranks take on average. All of them together keep the state of a pipeline,
        sharded as far as can be, and at least one micro-batch of what layers leave: a rank holds as many pairs of stage
        and micro-batch as it has stages, or more.
        """
        key = layout.tp, layout.cp, layout.ep, choice
        if key not in self.left:
            work = self.space.work(layout.model_copy(update={"pp": 1, "cp_strategy": choice.strategy}), choice)
            left = what_is_left(work)
            saved = sum(left[layer][0] for layer in work.shape.layers)
            self.left[key] = (*work.stage_parameters(0), saved, min(beside for _, beside in left.values()))
        dense, routed, saved, beside = self.left[key]
        shards, kind = layout.dp_shard * layout.cp, self.space.base.state
        own = dense / shards + routed / max(1, shards // layout.ep)
        return ((kind.kept + kind.gradient + kind.moments) * own + saved) / layout.pp * (1 - SLACK) + beside

    def leanest(self) -> tuple[float, Workload] | None:
        """The layout that takes least memory, for who asks what would fit."""
        all_of = ((self.least_bytes(layout, choice), layout, choice)
                  for layout in self.permitted() for choice in self.space.choices(layout))  # fmt: skip
        best: tuple[float, Workload] | None = None
        for bound, layout, choice in sorted(all_of, key=lambda one: one[0]):
            if best is not None and bound > best[0]:
                break
            for order in self.space.orders(layout, choice):
                for work in self.space.works(layout, choice, order):
                    total = memory(work).total
                    if best is None or total < best[0]:
                        best = total, work
        return best

    def consider(self, layout: Layout, works: list[Workload]) -> None:
        """Keep those that fit, unless others of the same degrees are better.

        ``works`` differ in when weights are freed and gradients reduced. The last of them does both as early as can be:
        no use of memory but buffers is smaller in another.
        """
        if exceeds(works[-1], self.where.memory * (1 + SLACK)):
            return
        for work in works:
            self.found.timed += 1
            time = step(work, self.where.machine, known=self.where.known)
            if time.seconds > min(self.threshold(layout), self.threshold()):
                continue
            needs = memory(work)
            if needs.total <= self.where.memory:
                self.keep(layout, work, time, needs)

    def keep(self, layout: Layout, work: Workload, time: Step, needs: Memory) -> None:
        """Where nothing of the same degrees is better."""
        of_time, of_memory, worse, _ = answers(work, self.where)
        plan = Plan(
            work,
            Answer(time, of_time, state(of_time), evidence().get(of_time)),
            Answer(needs, of_memory, state(of_memory), evidence().get(of_memory)),
            worse,
            min(self.space.job.batch.tokens or 0, work.tokens),
        )
        if layout not in self.best or plan.order < self.best[layout].order:
            self.best[layout] = plan


def least_seconds(forward: float, backward: float, rows: int, ranks: int, kind: PipelineKind, stages: float) -> float:
    """Seconds that a step takes at least: computation and the pipeline's bubble, all else left out.

    ``forward``, ``backward``: of one micro-batch through all stages. With S = forward + backward of all ranks, s of the
    slowest and v stages a rank, ``plan.step`` adds up m s + (S - s) / v = (m - 1/v) s + S / v, and parts that are never
    below 0. m >= 1 >= 1/v and s >= S / ranks, so (m - 1/v) S / ranks + S / v is no more. In a zero-bubble pipeline the
    bubble is (F - f) / v of forward passes alone, and f <= s: (m - 1/v) S / ranks + F / v.
    """
    bubble = forward if kind == "zero_bubble" else forward + backward
    return (rows - 1 / stages) * (forward + backward) / ranks + bubble / stages
