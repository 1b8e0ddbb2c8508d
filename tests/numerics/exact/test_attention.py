"""Exact attention: near to float64, blind to what a query does not see, and the same tile by tile."""

import math

import pytest
import torch
from torch import Tensor

from equigrad.numerics.exact import attention, context
from equigrad.numerics.exact.attention import Attention
from equigrad.numerics.exact.channels import Grids, Want
from equigrad.numerics.exact.context import query_blocks
from equigrad.numerics.exact.layers import LayerGrids
from equigrad.numerics.row import Row

HEADS, KV_HEADS, WIDTH = 6, 2, 16


def given(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v, with rows of very different sizes."""
    random = torch.Generator().manual_seed(seed)

    def rows(heads: int) -> Tensor:
        x = torch.randn(tokens, heads, WIDTH, generator=random)
        return x * torch.exp2(torch.randint(-3, 3, (tokens, heads, 1), generator=random).float())

    return rows(HEADS), rows(KV_HEADS), rows(KV_HEADS)


def calibrated() -> tuple[Grids, LayerGrids]:
    grids = Grids({"sinks": Want(HEADS, 40, (0, HEADS))})
    return grids, LayerGrids((HEADS,), {"sum": grids["sinks"]})


def run(
    q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], window: int | None, sinks: Tensor | None, dout: Tensor
) -> list[Tensor]:
    """Output and gradients."""
    grids, layer = calibrated()
    found: list[Tensor] = []
    for _ in range(2):  # the first calibrates
        leaves = [x.clone().requires_grad_() for x in (q, k, v, *([] if sinks is None else [sinks]))]
        out = Attention.apply(*leaves[:3], None if sinks is None else leaves[3], Row.of(lengths), window, 4096, layer)
        out.backward(dout)
        found = [out.detach(), *(x.grad for x in leaves if x.grad is not None)]
        grids.end_step(lambda _: None)
    return found


def reference(
    q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], window: int | None, sinks: Tensor | None, dout: Tensor
) -> list[Tensor]:
    """The same in float64, as it is defined."""
    leaves = [x.detach().double().clone().requires_grad_() for x in (q, k, v, *([] if sinks is None else [sinks]))]
    q, k, v = leaves[:3]
    group, outputs, start = HEADS // KV_HEADS, [], 0
    for length in lengths:
        own = slice(start, start + length)
        keys, values = (x[own].repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[own], keys) / math.sqrt(WIDTH)
        place = torch.arange(length)
        seen = place[None] <= place[:, None]
        if window is not None:
            seen &= place[None] > place[:, None] - window
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, leaves[3].view(-1, 1, 1).expand(-1, length, 1)], -1)
        p = torch.softmax(scores, -1)[..., :length]
        outputs.append(torch.einsum("hqk,khd->qhd", p, values))
        start += length
    out = torch.cat(outputs)
    out.backward(dout.double())
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("window", [None, 1, 9, 150])
@pytest.mark.parametrize("lengths", [(1,), (7, 1, 7, 7, 2), (300,), (130, 5, 260)], ids=str)
def test_it_is_near_float64(lengths: tuple[int, ...], window: int | None, sinks: bool) -> None:
    q, k, v = given(sum(lengths))
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(5))
    extra = torch.linspace(-2, 2, HEADS, dtype=torch.float64) if sinks else None
    for found, expected in zip(
        run(q, k, v, lengths, window, extra, dout), reference(q, k, v, lengths, window, extra, dout), strict=True
    ):
        # With one key to see and no sink nothing changes the scores: what is left of their gradient is rounding.
        assert (found - expected).norm() <= 2e-5 * expected.norm() + 1e-5 * dout.norm()


def test_segments_have_the_same_bits_in_any_row() -> None:
    lengths, sinks = (130, 5, 260, 5, 1), torch.linspace(-2, 2, HEADS, dtype=torch.float64)
    x = (*given(sum(lengths)), torch.randn(sum(lengths), HEADS, WIDTH, generator=torch.Generator().manual_seed(7)))
    together = [t.split(lengths) for t in run(*x[:3], lengths, 64, sinks, x[3])[:4]]
    parts = [t.split(lengths) for t in x]
    for order in ((4, 2, 0, 1, 3), (1, 3, 4, 0, 2)):
        q, k, v, dout = (torch.cat([part[n] for n in order]) for part in parts)
        found = run(q, k, v, tuple(lengths[n] for n in order), 64, sinks, dout)[:4]
        expected = [torch.cat([part[n] for n in order]) for part in together]
        assert all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(found, expected, strict=True))


def test_what_is_computed_again_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the terms of the backward pass do not fit the working memory; and whatever the blocks."""
    lengths = (200, 60)
    q, k, v = given(sum(lengths))
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(6))
    expected = run(q, k, v, lengths, None, None, dout)
    monkeypatch.setattr(attention, "WORKING_BYTES", 0)
    monkeypatch.setattr(context, "_BLOCK", 32)
    query_blocks.cache_clear()
    found = run(q, k, v, lengths, None, None, dout)
    query_blocks.cache_clear()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_query_does_not_depend_on_later_tokens() -> None:
    q, k, v = given(150)
    out = run(q, k, v, (150,), None, None, torch.ones_like(q))[0]
    k[140:], v[140:], q[140:] = 1e4, 1e-4, -3.0
    again = run(q, k, v, (150,), None, None, torch.ones_like(q))[0]
    assert torch.equal(out[:140], again[:140])
    assert not torch.equal(out[140:], again[140:])


