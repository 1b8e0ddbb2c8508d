"""The native ops against float64 references written with plain PyTorch, values and gradients."""

import math
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from equigrad.numerics import attention
from equigrad.numerics.attention import packed_attention
from equigrad.numerics.cache import DecodingCache
from equigrad.numerics.deferred import DeferredWeightGradients
from equigrad.numerics.native import NativeOps
from equigrad.numerics.ops import Adapter, AttentionLayer
from equigrad.numerics.row import Row
from equigrad.numerics.tiles import segment_tiles
from tests.numerics.layers import Given

LENGTHS = [(5,), (1, 7, 7, 7, 2), (130, 1, 64), ()]


def tensor(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).requires_grad_()


def assert_same(
    op: Callable[..., Tensor], reference: Callable[..., Tensor], inputs: list[Tensor], rtol: float = 2e-6
) -> None:
    """Values and all input gradients agree with the float64 reference, relative to the largest entry."""
    exact = [t.detach().double().requires_grad_() if t.is_floating_point() else t for t in inputs]
    ours, theirs = op(*inputs), reference(*exact)
    assert ours.shape == theirs.shape
    assert ours.dtype == torch.float32
    weights = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    floating = [i for i, t in enumerate(inputs) if t.is_floating_point()]
    mine = torch.autograd.grad((ours * weights.float()).sum(), [inputs[i] for i in floating])
    right = torch.autograd.grad((theirs * weights).sum(), [exact[i] for i in floating])
    for a, b in [(ours, theirs), *zip(mine, right, strict=True)]:
        scale = max(1.0, b.detach().abs().max().item()) if b.numel() else 1.0
        torch.testing.assert_close(a.double(), b, rtol=0, atol=rtol * scale)


ops = NativeOps()


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("bias", [True, False])
def test_linears_match_float64(lengths: tuple[int, ...], bias: bool) -> None:
    row = Row.of(lengths)
    inputs = [tensor(row.tokens, 24), tensor(10, 24), tensor(7, 24, seed=3)]
    inputs += [tensor(10), tensor(7)] if bias else []

    def ours(x: Tensor, a: Tensor, b: Tensor, *biases: Tensor) -> Tensor:
        p, q = biases or (None, None)
        return torch.cat(ops.column_linears(x, [Given(a, p), Given(b, q)], row), 1)

    def reference(x: Tensor, a: Tensor, b: Tensor, *biases: Tensor) -> Tensor:
        p, q = biases or (None, None)
        return torch.cat([F.linear(x, a, p), F.linear(x, b, q)], 1)

    assert_same(ours, reference, inputs)


