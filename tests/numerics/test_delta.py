"""The gated delta rule and its convolution against their recurrence, token by token in float64: values, gradients, and
where segments begin."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from equigrad.numerics import delta
from equigrad.numerics.cache import DecodingCache
from equigrad.numerics.deferred import DeferredWeightGradients
from equigrad.numerics.native import NativeOps
from equigrad.numerics.ops import DeltaLayer
from equigrad.numerics.row import Row
from tests.numerics.layers import Given
from tests.numerics.test_native import assert_same, tensor

LENGTHS = [(1,), (5, 1, 64, 65, 130), (2, 63, 1, 200, 7, 7), (129,), ()]
# Key heads, value heads to each, widths of keys and values, kernel.
SHAPES = [(2, 2, 8, 6, 4), (3, 1, 4, 8, 1), (1, 3, 5, 7, 2)]
Shape = tuple[int, int, int, int, int]

ops = NativeOps()


def layer_of(shape: Shape, index: int = 0) -> DeltaLayer:
    _, values, key, value, _ = shape
    return DeltaLayer(index, key, value, values)


def inputs(tokens: int, shape: Shape, seed: int = 0) -> list[Tensor]:
    """Features, rates, three kernels, A_log, dt_bias."""
    heads, values, key, value, kernel = shape
    shapes = [(tokens, heads, 2 * key + values * value), (tokens, heads, 2 * values), (heads * key, 1, kernel),
              (heads * key, 1, kernel), (heads * values * value, 1, kernel), (heads * values,),
              (heads * values,)]  # fmt: skip
    return [tensor(*one, seed=seed + number) for number, one in enumerate(shapes)]


def rule(shape: Shape, row: Row, x: Tensor, rates: Tensor, *weights: Tensor) -> Tensor:
    return ops.gated_delta_rule(x, rates, weights[:3], weights[3], weights[4], layer_of(shape), row)


def reference(shape: Shape, lengths: tuple[int, ...], x: Tensor, rates: Tensor, *weights: Tensor) -> Tensor:
    """Equation 10 of arXiv 2412.06464, each segment alone, one token after another."""
    heads, values, key, value, kernel = shape
    *kernels, a_log, dt_bias = weights
    taps = torch.cat([k.view(heads, -1, kernel) for k in kernels], 1)
    b, a = rates.split(values, -1)
    beta, g = b.sigmoid(), -a_log.exp().view(heads, values) * F.softplus(a + dt_bias.view(heads, values))
    outs = []
    for part, strength, fade in zip(x.split(lengths), beta.split(lengths), g.exp().split(lengths), strict=True):
        padded = torch.cat([x.new_zeros(kernel - 1, *x.shape[1:]), part])
        state = x.new_zeros(heads, values, key, value)
        for t in range(len(part)):
            seen = padded[t : t + kernel]
            q, k, v = F.silu((seen * taps.permute(2, 0, 1)).sum(0)).split([key, key, values * value], -1)
            q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6) for y in (q, k))
            state = fade[t][..., None, None] * state
            missing = v.view(heads, values, value) - torch.einsum("hk,hrkv->hrv", k, state)
            state = state + torch.einsum("hk,hrv->hrkv", k, strength[t][..., None] * missing)
            outs.append(torch.einsum("hk,hrkv->hrv", q, state).flatten(0, 1) / key**0.5)
    return torch.stack(outs) if outs else x.sum() + rates.sum() + x.new_zeros(0, heads * values, value)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_rule_matches_the_recurrence_in_float64(lengths: tuple[int, ...], shape: Shape) -> None:
    row = Row.of(lengths)
    given = inputs(row.tokens, shape)
    if not lengths:
        out = rule(shape, row, *given)
        assert out.shape == (0, shape[0] * shape[1], shape[3])
        out.sum().backward()
        assert all(x.grad is not None and not x.grad.any() for x in given)
        return
    assert_same(lambda *x: rule(shape, row, *x), lambda *x: reference(shape, lengths, *x), given)


@pytest.mark.parametrize("rate", [-12.0, 3.0, 30.0])
def test_states_that_fade_at_once_or_never_have_finite_gradients(rate: float) -> None:
    given, row = inputs(150, SHAPES[0]), Row.of([150])
    with torch.no_grad():
        given[5].fill_(rate)
    rule(SHAPES[0], row, *given).sum().backward()
    assert all(x.grad.isfinite().all() for x in given)


def test_a_segment_knows_nothing_of_the_others() -> None:
    """Neither what it gives nor its gradients, whatever they are."""
    lengths, shape = (5, 1, 64, 65, 130), SHAPES[0]
    given = inputs(sum(lengths), shape)
    together = rule(shape, Row.of(lengths), *given)
    together.square().sum().backward()
    x, rates, *weights = given
    totals = [torch.zeros_like(w) for w in weights]
    parts = zip(x.split(lengths), rates.split(lengths), x.grad.split(lengths), together.split(lengths), strict=True)
    for features, rate, dx, out in parts:
        own = [t.detach().clone().requires_grad_() for t in (features, rate, *weights)]
        alone = rule(shape, Row.of([len(features)]), *own)
        alone.square().sum().backward()
        torch.testing.assert_close(out, alone, rtol=0, atol=1e-6)
        torch.testing.assert_close(dx, own[0].grad, rtol=0, atol=1e-5 * dx.abs().max())
        totals = [total + w.grad for total, w in zip(totals, own[2:], strict=True)]
    for total, weight in zip(totals, weights, strict=True):
        torch.testing.assert_close(weight.grad, total, rtol=0, atol=1e-5 * total.abs().max())


def test_the_convolution_does_not_see_the_segment_before() -> None:
    """With states that hold nothing but the present token, a change of one token reaches the next three, and stops at
    the end of its segment."""
    shape, row = SHAPES[0], Row.of([4, 6])
    given = [x.detach() for x in inputs(10, shape)]
    given[5].fill_(30.0)
    before = rule(shape, row, *given)
    for token in range(10):
        changed = given[0].clone()
        changed[token] += 1
        differs = (rule(shape, row, changed, *given[1:]) != before).flatten(1).any(1)
        reached = range(token, min(token + 4, 4 if token < 4 else 10))
        assert differs.nonzero().flatten().tolist() == list(reached)


@pytest.mark.parametrize("shape", SHAPES)
def test_decoding_with_a_cache_goes_on_as_the_whole_row(shape: Shape) -> None:
    lengths, new = (5, 1, 64, 67), 4
    whole = tuple(n + new for n in lengths)
    given = [x.detach() for x in inputs(sum(whole), shape)]
    expected = rule(shape, Row.of(whole), *given)
    ends = torch.tensor(whole).cumsum(0)
    cache = DecodingCache(len(lengths), max(whole), 1, 8, torch.float32, torch.device("cpu"))
    at = torch.cat([torch.arange(e - n, e - new) for e, n in zip(ends.tolist(), whole, strict=True)])
    row, kept = cache.prefill(list(lengths)), torch.arange(len(lengths))
    for left in range(new, -1, -1):
        at = at if left == new else ends[kept] - left - 1
        row = row if left == new else cache.step()
        out = rule(shape, row, given[0][at], given[1][at], *given[2:])
        torch.testing.assert_close(out, expected[at], rtol=0, atol=2e-6)
        if left == 2:  # one sequence ends, the others change places
            kept = torch.tensor(cache.drop([1]))
            assert kept.tolist() == [0, 3, 2]


def test_weights_can_have_their_gradients_later() -> None:
    grads: list[list[Any]] = []
    for later in (False, True):
        given = inputs(70, SHAPES[0])
        with DeferredWeightGradients() if later else nullcontext() as deferred:
            rule(SHAPES[0], Row.of([3, 67]), *given).square().sum().backward()
        if later:
            assert all(x.grad is None for x in given[2:])
            assert len(deferred) == 5
            deferred.run()
        grads.append([x.grad for x in given])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_heads_that_a_rank_lacks_have_no_gradient() -> None:
    shape, part = (3, 2, 4, 4, 4), (1, 2, 4, 4, 4)
    weights = inputs(0, shape)[2:]
    x, rates = inputs(9, part)[:2]
    delta.gated_delta_rule(x, rates, delta.Weights(*weights), layer_of(shape), (9,), (1, 2)).sum().backward()
    for weight in weights:
        assert [bool(rows.any()) for rows in weight.grad.chunk(3)] == [False, True, False]


def test_bfloat16_is_computed_in_float32_and_rounded_once() -> None:
    shape, row = SHAPES[0], Row.of([50, 70])
    low = [x.detach().bfloat16() if x.ndim == 3 and len(x) == 120 else x.detach() for x in inputs(120, shape)]
    results = []
    for given in (low, [x.float() for x in low]):
        given = [x.clone().requires_grad_() for x in given]
        out = rule(shape, row, *given)
        out.backward(torch.ones_like(out))
        results.append([out.detach(), *(x.grad for x in given)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b.to(a.dtype))


@pytest.mark.parametrize("tokens", [6, 0])
def test_gates_and_gated_norms_match_float64(tokens: int) -> None:
    row, pair = Row.of([tokens]), [tensor(tokens, 3, 8), tensor(tokens, 3, 8, seed=1)]
    assert_same(lambda x, g: ops.output_gate(x, g, row), lambda x, g: x * g.sigmoid(), pair)

    def normed(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        unit = x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5)
        return unit * weight * F.silu(gate.view(x.shape))

    flat = tensor(tokens, 1, 24, seed=2)
    assert_same(lambda x, g, w: ops.gated_norm(x, g, Given(w), 1e-5, row), normed, [pair[0], flat, tensor(8)])
    assert_same(
        lambda x, w: ops.norm(x, Given(w), 1e-5, row, True),
        lambda x, w: x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * (1 + w),
        [pair[0], tensor(8)],
    )


def test_what_is_beyond_the_table_is_not_rotated() -> None:
    row, x = Row.of([3, 4]), tensor(7, 2, 12)
    table = ops.rotary_table(torch.tensor([1.0, 0.1]), 1.0, row)

    def partly(x: Tensor) -> Tensor:
        angles = row.positions[:, None].double() * torch.tensor([1.0, 0.1])
        turned = torch.complex(x[..., :2], x[..., 2:4]) * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.cat([turned.real, turned.imag, x[..., 4:]], -1)

    assert_same(lambda x: ops.rotary(x, table, row), partly, [x])


def test_a_few_heads_at_a_time_are_all_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    shape, lengths, found = SHAPES[1], (130, 1, 64), []
    for budget in (1 << 40, 1):
        monkeypatch.setattr(delta, "WORKING_BYTES", budget)
        given = inputs(sum(lengths), shape)
        out = rule(shape, Row.of(lengths), *given)
        out.square().sum().backward()
        found.append([out.detach(), *(x.grad for x in given)])
    for few, all_ in zip(*found, strict=True):
        torch.testing.assert_close(few, all_, rtol=0, atol=1e-6 * float(all_.abs().max()))