def test_longer_segments_than_sums_are_exact_for_are_refused() -> None:
    q, k, v = given(10)
    with pytest.raises(ValueError, match="10 tokens"):
        Attention.apply(q, k, v, None, Row.of((10,)), None, 9, None)


@pytest.mark.parametrize("most", [1, 8, 4096, 131_072])
def test_partial_sums_stay_below_53_bits(most: int) -> None:
    for width, group in ((1, 1), (64, 7), (256, 16)):
        budget = attention.Budget.of(width, most, group)
        assert 2 * budget.width + math.ceil(math.log2(width)) <= 53
        assert sum(budget.keys) + math.ceil(math.log2(most)) <= 53
        assert budget.terms + math.ceil(math.log2(most + 1)) <= 53
        assert sum(budget.queries) + math.ceil(math.log2(most * group)) <= 53
        assert min(budget.width, *budget.keys, *budget.queries) >= 15
        # Rounding by two additions wants operands below 2^51 of the grid.
        assert max(budget.width, *budget.keys, budget.terms, *budget.queries) <= 51


@pytest.mark.parametrize("width", [8, 16, 32, 128])
def test_parts_of_gradients_add_up_exactly(width: int) -> None:
    """Of queries on several ranks, in float64, before anything is rounded: where a part were, it would hardly ever show
    in float32."""
    random = torch.Generator().manual_seed(3)
    q, k, v, dout = (torch.randn(64, heads, width, generator=random) for heads in (4, 2, 2, 4))
    budget = attention.Budget.of(width, 4096, 2)
    whole = query_blocks((64,), ((0, 64),), None)
    out, state = attention.attend(q, k, v, whole, None, budget)

    def work(start: int, stop: int) -> attention._Gradients:
        own, tiles = slice(start, stop), query_blocks((64,), ((start, stop),), None)
        kept = attention._State(*(x[own] for x in state))
        return attention._Gradients(dout[own], q[own], k, v, out[own], kept, tiles, budget)

    parts = [work(0, 30), work(30, 41), work(41, 64)]
    together = work(0, 64)
    sizes = torch.stack([part.largest for part in parts]).amax(0)
    assert torch.equal(sizes, together.largest)
    expected, found = together.sums(sizes), [part.sums(sizes) for part in parts]
    assert torch.equal(torch.cat([dq for dq, _, _ in found]), expected[0])
    for of_keys in (1, 2):
        assert torch.equal(found[2][of_keys] + found[0][of_keys] + found[1][of_keys], expected[of_keys])
