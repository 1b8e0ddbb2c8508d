"""Uneven exchanges against the whole tensor, on real processes: values and gradients."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from equigrad.parallel.collectives import (
    Heads,
    Split,
    all_to_all,
    gather,
    heads_to_tokens,
    reduce_scatter,
    tokens_to_heads,
)
from equigrad.parallel.partition import Partition
from tests.workers import Workers

PARTITIONS = [make(total, 4) for make in (Partition.contiguous, Partition.zigzag) for total in (0, 1, 3, 8, 9, 17)]


@pytest.fixture(scope="module")
def four(workers: Any) -> Workers:
    return workers(4)  # type: ignore[no-any-return]


def _draw(seed: int, *shape: int) -> torch.Tensor:
    # Multiples of 1/8, so that sums are exact in every order.
    return torch.randint(-40, 41, shape, generator=torch.Generator().manual_seed(seed)) / 8


def _split(partition: Partition) -> Split:
    return Split(partition, dist.group.WORLD, dist.get_rank())


def _gathered(partition: Partition) -> bool:
    split = _split(partition)
    whole = _draw(0, partition.total, 3)
    x = split.take(whole).clone().requires_grad_()
    y = gather(x, split)
    dys = [_draw(10 + rank, partition.total, 3) for rank in range(4)]
    y.backward(dys[split.rank])
    return torch.equal(y, whole) and torch.equal(x.grad, split.take(sum(dys)))


def _scattered(partition: Partition) -> bool:
    split = _split(partition)
    wholes = [_draw(rank, partition.total, 3) for rank in range(4)]
    x = wholes[split.rank].clone().requires_grad_()
    y = reduce_scatter(x, split)
    dy = _draw(10, partition.total, 3)
    y.backward(split.take(dy))
    return torch.equal(y, split.take(sum(wholes))) and torch.equal(x.grad, dy) and torch.equal(x, wholes[split.rank])


def _heads(partition: Partition, heads: Heads, count: int) -> bool:
    split = _split(partition)
    own = list(heads[split.rank])
    whole = _draw(0, partition.total, count, 2)
    x = split.take(whole).clone().requires_grad_()
    y = tokens_to_heads(x, split, heads)
    dys = [_draw(10 + rank, partition.total, len(heads[rank]), 2) for rank in range(4)]
    y.backward(dys[split.rank])
    dx = torch.zeros_like(whole)
    for rank, wanted in enumerate(heads):
        dx[:, list(wanted)] += dys[rank]
    good = torch.equal(y, whole[:, own]) and torch.equal(x.grad, split.take(dx))
    if sorted(h for wanted in heads for h in wanted) != list(range(count)):
        return good
    z = whole[:, own].clone().requires_grad_()
    back = heads_to_tokens(z, split, heads)
    back.backward(split.take(_draw(20, partition.total, count, 2)))
    return (
        good
        and torch.equal(back, split.take(whole))
        and torch.equal(z.grad, _draw(20, partition.total, count, 2)[:, own])
    )


def _sent(counts: list[list[int]]) -> bool:
    """``counts[a][b]``: tokens from rank a to rank b; a token is its sender, its receiver and its number."""
    rank = dist.get_rank()

    def token(sender: int, receiver: int) -> torch.Tensor:
        return torch.tensor([[sender, receiver, n] for n in range(counts[sender][receiver])]).view(-1, 3).double()

    x = torch.cat([token(rank, other) for other in range(4)]).requires_grad_()
    received = [counts[other][rank] for other in range(4)]
    y = all_to_all(x, counts[rank], received, dist.group.WORLD)
    y.backward(y.detach() * 2)
    wanted = torch.cat([token(other, rank) for other in range(4)])
    return torch.equal(y, wanted) and torch.equal(x.grad, 2 * x)


@pytest.mark.parametrize(
    "counts",
    [
        [[1, 2, 3, 4], [0, 0, 0, 0], [5, 0, 0, 1], [2, 2, 2, 2]],
        [[0, 0, 0, 0], [0, 0, 0, 0], [0, 9, 0, 0], [0, 0, 0, 0]],
        [[0] * 4] * 4,
    ],
)
def test_tokens_reach_the_rank_they_are_for_and_gradients_return(four: Workers, counts: list[list[int]]) -> None:
    assert all(four.run(_sent, counts))


@pytest.mark.parametrize("partition", PARTITIONS, ids=lambda p: str(p.ranges))
def test_gather_and_reduce_scatter(four: Workers, partition: Partition) -> None:
    assert all(four.run(_gathered, partition))
    assert all(four.run(_scattered, partition))


@pytest.mark.parametrize(
    ("heads", "count"),
    [
        (((0,), (1,), (2,), (3,)), 4),
        (((0, 1), (2,), (3,), (4,)), 5),
        (((0,), (1,), (), ()), 2),
        (((3, 1), (0,), (2,), ()), 4),
        (((0,), (0,), (0, 1), (1,)), 2),  # key heads that several query heads share
    ],
)
@pytest.mark.parametrize("partition", PARTITIONS, ids=lambda p: str(p.ranges))
def test_tokens_for_heads_and_back(four: Workers, partition: Partition, heads: Heads, count: int) -> None:
    assert all(four.run(_heads, partition, heads, count))
