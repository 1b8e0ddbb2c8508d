"""No sum over ranks rounds in exact numerics. Where one did, what is rounded to a value type after it would hardly ever
show that, so it is looked at before."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from equigrad.numerics.exact.channels import Grids
from equigrad.parallel import collectives
from tests.exact_runs import exact_steps
from tests.parallel.layouts import Layout
from tests.parallel.outcomes import Pools, layout_job
from tests.parallel.test_layouts import ADAPTED, FURTHER, MODELS, ROWS, SINKS


def rounds(parts: Sequence[Tensor]) -> bool:
    """Whether an addition of these does, from the first to the last or the other way."""
    for order in (parts, parts[::-1]):
        total = order[0].clone()
        for part in order[1:]:
            added = total + part
            back = added - total  # of Knuth's two-sum
            if not torch.equal((total - (added - back)) + (part - back), torch.zeros_like(total)):
                return True
            total = added
    return False


OWN, WHOLE, SHARDED = "reduce-scatter of uneven parts", "all-reduce", "reduce-scatter of FSDP"


def sums(layout: Layout, changes: dict[str, Any], folder: Path) -> tuple[dict[str, int], list[str]]:
    """Of two steps on this rank: how many sums of float64 over ranks there were of each kind, and which of them
    rounded. Not of the pass that finds the grids of the first step, which is done again for that."""
    found, seen = list[str](), dict[str, int]()
    add_in_order, all_reduce, end_step = collectives.add_in_order, dist.all_reduce, Grids.end_step
    reduce_scatter = dist.reduce_scatter_single

    def look(parts: Sequence[Tensor], what: str) -> None:
        if parts[0].dtype == torch.float64:
            seen[what] = seen.get(what, 0) + 1
            if rounds(parts):
                found.append(f"{what} {tuple(parts[0].shape)}")

    def each(tensor: Tensor, group: Any) -> list[Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, tensor.contiguous(), group)
        return parts

    def adding(parts: Sequence[Tensor]) -> Tensor:
        look(parts, OWN)
        return add_in_order(parts)

    def reducing(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if op == dist.ReduceOp.SUM and tensor.dtype == torch.float64:
            look(each(tensor, group), WHOLE)
        return all_reduce(tensor, op, group, async_op)

    def scattering(output: Tensor, input: Tensor, op: Any, group: Any, async_op: bool = False) -> Any:
        assert op == dist.ReduceOp.SUM
        look(each(input, group), SHARDED)
        return reduce_scatter(output, input, op, group, async_op)

    def ending(grids: Grids, over_ranks: Any) -> bool:
        done = end_step(grids, over_ranks)
        if not done:
            found.clear()
        return done

    patches = (
        (collectives, "add_in_order", adding),
        (dist, "all_reduce", reducing),
        (dist, "reduce_scatter_single", scattering),
        (Grids, "end_step", ending),
    )
    with ExitStack() as stack:
        for owner, name, function in patches:
            stack.enter_context(patch.object(owner, name, function))
        redone = exact_steps(layout, changes, folder, ROWS, 2)["redone"]
    assert redone
    return seen, found


@pytest.mark.parametrize(
    ("changes", "layout", "kinds"),
    [
        (MODELS["dense"], {"tp": 2}, (OWN, WHOLE)),
        (MODELS["experts"], {"tp": 2, "dp_shard": 2, "ep": 2}, (OWN, WHOLE, SHARDED)),
        (MODELS["experts"], {"cp": 2, "dp_replicate": 2}, (OWN, WHOLE, SHARDED)),
        (SINKS, {"cp": 2, "cp_strategy": "ulysses", "tp": 2}, (OWN, WHOLE, SHARDED)),
        (ADAPTED, {"tp": 2}, (OWN, WHOLE)),
        (FURTHER, {"tp": 2, "cp": 2}, (OWN, WHOLE, SHARDED)),
    ],
    ids=str,
)
def test_no_sum_over_ranks_rounds(
    workers: Pools, tmp_path: Path, changes: dict[str, Any], layout: Layout, kinds: tuple[str, ...]
) -> None:
    pool = workers(layout_job(layout, **changes).layout.world_size)
    for seen, rounded in pool.run(sums, layout, changes, tmp_path):
        assert {*seen} == {*kinds}
        assert not rounded


def test_a_sum_that_rounds_is_seen() -> None:
    assert rounds([torch.tensor([1.0], dtype=torch.float64), torch.tensor([2.0**-60], dtype=torch.float64)])
    assert not rounds([torch.tensor([1.0], dtype=torch.float64), torch.tensor([2.0**-50], dtype=torch.float64)])
