"""Channel grids: the same on every layout, raised where a value leaves them, finer where a channel grows quiet."""

from collections.abc import Sequence

import torch
from torch import Tensor

from equigrad.numerics.exact.channels import Channels, end_step

TOKENS, BITS = 60, 20


def values(step: int, size: float = 1.0) -> Tensor:
    """[tokens, channels] of very different sizes, the last channel silent."""
    x = torch.randn(TOKENS, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return size * x * torch.tensor([1.0, 1e-6, 1e6, 3.0, 1e-3, 0.0], dtype=torch.float64)


def alone(_: Tensor) -> None:
    """One rank has the largest value already."""


def run(parts: Sequence[Sequence[int]], steps: Sequence[Tensor]) -> list[tuple[list[float], int]]:
    """The sums over tokens of each step, and how often it was done; ``parts``: the tokens of each rank."""
    ranks = [Channels(6) for _ in parts]
    found = []
    for x in steps:
        times, kept = 0, False
        while not kept:
            times += 1
            rounded = [rank.round(x[list(own)], BITS).sum(0) for rank, own in zip(ranks, parts, strict=True)]
            total = torch.stack(rounded).sum(0)
            # Each is given what all have seen; then they agree by themselves.
            seen = torch.stack([rank.seen for rank in ranks]).amax(0)
            for rank in ranks:
                rank.seen = seen
            answers = {end_step({"w": rank}, alone, alone) for rank in ranks}
            assert len(answers) == 1
            kept = answers.pop()
        found.append((total.tolist(), times))
    return found


def test_sums_do_not_depend_on_order_and_ranks() -> None:
    steps = [values(0), values(1), values(2, 100.0), values(3)]
    expected = run([range(TOKENS)], steps)
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(9)).tolist()
    assert run([order], steps) == expected
    assert run([order[:7], [], order[7:]], steps) == expected
    # The first step knows no grid, and the third left its own.
    assert [times for _, times in expected] == [2, 1, 2, 1]
    for (sums, _), x in zip(expected, steps, strict=True):
        error = (torch.tensor(sums, dtype=torch.float64) - x.sum(0)).abs()
        assert (error <= TOKENS * 100 * x.abs().amax(0) * 2.0 ** -(BITS - 3)).all()  # the third step was larger


def test_a_channel_that_was_silent_may_speak() -> None:
    grid, x = Channels(6), values(0)
    grid.round(x, BITS)
    assert not end_step({"w": grid}, alone, alone)
    grid.round(x, BITS)
    assert end_step({"w": grid}, alone, alone)
    x[0, 5] = 1e-3  # of a tensor whose largest channel has a million
    grid.round(x, BITS)
    assert end_step({"w": grid}, alone, alone)


def test_a_channel_that_grows_quiet_has_a_finer_grid_in_time() -> None:
    grid = Channels(2)
    for step in range(34):
        grid.round(torch.full((1, 2), 1.0 if step < 2 else 0.25, dtype=torch.float64), BITS)
        assert end_step({"w": grid}, alone, alone) == (step > 0)
        if step == 1:
            before = grid.limit.clone()
    assert (grid.limit - before).tolist() == [-2, -2]


def test_an_overflow_on_one_rank_is_everybody_s() -> None:
    """Also of ranks that have other channels."""
    left = Channels(1)
    left.round(torch.ones(1, 1, dtype=torch.float64), BITS)

    def told(tops: Tensor) -> None:
        tops[-1] = 1.0

    end_step({"w": left}, alone, alone)
    left.round(torch.ones(1, 1, dtype=torch.float64), BITS)
    assert not end_step({"w": left}, alone, told)


def test_what_was_not_finite_is_forgotten() -> None:
    grid = Channels(1)
    grid.round(torch.ones(1, 1, dtype=torch.float64), BITS)
    end_step({"w": grid}, alone, alone)
    size, limit = grid.size, grid.limit
    grid.round(torch.full((1, 1), torch.nan, dtype=torch.float64), BITS)
    grid.forget()
    assert (grid.size, grid.limit) == (size, limit)
    assert not grid.seen.any()


def test_ranks_without_channels_take_part() -> None:
    grid = Channels(0)
    grid.round(torch.zeros(4, 0, dtype=torch.float64), BITS)
    assert end_step({"w": grid, "v": Channels(0)}, alone, alone)
