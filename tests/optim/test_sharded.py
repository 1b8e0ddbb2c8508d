"""Optimizers on shards, with real processes: what they compute is what one process computes, what they send is what
placements say, and a step of signs sends nothing."""

import math
import os
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from equigrad.audit.cases import unequal_copies
from equigrad.build import build_parts
from equigrad.checkpoint.boxes import Box
from equigrad.checkpoint.digest import tree_of_files
from equigrad.config.optim import Optim
from equigrad.models.specs import Spec, parameter_specs
from equigrad.optim.arithmetic import Native
from equigrad.optim.exchange import Exchange
from equigrad.optim.optimizer import Optimizer
from equigrad.parallel.collectives import Axis
from equigrad.parallel.placement import Placed, Placement
from equigrad.parallel.world import World
from tests.exact_runs import EXACT, differences, exact_steps
from tests.jobs import assemble, pool_world, train
from tests.parallel.layouts import Layout
from tests.parallel.outcomes import SPARSE, Outcome, Pools, Rows, layout_job, same, three_steps
from tests.parallel.test_layouts import ONE_HEAD, RECURRENT

FULL = os.environ.get("EQUIGRAD_TEST_LAYOUTS") == "all"
RULES = ("lion", "muon", "normuon", "lionmuon", "signmuon", "meqmuon")
STEPS = 3
"""Of which LionMuon and SignMuon take the second by signs."""
UNTIED = SPARSE | {"model__tie_word_embeddings": False}
# Rows for which there are more ranks: the gate of the shared expert has one, the router one for each of five experts.
# With each layout the rules that are compared bit by bit, where not all of them are.
LAYOUTS: list[tuple[Layout, Sequence[str]]] = [
    ({"dp_shard": 2}, ("muon", "lionmuon", "meqmuon")),
    ({"dp_shard": 3}, ("normuon", "meqmuon")),
    ({"dp_shard": 4}, ("muon", "signmuon")),
    ({"tp": 2}, ("normuon", "meqmuon")),
    ({"dp_shard": 2, "tp": 2}, ("lion", "normuon", "meqmuon")),
    ({"dp_shard": 2, "ep": 2}, ("normuon", "lionmuon")),
    ({"dp_replicate": 2}, ("lion", "muon")),
    ({"dp_replicate": 2, "dp_shard": 2}, ("normuon",)),
    ({"pp": 2}, ("signmuon", "meqmuon")),
    ({"dp_shard": 4, "ep": 2}, ("normuon",)),
    ({"dp_replicate": 2, "tp": 2}, ("lionmuon",)),
    ({"cp": 2}, ("muon",)),
    ({"dp_shard": 2, "pp": 2}, ("meqmuon",)),
]
ADAPTED: dict[str, Any] = {"lora": {"rank": 4, "alpha": 8.0, "targets": [r"model\.layers\.0\.self_attn\.q_proj"]}}
ALL_ADAPTED = SPARSE | {"lora": {"rank": 4, "alpha": 8.0, "targets": ["all-linear", r".*\.experts\..*"]}}
ODD: dict[str, tuple[Layout, dict[str, Any], Sequence[str]]] = {
    "two matrices on four ranks": ({"dp_shard": 4}, ADAPTED, ("muon",)),
    "a stage with nothing to train": ({"dp_shard": 2, "pp": 2}, ADAPTED, ("muon", "meqmuon")),
    "adapters of experts": ({"dp_shard": 2, "ep": 2}, ALL_ADAPTED, ("normuon",)),
    # Of a layer's matrices, vectors and kernels, for the other tensor rank has its only head.
    "a rank with nothing": ({"dp_shard": 2, "tp": 2}, RECURRENT | ONE_HEAD, ("meqmuon",)),
}
ROWS: list[Rows] = [[(9,), (1,), (7, 3)], [(9,), (5,)], [(), (17,), (1,)], [(9, 1), (3,)]]


class Traffic(TorchDispatchMode):
    """Counts collectives and messages, by whatever function they were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            self.calls[str(func)] += 1
        return func(*args, **kwargs or {})


class Watched(Native):
    """Counts the matrices that this rank makes orthogonal."""

    worked = 0

    def orthogonalize(self, x: Tensor, config: Optim) -> Tensor:
        self.worked += len(x)
        return super().orthogonalize(x, config)


class Driven(NamedTuple):
    """What a rank's optimizer did. ``counted``: elements that this rank speaks for; ``calls``, ``sent``, ``worked``: of
    each step."""

    state: dict[str, Tensor]
    unequal: dict[str, list[int]]
    counted: dict[str, int]
    calls: list[int]
    sent: list[int]
    worked: list[int]
    matrices: list[tuple[str, int, int]]
    owners: list[int]
    stage: tuple[int, ...]
    placements: dict[str, Placement]


def random_part(at: Placement, what: str) -> Placed:
    """A box of normal float64 values that depend on the name and ``what``."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{at.name} {what}".encode()))
    values = torch.randn(at.shape, generator=generator, dtype=torch.float64)
    return Placed(at, values[Box(at.offset, at.local_shape).slices].clone())


