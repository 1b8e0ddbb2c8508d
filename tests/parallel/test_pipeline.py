"""A pipeline of real processes computes what one process does, whatever the schedule and the token counts."""

import functools
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from equigrad.numerics.deferred import DeferredWeightGradients
from equigrad.numerics.native import NativeOps
from equigrad.numerics.row import Row
from equigrad.parallel.pipeline import Hidden, Stage, run_pipeline
from equigrad.schedule.pipeline import PipelineKind, forward_pipeline, pipeline, programs, sized_cost
from tests.numerics.layers import Given
from tests.workers import Workers

Pools = Callable[[int], Workers]
KINDS: tuple[PipelineKind, ...] = ("gpipe", "1f1b", "interleaved", "zero_bubble")
LAYERS, WIDTH, VOCAB = 8, 6, 11
TOKENS = (9, 1, 0, 3, 10)
OPS = NativeOps()


class Layer(nn.Module):
    """Norm, gated feed-forward and residual."""

    def __init__(self, number: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        self.norm = nn.Parameter(torch.ones(WIDTH))
        self.gate, self.up, self.down = (
            nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator) / 2) for _ in range(3)
        )

    def forward(self, x: Tensor, row: Row) -> Tensor:
        x, branch = OPS.fork(x, row)
        branch = OPS.norm(branch, Given(self.norm), 1e-6, row)
        gate, up = OPS.column_linears(branch, [Given(self.gate), Given(self.up)], row)
        return OPS.add(x, OPS.row_linear(OPS.gated(gate, up, row), Given(self.down), row), row)


class Part(nn.Module):
    """Some of the layers, the embedding before the first and the head after the last."""

    def __init__(self, layers: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): Layer(i) for i in layers})
        generator = torch.Generator().manual_seed(99)
        ends = torch.randn(2, VOCAB, WIDTH, generator=generator)
        self.embedding = nn.Parameter(ends[0].clone()) if 0 in layers else None
        self.head = nn.Parameter(ends[1].clone()) if LAYERS - 1 in layers else None

    def forward(self, x: Tensor, labels: Tensor, row: Row, count: int) -> Tensor:
        if self.embedding is not None:
            x = OPS.embedding(x, Given(self.embedding), VOCAB, row)
        for layer in self.layers.values():
            x = layer(x, row)
        if self.head is None:
            return x
        return OPS.cross_entropy(x, Given(self.head), labels, None, VOCAB, row).sum() / count


def rows(tokens: Sequence[int], lane: int = 0) -> list[tuple[Tensor, Tensor, Row]]:
    """Ids, labels and row of each micro-batch of a data lane."""
    made = []
    for microbatch, length in enumerate(tokens):
        generator = torch.Generator().manual_seed(1000 * lane + microbatch)
        ids, labels = torch.randint(VOCAB, (2, length), generator=generator)
        made.append((ids, labels, Row.of([length])))
    return made


class PartStage:
    """A stage on given rows, as the executor wants it."""

    def __init__(self, part: nn.Module, data: Sequence[tuple[Tensor, Tensor, Row]], count: int) -> None:
        self.module, self.data, self.count = part, data, count
        self.failing: int | None = None
        self.outputs: list[StorageWeakRef] = []
        self.most = 0

    def forward(self, x: Tensor | None, microbatch: int) -> Tensor:
        if microbatch == self.failing:
            raise ArithmeticError("as asked")
        ids, labels, row = self.data[microbatch]
        y = self.module(ids if x is None else x, labels, row, self.count)
        self.outputs.append(StorageWeakRef(y.untyped_storage()))
        self.most = max(self.most, sum(not output.expired() for output in self.outputs))
        return y


def split(stages: int) -> list[range]:
    per_stage = LAYERS // stages
    return [range(s * per_stage, (s + 1) * per_stage) for s in range(stages)]


def hidden(tokens: Sequence[int]) -> Hidden:
    return Hidden(lambda stage, microbatch: (tokens[microbatch], WIDTH), torch.float32, torch.device("cpu"))


