"""Attention and recurrent states over context ranks against those on one, on real processes: values, all gradients."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from equigrad.numerics.attention import packed_attention
from equigrad.numerics.native import NativeOps
from equigrad.numerics.ops import AttentionLayer
from equigrad.numerics.row import Row
from equigrad.parallel import ring
from equigrad.parallel.collectives import Axis
from tests.numerics.test_delta import inputs, rule
from tests.workers import Workers

LENGTHS = [(9,), (1,), (), (2, 1), (3, 10, 17), (1, 7, 7, 7, 2), (130, 1, 64)]
WINDOWS = [None, 1, 5, 70]
HEADS = [(4, 4), (4, 2), (3, 1), (5, 5), (2, 1), (6, 2), (8, 2)]
Case = tuple[tuple[int, ...], int | None, tuple[int, int]]


def _draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _row(lengths: tuple[int, ...], strategy: Any, zigzag: bool) -> Row:
    axis = Axis(dist.group.WORLD, dist.get_rank(), dist.get_world_size())
    return Row.of(lengths, context=axis, zigzag=zigzag, strategy=strategy)


def _inputs(case: Case, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    lengths, _, (heads, kv_heads) = case
    tokens = sum(lengths)
    shapes = [(tokens, heads, 8), (tokens, kv_heads, 8), (tokens, kv_heads, 8)]
    return [*(_draw(seed, *shape).to(dtype) for seed, shape in enumerate(shapes)), _draw(3, heads)]


def _close(found: Tensor, expected: Tensor, rtol: float) -> bool:
    found, expected = found.detach().float(), expected.detach().float()
    return found.shape == expected.shape and bool((found - expected).norm() <= rtol * (1 + expected.norm()))


def _wrong(strategy: Any, zigzag: bool, cases: list[Case], dtype: torch.dtype = torch.float32) -> list[Any]:
    """The cases and values that differ from those of one process, on this rank."""
    wrong, rtol = [], 1e-5 if dtype == torch.float32 else 0.02
    for case in cases:
        lengths, window, _ = case
        for with_sinks in (False, True):
            row = _row(lengths, strategy, zigzag)
            assert row.context is not None
            whole = [x.requires_grad_() for x in _inputs(case, dtype)]
            sinks = whole[3] if with_sinks else None
            expected = packed_attention(*whole[:3], lengths, window, sinks)
            dout = _draw(4, *expected.shape).to(dtype)
            expected.backward(dout)
            own = [row.context.take(x.detach()).clone().requires_grad_() for x in whole[:3]]
            own_sinks = None if sinks is None else sinks.detach().clone().requires_grad_()
            found = NativeOps().attention(*own, AttentionLayer(0, window), row, own_sinks)
            found.backward(row.context.take(dout))
            pairs = {"out": (found, row.context.take(expected))}
            for name, x, y in zip("qkv", own, whole, strict=False):
                pairs[f"d{name}"] = (x.grad, row.context.take(y.grad))
            if sinks is not None:
                dist.all_reduce(own_sinks.grad)
                pairs["dsinks"] = (own_sinks.grad, sinks.grad)
            wrong += [(case, with_sinks, name) for name, pair in pairs.items() if not _close(*pair, rtol)]
    return wrong


def _cases() -> list[Case]:
    """Every length with every window, each with some numbers of heads."""
    found, turn = [], 0
    for lengths in LENGTHS:
        for window in WINDOWS:
            found += [(lengths, window, HEADS[turn % 7]), (lengths, window, HEADS[(turn + 3) % 7])]
            turn += 1
    return found


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest, workers: Callable[[int], Workers]) -> Workers:
    return workers(request.param)


@pytest.mark.parametrize("zigzag", [False, True], ids=["contiguous", "zigzag"])
@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_context_ranks_attend_as_one(ranks: Workers, strategy: str, zigzag: bool) -> None:
    assert ranks.run(_wrong, strategy, zigzag, _cases()) == [[]] * ranks.size


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_context_ranks_attend_as_one_in_bfloat16(ranks: Workers, strategy: str) -> None:
    cases: list[Case] = [((40, 3, 60), window, (4, 2)) for window in (None, 20)]
    assert ranks.run(_wrong, strategy, True, cases, torch.bfloat16) == [[]] * ranks.size


STATES = [(2, 2, 4, 6, 4), (1, 3, 8, 4, 3), (5, 1, 4, 4, 1)]


def _wrong_states(strategy: Any, zigzag: bool) -> list[Any]:
    """What of the gated delta rule differs from that of one process, on this rank."""
    wrong = []
    for shape, lengths in product(STATES, [*LENGTHS, (1, 0, 200)]):
        row, alone = _row(lengths, strategy, zigzag), Row.of(lengths)
        assert row.context is not None
        given = inputs(sum(lengths), shape)
        expected = rule(shape, alone, *given)
        dout = _draw(4, *expected.shape)
        expected.backward(dout)
        own = [t.detach().clone() if n > 1 else row.context.take(t.detach()).clone() for n, t in enumerate(given)]
        found = rule(shape, row, *(t.requires_grad_() for t in own))
        found.backward(row.context.take(dout))
        pairs = [(found, row.context.take(expected))]
        for number, (mine, whole) in enumerate(zip(own, given, strict=True)):
            assert mine.grad is not None
            if number > 1:
                dist.all_reduce(mine.grad)
            pairs.append((mine.grad, whole.grad if number > 1 else row.context.take(whole.grad)))
        wrong += [(shape, lengths, number) for number, pair in enumerate(pairs) if not _close(*pair, 1e-6)]
    return wrong


@pytest.mark.parametrize(("strategy", "zigzag"), [("ring", True), ("ulysses", False)])
def test_context_ranks_have_the_states_of_one(ranks: Workers, strategy: str, zigzag: bool) -> None:
    """Heads that no number of ranks divides, or fewer than ranks; rows of one token, and of none."""
    assert ranks.run(_wrong_states, strategy, zigzag) == [[]] * ranks.size


def _bits(strategy: Any, zigzag: bool, delay: bool) -> list[Tensor]:
    """Values and gradients on this rank, with ranks as fast as each other or not."""
    import time

    case: Case = ((30, 5, 50), None, (4, 2))
    row = _row(case[0], strategy, zigzag)
    assert row.context is not None
    *whole, sinks = _inputs(case)
    own = [row.context.take(x).clone().requires_grad_() for x in whole]
    sinks.requires_grad_()
    if delay:
        time.sleep(0.05 * row.context.rank)
    out = NativeOps().attention(*own, AttentionLayer(0, None), row, sinks)
    if delay:
        time.sleep(0.05 * (3 - row.context.rank))
    out.backward(torch.ones_like(out))
    return [out.detach(), *(x.grad for x in own), sinks.grad]  # type: ignore[misc]


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_bits_do_not_depend_on_who_comes_first(ranks: Workers, strategy: str) -> None:
    one, other = (ranks.run(_bits, strategy, True, delay) for delay in (False, True))
    assert all(torch.equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


def _sent(lengths: tuple[int, ...], window: int | None, zigzag: bool) -> list[int]:
    """Elements that this rank sends forward and backward."""
    counts = {ring.KEYS: 0, ring.GRADIENTS: 0}
    plain = ring.Transfer.__init__

    def counted(self: Any, sent: Any, received: Any, group: Any, tag: int) -> None:
        counts[tag] += sum(x.numel() for x, _ in sent)
        plain(self, sent, received, group, tag)

    ring.Transfer.__init__ = counted  # type: ignore[method-assign]
    try:
        row = _row(lengths, "ring", zigzag)
        x = torch.zeros(row.positions.shape[0], 1, 8, requires_grad=True)
        out = NativeOps().attention(x, x, x, AttentionLayer(0, window), row)
        forward = dict(counts)
        out.backward(out)
    finally:
        ring.Transfer.__init__ = plain  # type: ignore[method-assign]
    assert counts[ring.KEYS] == 2 * forward[ring.KEYS]
    return [forward[ring.KEYS], counts[ring.GRADIENTS]]


def test_keys_travel_only_as_far_as_they_are_seen(workers: Callable[[int], Workers]) -> None:
    four, chunk = workers(4), 2 * 4 * 8  # keys and values of 4 tokens
    assert four.run(_sent, (4, 4, 4, 4), None, False) == [[0, 0]] * 4
    # The last rank's keys go nowhere. It sends the others' gradients home from where it stands, at the end of the line.
    expected = [[chunk, chunk], [2 * chunk, 2 * chunk], [3 * chunk, 3 * chunk], [0, 3 * chunk]]
    assert four.run(_sent, (16,), None, False) == expected
    # A window that reaches one rank back.
    assert four.run(_sent, (16,), 4, False) == [[chunk, chunk], [chunk, 2 * chunk], [chunk, 2 * chunk], [0, chunk]]
    assert four.run(_sent, (16,), None, True) == [[3 * chunk, 4 * chunk]] * 4