def drive(
    layout: Layout, changes: dict[str, Any], rules: Sequence[str], matrices: torch.dtype | None = None
) -> dict[str, Driven]:
    """The optimizer alone, by rule: some steps on float64 parameters where the trainer would have them, from gradients
    that everyone knows. ``matrices``: their type while they are made orthogonal."""
    job = layout_job(layout, **changes)
    world, specs = pool_world(job), parameter_specs(job.model, job.lora)
    at = {n: p.placement for part in build_parts(job, world).values() for n, p in part.placed().items()}
    return {rule: _driven(job.optim.model_copy(update={"name": rule}), at, specs, world, matrices) for rule in rules}


def _driven(
    config: Optim, at: Mapping[str, Placement], specs: Mapping[str, Spec], world: World, matrices: torch.dtype | None
) -> Driven:
    stage = world.axis("stage")
    parameters = {name: random_part(placement, "parameter") for name, placement in at.items()}
    arithmetic = Watched(stage.add, matrices)
    optimizer = Optimizer(config, parameters, specs, arithmetic, stage)
    calls, sent, worked = [], [0], [0]
    for step in range(STEPS):
        gradients = {n: random_part(at[n], f"gradient {step}") for n in at if specs[n].trained}
        with Traffic() as traffic:
            optimizer.step(gradients, 0.1 / (step + 1))
        calls.append(sum(traffic.calls.values()))
        sent.append(optimizer.sent)
        worked.append(arithmetic.worked)
    state = optimizer.state() | parameters
    work = None if optimizer._muon is None else optimizer._muon.exchange.assignment
    return Driven(
        assemble(state),
        unequal_copies(state),
        {n: p.placement.numel for n, p in state.items() if not p.placement.replica},
        calls,
        [after - before for before, after in pairwise(sent)],
        [after - before for before, after in pairwise(worked)],
        [] if work is None else [(m.name, m.member, m.cost) for m in work.matrices],
        [] if work is None else work.owners,
        (world.rank,) if stage.group is None else tuple(dist.get_process_group_ranks(stage.group)),
        {name: placement for name, placement in at.items() if specs[name].trained},
    )


@pytest.fixture(scope="module")
def alone() -> Callable[..., dict[str, Driven]]:
    """What one process has; computed once."""
    known: dict[str, dict[str, Driven]] = {}

    def run(changes: dict[str, Any]) -> dict[str, Driven]:
        key = repr(changes)
        if key not in known:
            known[key] = drive({}, changes, RULES)
        return known[key]

    return run


def check_driven(workers: Pools, alone: Any, layout: Layout, changes: dict[str, Any]) -> None:
    pool = workers(layout_job(layout, **changes).layout.world_size)
    of_ranks = pool.run(drive, layout, changes, RULES)
    for rule in RULES:
        ranks = [found[rule] for found in of_ranks]
        check_state(ranks, alone(changes)[rule])
        for stage in {found.stage for found in ranks}:
            check_work([ranks[rank] for rank in stage], rule)


def check_state(ranks: Sequence[Driven], one: Driven) -> None:
    """Parameters, buffers and moments; what is held twice has the same bits, and one rank speaks for it."""
    assert sum((Counter(many.counted) for many in ranks), Counter()) == {n: t.numel() for n, t in one.state.items()}
    for many in ranks:
        assert not many.unequal
        assert many.state.keys() == one.state.keys()
        wrong = {n: far for n, t in one.state.items() if (far := float((many.state[n] - t).norm() / t.norm())) > 1e-12}
        assert not wrong


