"""Processes, placements and the small collectives of the loop."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from equigrad.config.layout import MOST_THREADS, Layout
from equigrad.errors import UserError
from equigrad.parallel.environment import first_host, process_env
from equigrad.parallel.placement import Placed, Placement, place
from equigrad.parallel.ranks import PeerError, SharedUserError
from equigrad.parallel.sharding import data_mesh
from equigrad.parallel.world import start
from tests.jobs import pool_world, tiny_job
from tests.workers import Workers

Pools = Callable[[int], Workers]


def test_slurm_variables_become_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert process_env() is None
    variables = {"SLURM_NTASKS": "16", "SLURM_PROCID": "11", "SLURM_LOCALID": "3", "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
                 "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_JOB_ID": "123456"}  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert process_env() == (11, 16, 3, 8)
    import os

    assert os.environ["MASTER_ADDR"] == "gpu07"
    assert 20000 <= int(os.environ["MASTER_PORT"]) < 40000
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert process_env() == (1, 2, 0, 1)  # torchrun inside a job comes first


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [("a1", "a1"), ("a1,b2", "a1"), ("n[03-05,9],gpu1", "n03"), ("n[4,7]", "n4"), ("n-1-[2-3]", "n-1-2")],
)
def test_first_host_of_a_nodelist(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


@pytest.mark.parametrize("asked", ["", " ", "many", "-3", "0", "1,2", "99999999999999"])
def test_a_number_of_threads_that_is_none_does_no_harm(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    try:
        start(Layout())
        assert 1 <= torch.get_num_threads() <= MOST_THREADS
    finally:
        torch.set_num_threads(before)


def test_a_world_that_does_not_fit_the_layout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(UserError, match=r"dp_replicate 1 x dp_shard 2 .* = 2 does not fit the 1 processes"):
        start(Layout(dp_shard=2))


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x'; it must be a whole number"),
        ({"RANK": "", "WORLD_SIZE": ""}, "RANK is ''"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0.5"}, "LOCAL_RANK is '0.5'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 of 2 processes"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "rank -1 of 2 processes"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "rank 0 of 0 processes"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "-1"}, "-1 on its machine"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "any"}, "MASTER_PORT is 'any'"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "here"}, "MASTER_PORT is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not"),
        ({"SLURM_NTASKS": "many"}, "SLURM_NTASKS is 'many'"),
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "x", "SLURM_STEP_NODELIST": "a"}, "SLURM_PROCID is 'x'"),
    ],
    ids=str,
)
def test_an_environment_that_makes_no_sense_is_named(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that what the function sets is taken back
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=re.escape(message)):
        start(Layout(dp_shard=2))


def _shards(rows: int) -> list[tuple[Placement, Any]]:
    from torch.distributed.fsdp import fully_shard

    world = pool_world(tiny_job(layout__dp_replicate=2, layout__dp_shard=2))
    model = nn.Linear(3, rows, bias=True)
    with torch.no_grad():
        model.weight.copy_(torch.arange(rows * 3.0).view(rows, 3))
        model.bias.copy_(torch.arange(rows * 1.0))
    fully_shard(model, mesh=data_mesh(world))
    return [(p.placement, p.tensor.tolist()) for p in (place(n, t) for n, t in model.named_parameters())]


@pytest.mark.parametrize("rows", [5, 1, 4])
def test_placements_tile_each_tensor_once_per_replica(workers: Pools, rows: int) -> None:
    results = workers(4).run(_shards, rows)
    for index, width in ((0, 3), (1, None)):
        seen: dict[int, list[Any]] = {0: [], 1: []}
        for rank in results:
            placement, values = rank[index]
            assert placement.shape == ((rows, width) if width else (rows,))
            if placement.numel:
                assert placement.offset[0] == len(seen[placement.replica])
            seen[placement.replica] += values
        assert len(seen[0]) == rows
        assert seen[0] == seen[1]


def test_a_placement_that_does_not_fit_its_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="does not describe"):
        Placed(Placement("w", (4, 3), (0, 0), (2, 3)), torch.zeros(4, 3))


def _collectives() -> list[Any]:
    world = pool_world(tiny_job(layout__dp_shard=4))
    problems = []
    for failing in (0, 2):

        def action(failing: int = failing) -> str:
            if world.rank == failing:
                raise UserError("the file is gone")
            return f"made by {world.rank}"

        try:
            world.run_where(True, action)
        except SharedUserError as error:
            problems.append(str(error))
    try:
        world.agree({"same": 1, "plan": [0, world.rank == 3]}, "the work")
    except RuntimeError as error:
        problems.append(str(error))
    one = world.run_where(world.is_main, lambda: "main only")
    try:
        world.run_where(True, lambda: 1 // (world.rank - 1))
    except (ZeroDivisionError, PeerError) as error:
        problems.append(type(error).__name__)
    return [world.sum([1.0, world.rank]), problems, one]


def test_collectives_tell_every_rank_the_same(workers: Pools) -> None:
    results = workers(4).run(_collectives)
    for rank, (total, problems, one) in enumerate(results):
        assert total == [4.0, 6.0]
        different = (
            "ranks disagree about the work; plan: rank 3 differs from rank 0 ([1] True on rank 3, False on rank 0)"
        )
        own = "ZeroDivisionError" if rank == 1 else "PeerError"
        assert problems == ["the file is gone", "rank 2: the file is gone", different, own]
        assert one == ("main only" if rank == 0 else None)


def test_alone_every_collective_is_the_identity(tmp_path: Path) -> None:
    world = pool_world(tiny_job())
    assert world.sum([2.5]) == [2.5]
    world.agree({"x": 1}, "anything")
    with pytest.raises(UserError, match="no"):
        world.run_where(True, lambda: (_ for _ in ()).throw(UserError("no")))
