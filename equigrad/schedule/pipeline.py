"""Which stage is computed for which micro-batch, in which order: pipeline schedules. Pure Python over numbers.

A schedule is one list of actions per rank, a function of a few integers, so that every rank makes the same one alone.
``simulate`` plays it and tells time, bubble and memory; ``programs`` adds what ranks send each other, in an order that
cannot deadlock. Nothing here knows tensors or processes; ``equigrad.parallel.pipeline`` executes a program.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal, get_args

from equigrad.parallel.program import Action, Exchange, Program, StageAction, Transfer

PipelineKind = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]


Actions = tuple[Action | StageAction, ...]


@dataclass(frozen=True)
class PipelineSchedule:
    """``actions[rank]`` in the order in which that rank performs them. Stage ``s`` lives on rank ``s % ranks``.

    backward: whether gradients are computed
    """

    ranks: int
    stages_per_rank: int
    microbatches: int
    actions: tuple[Actions, ...]
    backward: bool = True

    @property
    def stages(self) -> int:
        """Number of stages over all ranks."""
        return self.ranks * self.stages_per_rank


@lru_cache(maxsize=64)
def pipeline(kind: PipelineKind, ranks: int, stages_per_rank: int, microbatches: int) -> PipelineSchedule:
    """The schedule of one step. All arguments are at least 1 and otherwise free.

    gpipe:       all forwards, then all backwards (Huang et al., arXiv 1811.06965)
    1f1b:        one forward, one backward: rank r holds at most min(microbatches, ranks - r) micro-batches (Narayanan
                 et al., arXiv 2006.09503); with several stages a rank the same as ``interleaved``
    interleaved: 1F1B over several stages a rank: a smaller bubble for more messages (arXiv 2104.04473, section 2.2)
    zero_bubble: 1F1B whose weight gradients fill the bubble: ZB-H1 of Qi et al., arXiv 2401.10241. No rank holds more
                 micro-batches than rank 0 does under 1F1B

    Every kind adds up the gradients of a stage in micro-batch order.
    """
    _check_sizes(ranks, stages_per_rank, microbatches)
    if kind == "gpipe":
        lists = _all_forward_all_backward(ranks, stages_per_rank, microbatches)
    elif kind == "zero_bubble":
        lists = _zero_bubble(ranks, stages_per_rank, microbatches)
    elif kind in get_args(PipelineKind):
        lists = _one_forward_one_backward(ranks, stages_per_rank, microbatches)
    else:
        raise ValueError(f"no pipeline schedule is called {kind!r}; there are {', '.join(get_args(PipelineKind))}")
    actions = tuple(_with_parameters(a, "reduce") for a in lists)
    return PipelineSchedule(ranks, stages_per_rank, microbatches, actions)


@lru_cache(maxsize=64)
def forward_pipeline(ranks: int, stages_per_rank: int, microbatches: int) -> PipelineSchedule:
    """The schedule of an evaluation: forwards only."""
    _check_sizes(ranks, stages_per_rank, microbatches)
    lists = (_forwards(rank, ranks, stages_per_rank, _groups(ranks, microbatches)) for rank in range(ranks))
    actions = tuple(_with_parameters([Action("forward", s, m) for s, m in pairs], "reshard") for pairs in lists)
    return PipelineSchedule(ranks, stages_per_rank, microbatches, actions, backward=False)


def _check_sizes(ranks: int, stages_per_rank: int, microbatches: int) -> None:
    for name, value in (("ranks", ranks), ("stages_per_rank", stages_per_rank), ("microbatches", microbatches)):
        if value < 1:
            raise ValueError(f"a pipeline needs {name} >= 1, not {value}")


def _all_forward_all_backward(ranks: int, per_rank: int, microbatches: int) -> list[list[Action]]:
    whole, lists = [range(microbatches)], []
    for rank in range(ranks):
        forwards = [Action("forward", s, m) for s, m in _forwards(rank, ranks, per_rank, whole)]
        lists.append(forwards + [Action("backward", s, m) for s, m in _backwards(rank, ranks, per_rank, whole)])
    return lists


def _groups(ranks: int, microbatches: int) -> list[range]:
    """Micro-batches go through a rank's stages in groups of at least ``ranks`` (or all there are): so the first of a
    group is back from the other ranks when the last has left."""
    count = max(1, microbatches // ranks)
    bounds = [microbatches * i // count for i in range(count + 1)]
    return [range(a, b) for a, b in pairwise(bounds)]


def _forwards(rank: int, ranks: int, per_rank: int, groups: Sequence[range]) -> list[tuple[int, int]]:
    """(stage, micro-batch) in the order of forwards: each group through all stages of the rank."""
    return [(s, m) for group in groups for s in range(rank, ranks * per_rank, ranks) for m in group]


def _backwards(rank: int, ranks: int, per_rank: int, groups: Sequence[range]) -> list[tuple[int, int]]:
    """The same through the stages in reverse."""
    return [(s, m) for group in groups for s in reversed(range(rank, ranks * per_rank, ranks)) for m in group]


def _warm_up(rank: int, ranks: int, per_rank: int, groups: Sequence[range]) -> int:
    """Forwards before the first backward, so that no rank waits in the steady state.

    With several stages a rank, a first group goes through all of them but the last.
    """
    behind = ranks - rank - 1
    return behind if per_rank == 1 else (per_rank - 1) * max(map(len, groups)) + 2 * behind


def _one_forward_one_backward(ranks: int, per_rank: int, microbatches: int) -> list[list[Action]]:
    """Megatron-LM's order, for any number of micro-batches: warm up, alternate, cool down."""
    groups, lists = _groups(ranks, microbatches), []
    for rank in range(ranks):
        forwards = [Action("forward", s, m) for s, m in _forwards(rank, ranks, per_rank, groups)]
        backwards = [Action("backward", s, m) for s, m in _backwards(rank, ranks, per_rank, groups)]
        warm_up = min(len(forwards), _warm_up(rank, ranks, per_rank, groups))
        actions = forwards[:warm_up]
        for pair in zip(forwards[warm_up:], backwards, strict=False):
            actions += pair
        lists.append(actions + backwards[len(forwards) - warm_up :])
    return lists