@pytest.mark.parametrize("shape", [(9, 16), (5, 4, 16), (0, 16)])
def test_norm_matches_float64(shape: tuple[int, ...]) -> None:
    def reference(x: Tensor, w: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * w

    row = Row.of([shape[0]])
    assert_same(lambda x, w: ops.norm(x, Given(w), 1e-5, row), reference, [tensor(*shape), tensor(16)])


def test_gated_matches_float64() -> None:
    row = Row.of([6])
    assert_same(lambda g, u: ops.gated(g, u, row), lambda g, u: F.silu(g) * u, [tensor(6, 8), tensor(6, 8, seed=1)])


@pytest.mark.parametrize("limit", [7.0, 0.5])
@pytest.mark.parametrize("tokens", [6, 0])
def test_clamped_gated_matches_float64(tokens: int, limit: float) -> None:
    def reference(gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)

    inputs = [tensor(tokens, 8), tensor(tokens, 8, seed=1)]
    row = Row.of([tokens])
    assert_same(lambda g, u: ops.clamped_gated(g, u, 1.702, limit, row), reference, inputs)


def test_clamped_gated_in_bfloat16_is_rounded_once() -> None:
    exact = [3 * tensor(50, 8).detach(), 3 * tensor(50, 8, seed=1).detach()]
    low = [t.bfloat16().requires_grad_() for t in exact]
    full = [t.detach().float().requires_grad_() for t in low]
    results = []
    for inputs in (low, full):
        y = ops.clamped_gated(*inputs, 1.702, 2.0, Row.of([50]))
        results.append([y.detach(), *torch.autograd.grad(y.float().sum(), inputs)])
    for a, b in zip(*results, strict=True):
        assert a.dtype == torch.bfloat16
        assert torch.equal(a, b.bfloat16())


def test_fork_adds_both_gradients() -> None:
    row = Row.of([6])

    def ours(x: Tensor) -> Tensor:
        a, b = ops.fork(x, row)
        return ops.add(a * 3, b * b, row)

    assert_same(ours, lambda x: x * 3 + x * x, [tensor(6, 8)])


def test_embedding_matches_float64_with_repeated_ids() -> None:
    ids = torch.tensor([3, 0, 3, 3, 1])
    row = Row.of([5])
    assert_same(lambda w: ops.embedding(ids, Given(w), len(w), row), lambda w: w[ids], [tensor(4, 6)])


@pytest.mark.parametrize("lengths", LENGTHS)
def test_rotary_matches_complex_rotation(lengths: tuple[int, ...]) -> None:
    row = Row.of(lengths)
    frequencies = 1 / 100 ** (torch.arange(0, 8, 2) / 8)
    table = ops.rotary_table(frequencies, 1.0, row)

    def reference(x: Tensor) -> Tensor:
        angles = row.positions[:, None].double() * frequencies
        turned = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.cat([turned.real, turned.imag], -1)

    assert_same(lambda x: ops.rotary(x, table, row), reference, [tensor(row.tokens, 3, 8)])


def attention_reference(lengths: tuple[int, ...], window: int | None) -> Callable[..., Tensor]:
    """Softmax over an explicit mask of the whole row, and over the sinks if there are any."""

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        segment = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
        at = torch.arange(len(segment))
        mask = (segment[:, None] == segment) & (at[:, None] >= at)
        if window is not None:
            mask &= at[:, None] - at < window
        repeat = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(repeat, 1).transpose(0, 1) for t in (k, v))
        scores = q.transpose(0, 1) @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~mask, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(segment), 1)], 2)
        weights = scores.softmax(-1) if len(segment) else scores
        return (weights[:, :, : len(segment)] @ v).transpose(0, 1)

    return run


def attention_inputs(tokens: int, heads: int, kv_heads: int, sinks: bool) -> list[Tensor]:
    inputs = [tensor(tokens, heads, 8), tensor(tokens, kv_heads, 8, seed=1), tensor(tokens, kv_heads, 8, seed=2)]
    return [*inputs, tensor(heads, seed=3)] if sinks else inputs


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("window", [None, 1, 5, 70])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("sinks", [False, True])
def test_attention_matches_float64(lengths: tuple[int, ...], window: int | None, kv_heads: int, sinks: bool) -> None:
    inputs = attention_inputs(sum(lengths), 4, kv_heads, sinks)
    reference = attention_reference(lengths, window)
    # Gradients through softmax are differences of products that may be far larger than what is left of them.
    assert_same(lambda q, k, v, *s: packed_attention(q, k, v, lengths, window, *s), reference, inputs, 5e-6)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("window", [None, 1, 5, 70])
