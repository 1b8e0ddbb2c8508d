"""Channel grids: the same on every layout, raised where a value leaves them, finer where a channel grows quiet."""

from collections.abc import Sequence

import torch
from torch import Tensor

from equigrad.numerics.exact.channels import Grids, Want

TOKENS, BITS = 60, 20


def values(step: int, size: float = 1.0) -> Tensor:
    """[tokens, channels] of very different sizes, the last channel silent."""
    x = torch.randn(TOKENS, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return size * x * torch.tensor([1.0, 1e-6, 1e6, 3.0, 1e-3, 0.0], dtype=torch.float64)


def alone(_: Tensor) -> None:
    """One rank has the largest value already."""


def one(channels: int = 6, first: int = 0, stop: int | None = None) -> Grids:
    return Grids({"w": Want(channels, BITS, (first, channels if stop is None else stop))})


def run(parts: Sequence[tuple[Sequence[int], slice]], steps: Sequence[Tensor]) -> list[tuple[list[float], int]]:
    """The sums over tokens of each step, and how often it was done; ``parts``: tokens and channels of each rank."""
    ranks = [one(6, *own.indices(6)[:2]) for _, own in parts]
    found = []
    for x in steps:
        times, kept = 0, False
        while not kept:
            times += 1
            total = torch.zeros(6, dtype=torch.float64)
            for rank, (tokens, own) in zip(ranks, parts, strict=True):
                total[own] += rank["w"].round(x[list(tokens)][:, own]).sum(0)
            # Each is given what all have seen; then they agree by themselves.
            seen = torch.stack([rank._seen for rank in ranks]).amax(0)

            def largest(own: Tensor, seen: Tensor = seen) -> None:
                own.copy_(seen)

            answers = {rank.end_step(largest) for rank in ranks}
            assert len(answers) == 1
            kept = answers.pop()
        assert all(torch.equal(rank.size, ranks[0].size) for rank in ranks)
        found.append((total.tolist(), times))
    return found


def test_sums_do_not_depend_on_order_and_ranks() -> None:
    steps = [values(0), values(1), values(2, 100.0), values(3)]
    expected = run([(range(TOKENS), slice(None))], steps)
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(9)).tolist()
    every = slice(None)
    assert run([(order, every)], steps) == expected
    assert run([(order[:7], every), ([], every), (order[7:], every)], steps) == expected
    # Channels are divided too, unevenly, and a rank has none.
    left, right, none = slice(0, 4), slice(4, 6), slice(6, 6)
    assert run([(order, left), (order[:9], right), (order[9:], right), (order, none)], steps) == expected
    # The first step knows no grid, and the third left its own.
    assert [times for _, times in expected] == [2, 1, 2, 1]
    for (sums, _), x in zip(expected, steps, strict=True):
        error = (torch.tensor(sums, dtype=torch.float64) - x.sum(0)).abs()
        assert (error <= TOKENS * 100 * x.abs().amax(0) * 2.0 ** -(BITS - 3)).all()  # the third step was larger


def test_a_channel_that_was_silent_may_speak() -> None:
    grids, x = one(), values(0)
    grids["w"].round(x)
    assert not grids.end_step(alone)
    grids["w"].round(x)
    assert grids.end_step(alone)
    x[0, 5] = 1e-3  # of a tensor whose largest channel has a million
    grids["w"].round(x)
    assert grids.end_step(alone)


def test_a_channel_that_grows_quiet_has_a_finer_grid_in_time() -> None:
    grids = one(2)
    for step in range(34):
        grids["w"].round(torch.full((1, 2), 1.0 if step < 2 else 0.25, dtype=torch.float64))
        assert grids.end_step(alone) == (step > 0)
        if step == 1:
            before = grids.limit()
    assert (grids.limit() - before).tolist() == [-2, -2]


def test_a_value_at_its_limit_overflows_and_one_below_does_not() -> None:
    grids, one_ = one(1), torch.ones(1, 1, dtype=torch.float64)
    grids["w"].round(one_)
    grids.end_step(alone)
    limit = 2.0 ** int(grids.limit())
    grids["w"].round(one_ * (limit - 2.0**-40))
    assert grids.end_step(alone)
    grids["w"].round(one_ * 2.0 ** int(grids.limit()))
    assert not grids.end_step(alone)


def test_what_was_not_finite_is_forgotten() -> None:
    grids, x = one(1), torch.ones(1, 1, dtype=torch.float64)
    grids["w"].round(x)
    grids.end_step(alone)
    size, limit = grids.size.clone(), grids.limit()
    for wrong in (torch.nan, torch.inf, -torch.inf):
        grids["w"].round(x * wrong)
        assert grids.end_step(alone)  # it is for loss and norm to refuse the step
        assert (grids.size, grids.limit()) == (size, limit)
    grids["w"].round(x)
    assert grids.end_step(alone)


def test_two_sums_are_one_where_they_are_tied() -> None:
    """Products of an output and inputs, and terms of their own: every partial sum is exact, whatever their sizes."""
    tokens, wants = 50, {"in": Want(3, 19, (0, 3)), "out": Want(1, 26, (0, 1)), "further": Want(3, 19, (0, 3))}
    for size in (1e-6, 1.0, 1e6):
        grids = Grids(wants, tied=[("in", "out", "further")])
        random = torch.Generator().manual_seed(1)
        x, out, terms = (torch.randn(tokens, n, generator=random, dtype=torch.float64) for n in (3, 1, 3))
        sums = []
        for kept in (False, True):
            parts = [grids["in"].round(x) * grids["out"].round(out), grids["further"].round(terms * size)]
            sums = torch.cat(parts).unbind(0)
            assert grids.end_step(alone) == kept
        order = torch.randperm(2 * tokens, generator=random).tolist()
        totals = [torch.zeros(3, dtype=torch.float64) for _ in range(2)]
        for a, b in zip(range(2 * tokens), order, strict=True):
            totals[0] += sums[a]
            totals[1] += sums[b]
        assert torch.equal(*totals)
        expected = (x * out).sum(0) + (terms * size).sum(0)
        assert (totals[0] - expected).abs().max() <= 1e-3 * max(1.0, size)


def test_ranks_without_channels_take_part() -> None:
    grids = Grids({"w": Want(0, BITS, (0, 0)), "v": Want(3, BITS, (3, 3))})
    grids["w"].round(torch.zeros(4, 0, dtype=torch.float64))
    grids["v"].round(torch.zeros(4, 0, dtype=torch.float64))
    assert grids.end_step(alone)