class _Worker:
    """One rank of a zero-bubble schedule in the making.

    forwards, backwards: (stage, micro-batch) in the order in which they will be done
    active, held:        how many went forward and wait for the gradient of their input, or for that of their weights
    """

    def __init__(self, rank: int, ranks: int, per_rank: int, groups: Sequence[range]) -> None:
        self.forwards = deque(_forwards(rank, ranks, per_rank, groups))
        self.backwards = deque(_backwards(rank, ranks, per_rank, groups))
        self.weights: deque[tuple[int, int]] = deque()
        self.max_active, self.max_held = (_warm_up(r, ranks, per_rank, groups) + 1 for r in (rank, 0))
        self.active, self.held = 0, 0
        self.actions: list[Action] = []

    @property
    def done(self) -> bool:
        return not (self.forwards or self.backwards or self.weights)

    def next(self, ready: Callable[[Action], bool]) -> Action | None:
        """What this rank does now: an input gradient if it can, else a forward if it may, else weight gradients."""
        if self.backwards and ready(action := Action("input_backward", *self.backwards[0])):
            self.weights.append(self.backwards.popleft())
            self.active -= 1
            return action
        may = self.forwards and self.active < self.max_active and self.held < self.max_held
        if may and ready(action := Action("forward", *self.forwards[0])):
            self.forwards.popleft()
            self.active, self.held = self.active + 1, self.held + 1
            return action
        if self.weights:
            self.held -= 1
            return Action("weight_backward", *self.weights.popleft())
        return None


def _zero_bubble(ranks: int, per_rank: int, microbatches: int) -> list[list[Action]]:
    """Play the pipeline with actions of one length each, every rank choosing as it goes: what was played can be played
    again."""
    groups = _groups(ranks, microbatches)
    workers = [_Worker(rank, ranks, per_rank, groups) for rank in range(ranks)]
    made: set[_Product] = set()

    def ready(action: Action) -> bool:
        return all(product in made for product in _needs(action, ranks * per_rank))

    while not all(worker.done for worker in workers):
        chosen = [(worker, action) for worker in workers if (action := worker.next(ready)) is not None]
        assert chosen, "the limits in flight let every rank wait"
        for worker, action in chosen:
            worker.actions.append(action)
            made.update(_makes(action))
    return [worker.actions for worker in workers]