def test_attention_of_devices_without_a_kernel_matches_float64(
    lengths: tuple[int, ...], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, tiles = attention_reference(lengths, window), segment_tiles(lengths, window)
    inputs = attention_inputs(sum(lengths), 4, 2, True)
    assert_same(lambda q, k, v: attention.per_tile(q, k, v, tiles), reference, inputs[:3])
    monkeypatch.setattr(attention, "tile_forward", attention.portable_forward)
    monkeypatch.setattr(attention, "tile_backward", attention.portable_backward)
    monkeypatch.setattr(attention, "_SCORES", 4 * 64 * 20)  # so that queries come in several blocks
    assert_same(lambda q, k, v, s: packed_attention(q, k, v, lengths, window, s), reference, inputs)


def test_a_sink_on_part_of_the_heads_has_no_gradient_on_the_others() -> None:
    q, k, v, _ = attention_inputs(9, 2, 2, True)
    sinks = tensor(4)
    packed_attention(q, k, v, (9,), None, sinks, first_head=1).sum().backward()
    assert (sinks.grad != 0).tolist() == [False, True, True, False]


def test_sinks_can_have_their_gradient_later() -> None:
    grads = []
    for later in (False, True):
        q, k, v, sinks = attention_inputs(9, 2, 2, True)
        with DeferredWeightGradients() if later else nullcontext() as deferred:
            packed_attention(q, k, v, (9,), None, sinks).sum().backward()
        if later:
            assert sinks.grad is None
            deferred.run()
        grads.append(sinks.grad)
    assert torch.equal(*grads)


def test_bfloat16_attention_with_sinks_is_near_float64() -> None:
    exact = [t.detach() for t in attention_inputs(60, 4, 2, True)]
    low = [t.bfloat16() if t.ndim > 1 else t.clone() for t in exact]
    out = packed_attention(*(t.requires_grad_() for t in low[:3]), (20, 40), 30, low[3].requires_grad_())
    out.float().square().sum().backward()
    right = [t.detach().double().requires_grad_() for t in low]
    expected = attention_reference((20, 40), 30)(*right)
    expected.square().sum().backward()
    for a, b in [(out, expected), *((x.grad, y.grad) for x, y in zip(low, right, strict=True))]:
        assert (a.double() - b).norm() < 0.02 * b.norm()


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("sinks", [False, True])
def test_decoding_with_a_cache_attends_as_the_whole_row(window: int | None, kv_heads: int, sinks: bool) -> None:
    lengths, new, layer = (5, 1, 8), 3, AttentionLayer(0, window)
    whole = tuple(n + new for n in lengths)
    with torch.no_grad():
        q, k, v, *s = attention_inputs(sum(whole), 4, kv_heads, sinks)
        ends = torch.tensor(whole).cumsum(0)
        expected = packed_attention(q, k, v, whole, window, *s)
        cache = DecodingCache(3, 11, kv_heads, 8, torch.float32, torch.device("cpu"))
        rows = [cache.prefill(list(lengths)), *(cache.step for _ in range(new))]
        at = torch.cat([torch.arange(end - n, end - new) for end, n in zip(ends.tolist(), whole, strict=True)])
        for left, row in zip(range(new, -1, -1), rows, strict=True):
            row = row() if callable(row) else row
            at = at if left == new else ends - left - 1
            out = ops.attention(q[at], k[at], v[at], layer, row, *s)
            torch.testing.assert_close(out, expected[at], rtol=0, atol=2e-6)


@pytest.mark.parametrize("budget", [0, 1 << 20])
@pytest.mark.parametrize("tokens", [0, 1, 700])
def test_cross_entropy_matches_float64_whether_logits_are_kept_or_not(budget: int, tokens: int) -> None:
    labels = torch.randint(0, 50, (tokens,), generator=torch.Generator().manual_seed(0))
    limited, row = NativeOps(saved_logits_bytes=budget), Row.of([tokens])
    assert_same(
        lambda x, w: limited.cross_entropy(x, Given(w), labels, None, 50, row),
        lambda x, w: F.cross_entropy(x @ w.t(), labels, reduction="none"),
        [tensor(tokens, 12), tensor(50, 12)],
    )


@pytest.mark.parametrize("budget", [0, 1 << 20])
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_cross_entropy_at_a_temperature_matches_float64(budget: int, temperature: float) -> None:
    labels = torch.randint(0, 50, (300,), generator=torch.Generator().manual_seed(0))
    limited, row = NativeOps(saved_logits_bytes=budget), Row.of([300])
    assert_same(
        lambda x, w, a, b: limited.cross_entropy(
            x, Given(w, adapter=Adapter(a, b, 0.5)), labels, None, 50, row, temperature
        ),
        lambda x, w, a, b: F.cross_entropy(
            (x @ w.t() + 0.5 * x @ a.t() @ b.t()) / temperature, labels, reduction="none"
        ),
        [tensor(300, 12), tensor(50, 12), tensor(3, 12), tensor(50, 3)],
        rtol=4e-6,
    )


def test_cross_entropy_is_finite_for_extreme_logits() -> None:
    x = torch.tensor([[1e4, 0.0], [-1e4, 0.0]]).requires_grad_()
    loss = ops.cross_entropy(x, Given(torch.eye(2)), torch.tensor([1, 0]), None, 2, Row.of([2]))
    loss.sum().backward()
    assert loss.tolist() == [1e4, 1e4]
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("budget", [0, 1 << 20])
def test_deferred_weight_gradients_equal_immediate_ones(budget: int) -> None:
    row, ids = Row.of([9]), torch.arange(9) % 5
    limited = NativeOps(saved_logits_bytes=budget)

    def parameters() -> list[Tensor]:
        return [tensor(5, 8), tensor(8), tensor(12, 8), tensor(12), tensor(8, 12), tensor(7, 8)]

    def loss(weights: list[Tensor]) -> Tensor:
        embedding, norm, up, bias, down, head = weights
        x = ops.norm(ops.embedding(ids, Given(embedding), len(embedding), row), Given(norm), 1e-5, row)
        (hidden,) = ops.column_linears(x, [Given(up, bias)], row)
        x = ops.row_linear(hidden, Given(down), row)
        return limited.cross_entropy(x, Given(head), ids, None, 7, row).sum()

    now, later = parameters(), parameters()
    loss(now).backward()
    with DeferredWeightGradients() as deferred:
        loss(later).backward()
    assert all(w.grad is None for w in later)
    assert len(deferred) == len(later)
    deferred.run()
    for a, b in zip(now, later, strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("at", [[4, 0, 2], [], [3]])
def test_heads_work_at_chosen_tokens(at: list[int]) -> None:
    index, row = torch.tensor(at, dtype=torch.int64), Row.of([6])
    inputs = [tensor(6, 5), tensor(9, 5)]
    assert_same(lambda x, w: ops.logits(x, Given(w), index, 9, row), lambda x, w: x[index] @ w.t(), inputs)
    assert_same(
        lambda x, w: ops.cross_entropy(x, Given(w), index, index, 9, row),
        lambda x, w: F.cross_entropy(x[index] @ w.t(), index, reduction="none"),
        inputs,
    )


@pytest.mark.parametrize("budget", [0, 1 << 20])
@pytest.mark.parametrize("scale", [0.1, 1.6])
def test_bfloat16_loss_keeps_the_gradient_of_confident_tokens(budget: int, scale: float) -> None:
    """Where p(label) is near 1, all that is left of the gradient is p - 1: it must not be lost to rounding."""
    labels = torch.arange(64) % 40
    weight = tensor(40, 32)
    x = (tensor(64, 32) * 0.1 + scale * weight[labels] / 4).detach().requires_grad_()
    low, normaliser = NativeOps(torch.bfloat16, budget), 1 / 3001
    loss = (low.cross_entropy(x, Given(weight), labels, None, 40, Row.of([64])) * normaliser).sum()
    mine = torch.autograd.grad(loss, (x, weight))
    xq, wq = x.detach().bfloat16(), weight.detach().bfloat16()
    error = (xq @ wq.t()).double().softmax(1) - F.one_hot(labels, 40)
    assert scale < 1 or -error[range(64), labels].mean() < 0.03
    exact = (error @ wq.double() * normaliser, error.t() @ xq.double() * normaliser)
    for a, b in zip(mine, exact, strict=True):
        assert (a.double() - b).norm() < 0.01 * b.norm()


def test_bfloat16_products_keep_float32_gradients() -> None:
    low, row = NativeOps(torch.bfloat16), Row.of([8])
    x, weight, labels = tensor(8, 16), tensor(10, 16), torch.arange(8)
    loss = low.cross_entropy(low.row_linear(x, Given(tensor(16, 16)), row), Given(weight), labels, None, 10, row)
    loss.sum().backward()
    assert loss.dtype == x.grad.dtype == weight.grad.dtype == torch.float32
    exact = F.cross_entropy(x.double() @ tensor(16, 16).double().t() @ weight.double().t(), labels, reduction="none")
    torch.testing.assert_close(loss.double(), exact, rtol=0.05, atol=0.05)