def check_work(ranks: Sequence[Driven], rule: str) -> None:
    """Of the ranks of a stage: one owner for each matrix, about as much for each, nothing sent for signs, and for the
    rest what placements say."""
    first = ranks[0]
    shared = len(ranks) > 1 and any(len(at.shape) > 1 for at in first.placements.values())
    orthogonal = [rule != "lion" and not (rule in ("lionmuon", "signmuon") and step % 2) for step in range(STEPS)]
    expected = expected_bytes(ranks, rule == "normuon")
    for rank, found in enumerate(ranks):
        assert (found.owners, found.matrices) == (first.owners, first.matrices)
        assert found.worked == [found.owners.count(rank) * on for on in orthogonal]
        assert found.sent == [expected[rank] * on for on in orthogonal], (rule, rank)
        assert [calls > 0 for calls in found.calls] == [on and shared for on in orthogonal], (rule, rank)
    assert (sum(expected) > 0) == (shared and rule != "lion")
    costs = [cost for *_, cost in first.matrices]
    loads = [sum(cost for cost, o in zip(costs, first.owners, strict=True) if o == r) for r in range(len(ranks))]
    assert not costs or max(loads) <= sum(costs) / len(ranks) + max(costs)


def expected_bytes(ranks: Sequence[Driven], rows_too: bool) -> list[int]:
    """What each rank sends in a step: each box that the owner of its matrix lacks, by the owner's nearest neighbour
    among those that hold it, and from the owner to all others that hold something."""
    sent = [0] * len(ranks)
    for (name, member, _), owner in zip(ranks[0].matrices, ranks[0].owners, strict=True):
        boxes = {}
        for rank, found in enumerate(ranks):
            at = found.placements[name]
            inside = len(at.shape) == 2 or at.offset[0] <= member < at.offset[0] + at.local_shape[0]
            if at.numel and inside:
                boxes[rank] = Box(at.offset[-2:], at.local_shape[-2:])
        assert sum(box.numel for box in set(boxes.values())) == math.prod(ranks[0].placements[name].shape[-2:])
        for box in set(boxes.values()):
            size = 8 * (box.numel + box.shape[0] * rows_too)
            holders = [rank for rank in boxes if boxes[rank] == box]
            sent[min(holders, key=lambda rank: (abs(rank - owner), rank))] += size * (owner not in holders)
            sent[owner] += size * len([rank for rank in holders if rank != owner])
    return sent


@pytest.mark.parametrize("layout", [layout for layout, _ in LAYOUTS], ids=str)
def test_shards_give_what_one_process_has(workers: Pools, alone: Any, layout: Layout) -> None:
    check_driven(workers, alone, layout, UNTIED)


def held_by_the_first(size: int) -> tuple[list[int], list[int], bool]:
    """An exchange of eight matrices of two sizes that rank 0 alone has: their costs, owners, and whether what came back
    is what was made of them."""
    rank, axis = dist.get_rank(), Axis(dist.group.WORLD, dist.get_rank(), size)
    shapes = {f"{n}": (6, 4 + n % 2) for n in range(8)}
    locals_ = {name: shape if rank == 0 else (0, shape[1]) for name, shape in shapes.items()}
    exchange = Exchange({n: Placement(n, s, (0, 0), locals_[n]) for n, s in shapes.items()}, axis)
    tensors = {name: torch.full(shape, float(name)) for name, shape in locals_.items()}
    taken: dict[str, Tensor] = {}
    exchange.run(tensors.__getitem__, lambda x, _: (x + 1, None), taken.__setitem__)
    made = taken.keys() == tensors.keys() and all(bool((x == float(name) + 1).all()) for name, x in taken.items())
    return [matrix.cost for matrix in exchange.assignment.matrices], exchange.assignment.owners, made


def test_work_is_shared_though_one_rank_has_it_all(workers: Pools) -> None:
    for costs, owners, made in workers(4).run(held_by_the_first, 4):
        assert made
        assert sorted(owners) == [0, 0, 1, 1, 2, 2, 3, 3]
        loads = [sum(c for c, o in zip(costs, owners, strict=True) if o == rank) for rank in range(4)]
        assert max(loads) <= sum(costs) / 4 + max(costs)