def _with_parameters(actions: Sequence[Action], end: Literal["reduce", "reshard"]) -> Actions:
    """Gather a stage's parameters one action ahead of its first, ``end`` right after its last."""
    first = {a.stage: i for i, a in reversed(list(enumerate(actions)))}
    last = {a.stage: i for i, a in enumerate(actions)}
    result: list[Action | StageAction] = []
    for i, action in enumerate(actions):
        result += [StageAction("unshard", s) for s, at in first.items() if max(at - 1, 0) == i]
        result.append(action)
        result += [StageAction(end, s) for s, at in last.items() if at == i]
    return tuple(result)


# What an action makes: the activation that leaves a stage, the gradient of what entered it, its weights' gradients.
_Product = tuple[Literal["activation", "gradient", "weights"], int, int]


def _makes(action: Action) -> Iterator[_Product]:
    if action.kind == "forward":
        yield "activation", action.stage, action.microbatch
    if action.kind in ("backward", "input_backward"):
        yield "gradient", action.stage, action.microbatch
    if action.kind in ("backward", "weight_backward"):
        yield "weights", action.stage, action.microbatch


def _needs(action: Action, stages: int) -> Iterator[_Product]:
    if action.kind == "forward":
        if action.stage > 0:
            yield "activation", action.stage - 1, action.microbatch
    elif action.kind == "weight_backward":
        yield "gradient", action.stage, action.microbatch
    else:
        yield "activation", action.stage, action.microbatch
        if action.stage + 1 < stages:
            yield "gradient", action.stage + 1, action.microbatch


Cost = Callable[[Action | StageAction], float]


def unit_cost(action: Action | StageAction) -> float:
    """Forward, input gradient and weight gradient take 1 each, a whole backward 2; communication is free."""
    return {"backward": 2.0, "unshard": 0.0, "reduce": 0.0, "reshard": 0.0}.get(action.kind, 1.0)


def sized_cost(sizes: Sequence[float]) -> Cost:
    """``unit_cost`` times the size of each micro-batch: its tokens, or better its operations; more than 0."""
    return lambda action: unit_cost(action) * (sizes[action.microbatch] if isinstance(action, Action) else 1.0)


class PipelineDeadlock(RuntimeError):
    """Some ranks wait for each other forever. The message says which action waits for what."""


@dataclass(frozen=True)
class Span:
    """An action and when it runs, in units of the cost."""

    action: Action | StageAction
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """A schedule, played.

    spans: those of each rank, in order
    time:  when the last action ends
    alive: of each rank, the largest number of (stage, micro-batch) pairs whose activations it holds at one time
    """

    spans: tuple[tuple[Span, ...], ...]
    time: float
    alive: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they wait."""
        busy = sum(span.end - span.start for spans in self.spans for span in spans)
        return 1 - busy / (self.time * len(self.spans))


def simulate(schedule: PipelineSchedule, cost: Cost = unit_cost, latency: float = 0.0) -> Simulation:
    """Play a schedule: each rank performs its actions in order, each as soon as what it needs is there.

    ``latency`` is the time between the end of an action and its result on another rank. Raises ``ValueError`` where an
    action is missing, is there twice or has no place where it stands, ``PipelineDeadlock`` where ranks would wait
    forever.
    """
    _check(schedule)
    made: dict[_Product, tuple[float, int]] = {}
    spans: list[list[Span]] = [[] for _ in schedule.actions]

    def waits_for(action: Action | StageAction) -> list[_Product]:
        return [p for p in _needs(action, schedule.stages) if p not in made] if isinstance(action, Action) else []

    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.actions):
            while len(spans[rank]) < len(actions) and not waits_for(action := actions[len(spans[rank])]):
                start = spans[rank][-1].end if spans[rank] else 0.0
                if isinstance(action, Action):
                    arrivals = (made[p] for p in _needs(action, schedule.stages))
                    start = max([start, *(end + (latency if source != rank else 0) for end, source in arrivals)])
                span = Span(action, start, start + cost(action))
                spans[rank].append(span)
                if isinstance(action, Action):
                    made |= dict.fromkeys(_makes(action), (span.end, rank))
                moved = True
    blocked = []
    for rank, actions in enumerate(schedule.actions):
        if len(spans[rank]) < len(actions):
            action = actions[len(spans[rank])]
            missing = (f"the {what} of stage {s}, micro-batch {m}" for what, s, m in waits_for(action))
            blocked.append(f"\n  rank {rank}: {action} waits for {' and '.join(missing)}")
    if blocked:
        raise PipelineDeadlock("the pipeline stands still:" + "".join(blocked))
    time = max(rank[-1].end for rank in spans)
    return Simulation(tuple(map(tuple, spans)), time, tuple(map(_peak, schedule.actions)))


def _peak(actions: Actions) -> int:
    if not any(action.kind == "reduce" for action in actions):
        return 1  # no backward pass will need what a forward makes
    alive = peak = 0
    for action in actions:
        alive += (action.kind == "forward") - (action.kind in ("backward", "weight_backward"))
        peak = max(peak, alive)
    return peak


def _check(schedule: PipelineSchedule) -> None:
    """Everything is made once, on the rank of its stage, while the stage's parameters are gathered."""
    seen: set[_Product] = set()
    end = "reduce" if schedule.backward else "reshard"
    for rank, actions in enumerate(schedule.actions):
        state: dict[int, str] = {}
        for action in actions:
            stage, problem = action.stage, ""
            if stage % schedule.ranks != rank:
                problem = f"the stage is on rank {stage % schedule.ranks}"
            elif isinstance(action, StageAction):
                if (state.get(stage), action.kind) not in ((None, "unshard"), ("unshard", end)):
                    problem = f"follows {state.get(stage, 'nothing')}"
                state[stage] = action.kind
            elif state.get(stage) != "unshard":
                problem = "the stage's parameters are not gathered"
            elif not seen.isdisjoint(_makes(action)):
                problem = "is there twice"
            else:
                seen.update(_makes(action))
            if problem:
                raise ValueError(f"rank {rank}, {action}: {problem}")
        if state != dict.fromkeys(range(rank, schedule.stages, schedule.ranks), end):
            raise ValueError(f"rank {rank} does not {end} each of its stages once, but {sorted(state)}")
    made = ("activation", "gradient", "weights") if schedule.backward else ("activation",)
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            for what in made:
                if (what, stage, microbatch) not in seen:
                    raise ValueError(f"nothing computes the {what} of stage {stage}, micro-batch {microbatch}")