def fresh_group(ranks: tuple[int, ...], seconds: float = 30) -> dist.ProcessGroup:
    """A pipeline group apart from the pool's own."""
    return cast(dist.ProcessGroup, dist.new_group(list(ranks), timeout=timedelta(seconds=seconds)))


Result = tuple[dict[int, Tensor], dict[str, Tensor]]


def pipelined(kind: PipelineKind, stages_per_rank: int, tokens: Sequence[int], sized: bool = False) -> Result:
    """Losses and gradients that this rank holds after one step."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    group = fresh_group(tuple(range(ranks)))
    schedule = pipeline(kind, ranks, stages_per_rank, len(tokens))
    cost = sized_cost([1 + 10 * t for t in tokens]) if sized else sized_cost([1] * len(tokens))
    program, layers = programs(schedule, cost)[rank], split(schedule.stages)
    stages = {s: PartStage(Part(layers[s]), rows(tokens), sum(tokens)) for s in range(rank, schedule.stages, ranks)}
    losses = run_pipeline(program, stages, hidden(tokens), DeferredWeightGradients, group)
    return losses, gradients([stage.module for stage in stages.values()])


def gradients(parts: Sequence[nn.Module]) -> dict[str, Tensor]:
    """All gradients; a parameter without one fails here. Sharded ones are gathered."""
    named = [(n, cast(Any, p.grad)) for part in parts for n, p in part.named_parameters()]
    assert all(g is not None for _, g in named)
    return {n: (g.full_tensor() if hasattr(g, "full_tensor") else g) for n, g in named}


def several(kinds: Sequence[PipelineKind], stages_per_rank: int, tokens: Sequence[int]) -> list[Result]:
    return [pipelined(kind, stages_per_rank, tokens) for kind in kinds] + [
        pipelined(kinds[-1], stages_per_rank, tokens, sized=True)
    ]


@functools.cache
def reference(tokens: tuple[int, ...], lanes: int = 1) -> Result:
    """One process, one row after the other."""
    whole = Part(range(LAYERS))
    losses = {}
    for lane in range(lanes):
        for microbatch, (ids, labels, row) in enumerate(rows(tokens, lane)):
            loss = whole(ids, labels, row, lanes * sum(tokens))
            loss.backward()
            losses[lane * len(tokens) + microbatch] = loss.detach()
    return losses, gradients([whole])


def assert_close(result: Result, wanted: Result) -> None:
    for have, want in flat(result, wanted):
        assert (have - want).norm() <= 1e-5 * want.norm()


def flat(*results: Result) -> list[tuple[Tensor, ...]]:
    """The tensors of several results, side by side; all have the same names."""
    (losses, found), *_ = results
    assert all((own.keys(), named.keys()) == (losses.keys(), found.keys()) for own, named in results)
    return [tuple(own[m] for own, _ in results) for m in losses] + [tuple(g[n] for _, g in results) for n in found]


def merged(parts: Sequence[Result]) -> Result:
    """The results of all ranks; no two hold the same thing."""
    losses: dict[int, Tensor] = {}
    found: dict[str, Tensor] = {}
    for some, own in parts:
        assert not losses.keys() & some.keys()
        assert not found.keys() & own.keys()
        losses, found = losses | some, found | own
    return losses, found


@pytest.mark.parametrize("stages_per_rank", [1, 2])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("tokens", [TOKENS, (4,), (0, 5, 2, 0, 0, 7, 1, 3, 0)])
def test_every_schedule_computes_what_one_process_does(
    workers: Pools, ranks: int, stages_per_rank: int, tokens: tuple[int, ...]
) -> None:
    by_rank = workers(ranks).run(several, KINDS, stages_per_rank, tokens)
    assert [set(losses) for losses, _ in [results[0] for results in by_rank]] == [set()] * (ranks - 1) + [
        set(range(len(tokens)))
    ]
    results = [merged([results[k] for results in by_rank]) for k in range(len(KINDS) + 1)]
    for result in results:
        assert_close(result, reference(tokens))
        assert all(torch.equal(have, first) for have, first in flat(result, results[0]))


@pytest.mark.parametrize("kind", KINDS)
def test_stages_of_one_process_hand_their_tensors_on(kind: PipelineKind) -> None:
    program = programs(pipeline(kind, 1, 4, len(TOKENS)))[0]
    stages = {s: PartStage(Part(part), rows(TOKENS), sum(TOKENS)) for s, part in enumerate(split(4))}
    losses = run_pipeline(program, stages, hidden(TOKENS), DeferredWeightGradients)
    assert_close((losses, gradients([stage.module for stage in stages.values()])), reference(TOKENS))


def sharded(kind: PipelineKind, stages_per_rank: int, blocks: bool) -> tuple[int, list[Result]]:
    """Two pipeline ranks on two data lanes: a step, an evaluation, a step, each with its result; and the lane."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))
    rank, lane = mesh.get_local_rank("pipeline"), mesh.get_local_rank("data")
    training = pipeline(kind, 2, stages_per_rank, len(TOKENS))
    evaluation = forward_pipeline(2, stages_per_rank, len(TOKENS))
    stages: dict[int, Stage] = {}
    for number in range(rank, training.stages, 2):
        part = Part(split(training.stages)[number])
        for module in [*(part.layers.values() if blocks else ()), part]:
            unit = fully_shard(module, mesh=mesh["data"], reshard_after_forward=True)
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        stages[number] = PartStage(part, rows(TOKENS, lane), 2 * sum(TOKENS))
    parameters = [parameter for stage in stages.values() for parameter in stage.module.parameters()]
    results = []
    for schedule in (training, evaluation, training):
        program, group = programs(schedule)[rank], mesh.get_group("pipeline")
        losses = run_pipeline(program, stages, hidden(TOKENS), DeferredWeightGradients, group)
        assert [p.grad is None for p in parameters] == [schedule is evaluation] * len(parameters)
        found = {} if schedule is evaluation else gradients([stage.module for stage in stages.values()])
        results.append((losses, found))
        now = [parameter for stage in stages.values() for parameter in stage.module.parameters()]
        assert all(a is b for a, b in zip(now, parameters, strict=True)), "the parameters are not sharded again"
        for parameter in parameters:
            parameter.grad = None
    return lane, results