def test_in_bfloat16_a_quarter_of_the_bytes_of_float64_travels(workers: Pools) -> None:
    """And what is made of matrices is as close as that type goes."""
    rules = ("muon", "normuon", "meqmuon")
    alone = drive({}, UNTIED, rules, torch.bfloat16)
    of_ranks = workers(2).run(drive, {"dp_shard": 2}, UNTIED, rules, torch.bfloat16)
    for rule in rules:
        ranks = [found[rule] for found in of_ranks]
        rows = [w - n for w, n in zip(expected_bytes(ranks, True), expected_bytes(ranks, False), strict=True)]
        for rank, (found, wide) in enumerate(zip(ranks, expected_bytes(ranks, False), strict=True)):
            assert found.sent == [wide // 4 + rows[rank] * (rule == "normuon")] * STEPS
            for name, whole in alone[rule].state.items():
                assert (found.state[name] - whole).norm() <= 1e-2 * whole.norm(), (rule, name)


@pytest.mark.parametrize("odd", ODD)
def test_so_do_odd_ones(workers: Pools, alone: Any, odd: str) -> None:
    layout, changes, _ = ODD[odd]
    check_driven(workers, alone, layout, changes)


def native_steps(layout: Layout, rules: Sequence[str], folder: Path) -> dict[str, Outcome]:
    """Three steps through the trainer in native numerics, by rule."""
    return {rule: three_steps(layout, SPARSE | {"optim__name": rule}, folder / rule, ROWS) for rule in rules}


@pytest.fixture(scope="module")
def plainly(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """What one process has in native numerics, by rule; computed once."""

    @cache
    def run(rule: str) -> Outcome:
        return native_steps({}, [rule], tmp_path_factory.mktemp("plainly"))[rule]

    return run


@pytest.mark.parametrize(("layout", "rules"), LAYOUTS, ids=str)
def test_training_on_shards_is_training_on_one_process(
    workers: Pools, plainly: Callable[[str], Outcome], tmp_path: Path, layout: Layout, rules: Sequence[str]
) -> None:
    chosen = RULES if FULL else rules[-1:]
    pool = workers(layout_job(layout, **SPARSE).layout.world_size)
    for rank, found in enumerate(pool.run(native_steps, layout, chosen, tmp_path)):
        for rule in chosen:
            same(found[rule], plainly(rule), rank)


def exact_rules(layout: Layout, changes: dict[str, Any], rules: Sequence[str], folder: Path) -> dict[str, Any]:
    """Four steps through the trainer in exact numerics, by rule."""
    world = pool_world(layout_job(layout, **changes))
    chosen = {rule: changes | {"optim__name": rule} for rule in rules}
    return {rule: exact_steps(layout, job, folder / rule, ROWS, 4, world) for rule, job in chosen.items()}


@pytest.fixture(scope="module")
def exactly(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any], str], Any]:
    """What one process has in exact numerics; computed once."""
    known: dict[str, Any] = {}

    def run(changes: dict[str, Any], rule: str) -> Any:
        key = repr((changes, rule))
        if key not in known:
            known[key] = exact_rules({}, changes, [rule], tmp_path_factory.mktemp("exactly"))[rule]
        return known[key]

    return run


def check_exact(
    workers: Pools, exactly: Any, folder: Path, layout: Layout, changes: dict[str, Any], rules: Sequence[str]
) -> None:
    chosen = RULES if FULL else rules
    pool = workers(layout_job(layout, **changes).layout.world_size)
    for found in pool.run(exact_rules, layout, changes, chosen, folder):
        for rule in chosen:
            assert not differences(found[rule], exactly(changes, rule)), rule


@pytest.mark.parametrize(("layout", "rules"), LAYOUTS, ids=str)
def test_exact_shards_have_the_bits_of_one_process(
    workers: Pools, exactly: Any, tmp_path: Path, layout: Layout, rules: Sequence[str]
) -> None:
    check_exact(workers, exactly, tmp_path, layout, SPARSE, rules)


@pytest.mark.parametrize("odd", ODD)
def test_odd_ones_have_them_too(workers: Pools, exactly: Any, tmp_path: Path, odd: str) -> None:
    check_exact(workers, exactly, tmp_path, *ODD[odd])


@pytest.mark.parametrize(
    ("rule", "before", "after"),
    [("normuon", {"dp_shard": 2, "tp": 2}, {"dp_shard": 2, "ep": 2}), ("lionmuon", {"tp": 2}, {"dp_shard": 2})],
    ids=str,
)
def test_a_run_goes_on_elsewhere_to_the_bit(
    workers: Pools, tmp_path: Path, rule: str, before: Layout, after: Layout
) -> None:
    """Three steps and two, against five on one process: state, and whose turn it is."""
    changes = EXACT | SPARSE | {"optim__name": rule, "optim__schedule_steps": 5, "batch__tokens": 100}

    def run(folder: str, layout: Layout, steps: int, resume: bool = False) -> None:
        job = layout_job(layout, **changes, train__steps=steps)
        if not layout:
            train(job, tmp_path / folder)
        else:
            workers(job.layout.world_size).run(train, job, tmp_path / folder, resume)

    run("whole", {}, 5)
    run("parts", before, 3)
    run("parts", after, 5, True)
    whole, parts = (
        tree_of_files(tmp_path / name / "checkpoints/step-00000005", "").nodes for name in ("whole", "parts")
    )
    assert whole == parts
    assert any(name.startswith("optim.row_moment.") for name in whole) == (rule == "normuon")