def programs(schedule: PipelineSchedule, cost: Cost = unit_cost) -> tuple[Program, ...]:
    """The program of each rank: its actions, with the messages that it sends and receives in between.

    In simulated time a message belongs to the moment at which it is made. Each rank posts the messages of one moment
    together and those of different moments in order, each before the first action that ends later. So there is one
    order of all actions and messages of all ranks, by time, that agrees with every rank's program and in which each
    comes after what it depends on. Hence nothing can deadlock, even if messages have no tags, if all messages of a rank
    go through one queue, and if each waits until the other side has posted it too. The closer ``cost`` is to the truth,
    the less a message waits behind another in such a queue. It must be more than 0 for every ``Action``, and the same
    on all ranks; on all data lanes too, where they share the collectives of sharded stages: take a round's costliest
    row.
    """
    spans = simulate(schedule, cost).spans
    posted: list[dict[float, list[Transfer]]] = [{} for _ in spans]
    for moment, transfer in _transfers(schedule, spans):
        for rank in (transfer.source, transfer.target):
            posted[rank].setdefault(moment, []).append(transfer)
    result = []
    for rank in range(schedule.ranks):
        # At one moment: actions that end, then messages, then collectives of the data lanes.
        steps: list[tuple[float, int, Action | StageAction | Exchange]] = [
            (span.end, 0 if isinstance(span.action, Action) else 2, span.action) for span in spans[rank]
        ]
        steps += [(moment, 1, Exchange(tuple(sorted(transfers)))) for moment, transfers in posted[rank].items()]
        steps.sort(key=lambda step: step[:2])
        ordered = tuple(step for _, _, step in steps)
        result.append(Program(rank, schedule.ranks, schedule.stages, schedule.backward, ordered))
    return tuple(result)


def _transfers(schedule: PipelineSchedule, spans: Sequence[Sequence[Span]]) -> Iterator[tuple[float, Transfer]]:
    """Every message, with the moment at which it is made."""
    for rank, own in enumerate(spans):
        for span in own:
            if not isinstance(span.action, Action):
                continue
            if span.end <= span.start:
                raise ValueError(f"the cost of the {span.action} is not more than 0, or lost in rounding")
            for what, stage, microbatch in _makes(span.action):
                to = stage + 1 if what == "activation" else stage - 1
                target = to % schedule.ranks
                if what != "weights" and 0 <= to < schedule.stages and target != rank:
                    yield span.end, Transfer(rank, target, what, to, microbatch)