@pytest.mark.parametrize(("stages_per_rank", "blocks"), [(1, True), (2, False), (2, True)])
@pytest.mark.parametrize("kind", KINDS)
def test_sharded_stages_reduce_all_gradients_once(
    workers: Pools, kind: PipelineKind, stages_per_rank: int, blocks: bool
) -> None:
    by_rank = workers(4).run(sharded, kind, stages_per_rank, blocks)
    for step in range(3):
        losses: dict[int, Tensor] = {}
        for lane, results in by_rank:
            losses |= {lane * len(TOKENS) + m: loss for m, loss in results[step][0].items()}
        for lane in range(2):
            _, found = merged([results[step] for at, results in by_rank if at == lane])
            wanted_losses, wanted = reference(TOKENS, 2)
            assert_close((losses, found), (wanted_losses, {} if step == 1 else wanted))


def replicated() -> Result:
    """One pipeline rank whose stages are sharded over two ranks and copied to two more."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    stages = {}
    for number, layers in enumerate(split(2)):
        part = Part(layers)
        unit = fully_shard(part, mesh=mesh)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        stages[number] = PartStage(part, rows(TOKENS, dist.get_rank()), 4 * sum(TOKENS))
    program = programs(pipeline("zero_bubble", 1, 2, len(TOKENS)))[0]
    losses = run_pipeline(program, stages, hidden(TOKENS), DeferredWeightGradients)
    return losses, gradients([stage.module for stage in stages.values()])


def test_replicated_shards_reduce_too(workers: Pools) -> None:
    results = workers(4).run(replicated)
    losses = {rank * len(TOKENS) + m: loss for rank, (own, _) in enumerate(results) for m, loss in own.items()}
    for _, found in results:
        assert_close((losses, found), reference(TOKENS, 4))


def failing(kind: PipelineKind) -> tuple[str, list[str], float]:
    """Rank 1 fails in the middle; says what each rank learns and when."""
    rank, started = dist.get_rank(), time.perf_counter()
    group = cast(dist.ProcessGroup, dist.new_group([0, 1], timeout=timedelta(seconds=2)))
    program = programs(pipeline(kind, 2, 1, len(TOKENS)))[rank]
    stage = PartStage(Part(split(2)[rank]), rows(TOKENS), sum(TOKENS))
    stage.failing = 3 if rank == 1 else None
    try:
        run_pipeline(program, {rank: stage}, hidden(TOKENS), DeferredWeightGradients, group)
    except Exception as error:
        return type(error).__name__, getattr(error, "__notes__", []), time.perf_counter() - started
    return "nothing", [], time.perf_counter() - started


@pytest.mark.parametrize("kind", ["1f1b", "zero_bubble"])
def test_a_failing_rank_leaves_nobody_waiting(workers: Pools, kind: PipelineKind) -> None:
    (other, _, waited), (own, notes, _) = workers(2).run(failing, kind)
    assert own == "ArithmeticError"
    assert notes == ["pipeline rank 1, forward of stage 1, micro-batch 3"]
    assert other in ("RuntimeError", "DistBackendError")
    assert waited < 20


def outputs_alive(kind: PipelineKind, microbatches: int) -> int:
    """The largest number of stage outputs that exist at one time."""
    rank, tokens = dist.get_rank(), [7] * microbatches
    program = programs(pipeline(kind, 2, 1, microbatches))[rank]
    stage = PartStage(Part(split(2)[rank]), rows(tokens), sum(tokens))
    run_pipeline(program, {rank: stage}, hidden(tokens), DeferredWeightGradients, fresh_group((0, 1)))
    return stage.most


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "zero_bubble"])
def test_what_was_sent_is_not_kept_for_the_backward_pass(workers: Pools, kind: PipelineKind) -> None:
    sender, _ = workers(2).run(outputs_alive, kind, 16)
    assert sender <= 6  # four on their way, one about to be sent, one just made


def evaluated(stages_per_rank: int) -> tuple[dict[int, Tensor], bool]:
    """Losses of an evaluation, and whether the parameters are left as they were."""
    rank = dist.get_rank()
    schedule = forward_pipeline(2, stages_per_rank, len(TOKENS))
    layers, program = split(schedule.stages), programs(schedule)[rank]
    stages = {s: PartStage(Part(layers[s]), rows(TOKENS), sum(TOKENS)) for s in range(rank, schedule.stages, 2)}
    losses = run_pipeline(program, stages, hidden(TOKENS), DeferredWeightGradients, fresh_group((0, 1)))
    return losses, all(p.grad is None for stage in stages.values() for p in stage.module.parameters())


@pytest.mark.parametrize("stages_per_rank", [1, 2])
def test_an_evaluation_has_the_losses_and_no_gradients(workers: Pools, stages_per_rank: int) -> None:
    (nothing, _), (losses, _) = results = workers(2).run(evaluated, stages_per_rank)
    assert nothing == {}
    assert all(untouched for _, untouched in results)
    assert_close((losses, {}), (reference(TOKENS)[0], {}))
    assert not any(loss.requires_grad for loss in losses.values())


def test_what_does_not_fit_the_program_is_refused() -> None:
    program = programs(pipeline("1f1b", 1, 2, len(TOKENS)))[0]
    stages = {s: PartStage(Part(part), rows(TOKENS), sum(TOKENS)) for s, part in enumerate(split(2))}
    with pytest.raises(ValueError, match=r"rank 0 needs stages \[0, 1\], not \[1\]"):
        run_pipeline(program, {1: stages[1]}, hidden(TOKENS), DeferredWeightGradients)
    two = programs(pipeline("1f1b", 2, 1, len(TOKENS)))[1]
    with pytest.raises(ValueError, match="this is rank 0 of 1, the program is for rank 1 of 2"):
        run_pipeline(two, {1: stages[1]}, hidden(TOKENS), DeferredWeightGradients)
    with pytest.raises(ValueError, match=r"float32 \[9, 6\] leaves the stage, not torch.float32 \[8, 6\] as announced"):
        run_pipeline(program, stages, hidden([8, *TOKENS[1:]]), DeferredWeightGradients)
