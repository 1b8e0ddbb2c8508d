"""The ops of a mixture of experts against float64 references in plain PyTorch, and whom a router chooses."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from equigrad.config.model import Experts
from equigrad.numerics.deferred import DeferredWeightGradients
from equigrad.numerics.native import NativeOps
from equigrad.numerics.ops import Adapter
from equigrad.numerics.row import Row
from equigrad.parallel.collectives import ALONE, Axis
from equigrad.parallel.partition import part_of
from tests.numerics.layers import Given
from tests.numerics.test_native import assert_same, tensor

ops = NativeOps()


def make(**changes: Any) -> Experts:
    return Experts.model_validate(dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=16) | changes)


KINDS = {
    "softmax": make(),
    "softmax-raw": make(norm_topk_prob=False, routed_scaling_factor=2.5),
    "sigmoid": make(scoring_func="sigmoid", routed_scaling_factor=2.5),
    "sigmoid-raw": make(scoring_func="sigmoid", norm_topk_prob=False),
    "one": make(num_experts_per_tok=1, norm_topk_prob=False),
    "all": make(num_experts_per_tok=6),
    "odd width": make(moe_intermediate_size=7),
}


def route_reference(x: Tensor, weight: Tensor, experts: Experts, bias: Tensor | None = None) -> tuple[Tensor, ...]:
    logits = x @ weight.t()
    scores = logits.softmax(1) if experts.scoring_func == "softmax" else logits.sigmoid()
    chosen = (scores if bias is None else scores + bias).topk(experts.num_experts_per_tok, 1).indices
    weights = scores.gather(1, chosen)
    if experts.norm_topk_prob:
        weights = weights / weights.sum(1, keepdim=True)
    return weights * experts.routed_scaling_factor, chosen, (scores / scores.sum(1, keepdim=True)).sum(0)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("tokens", [0, 1, 50])
@pytest.mark.parametrize("biased", [False, True])
def test_a_router_matches_float64(name: str, tokens: int, biased: bool) -> None:
    experts, row = KINDS[name], Row.of([tokens])
    bias = torch.linspace(-0.2, 0.2, 6) if biased else None
    inputs = [tensor(tokens, 24), tensor(6, 24, seed=1)]
    routes = ops.router(inputs[0], Given(inputs[1]), bias, experts, row)
    chosen = route_reference(*(t.double() for t in inputs), experts, bias)[1]
    assert torch.equal(routes.experts, chosen)
    assert torch.equal(routes.load.counts, torch.bincount(chosen.flatten(), minlength=6))

    def ours(x: Tensor, w: Tensor) -> Tensor:
        return ops.router(x, Given(w), bias, experts, row).weights

    assert_same(ours, lambda x, w: route_reference(x, w, experts, bias)[0], inputs)
    share = lambda x, w: ops.router(x, Given(w), bias, experts, row).load.probability  # noqa: E731
    assert_same(share, lambda x, w: route_reference(x, w, experts, bias)[2], inputs, rtol=5e-6)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("tokens", [0, 50])
def test_a_router_with_a_bias_matches_float64(name: str, tokens: int) -> None:
    experts, row = KINDS[name], Row.of([tokens])
    inputs = [tensor(tokens, 24), tensor(6, 24, seed=1), tensor(6, seed=2)]

    def reference(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        # One more feature, always 1, which the bias is the weight of.
        one = torch.ones(len(x), 1, dtype=x.dtype)
        return route_reference(torch.cat([x, one], 1), torch.cat([weight, bias[:, None]], 1), experts)

    chosen = reference(*(t.double() for t in inputs))[1]
    assert torch.equal(ops.router(inputs[0], Given(*inputs[1:]), None, experts, row).experts, chosen)
    weights = lambda x, *own: ops.router(x, Given(*own), None, experts, row).weights  # noqa: E731
    assert_same(weights, lambda *t: reference(*t)[0], inputs, rtol=5e-6)
    share = lambda x, *own: ops.router(x, Given(*own), None, experts, row).load.probability  # noqa: E731
    assert_same(share, lambda *t: reference(*t)[2], inputs, rtol=5e-6)


def test_normalised_softmax_scores_are_the_softmax_over_the_chosen() -> None:
    x, weight, bias = tensor(50, 24), tensor(6, 24, seed=1), tensor(6, seed=2)
    routes = ops.router(x, Given(weight, bias), None, make(), Row.of([50]))
    best = F.linear(x, weight, bias).topk(3, 1)
    assert torch.equal(routes.experts, best.indices)
    torch.testing.assert_close(routes.weights, best.values.softmax(1))


def test_of_equal_scores_the_lower_index_is_chosen() -> None:
    row = Row.of([40])
    for experts in (make(), make(num_experts=128, num_experts_per_tok=8)):
        weight = torch.zeros(experts.num_experts, 24)
        routes = ops.router(tensor(40, 24), Given(weight), None, experts, row)
        assert torch.equal(routes.experts, torch.arange(experts.num_experts_per_tok).expand(40, -1))


def test_the_bias_decides_the_choice_and_not_the_weights() -> None:
    row, x, weight = Row.of([40]), tensor(40, 24), tensor(6, 24, seed=1)
    bias = torch.tensor([9.0, 8.0, 7.0, 0.0, 0.0, 0.0])
    routes = ops.router(x, Given(weight), bias, make(norm_topk_prob=False), row)
    assert torch.equal(routes.experts, torch.arange(3).expand(40, -1))
    torch.testing.assert_close(routes.weights, (x @ weight.t()).softmax(1)[:, :3])


def weights_of(experts: Experts, hidden: int = 24) -> list[Tensor]:
    number, inner = experts.num_experts, experts.moe_intermediate_size
    shapes = [(number, hidden), (number, inner, hidden), (number, inner, hidden), (number, hidden, inner)]
    return [tensor(*shape, seed=seed) for seed, shape in enumerate(shapes, 1)]


def feed(
    x: Tensor,
    router: Tensor,
    gate: Tensor | Given,
    up: Tensor | Given,
    down: Tensor | Given,
    experts: Experts,
    numerics: NativeOps = ops,
    axis: Axis = ALONE,
) -> Tensor:
    row = Row.of([len(x)], experts=axis)
    gate, up, down = (own if isinstance(own, Given) else Given(own) for own in (gate, up, down))
    routes = numerics.router(x, Given(router), None, experts, row)
    sent, at = numerics.dispatch(x, routes, row)
    inner = numerics.gated(*numerics.expert_column_linears(sent, [gate, up], at, row), row)
    return numerics.combine(numerics.expert_row_linear(inner, down, at, row), routes, at, row)


def feed_reference(x: Tensor, router: Tensor, gate: Tensor, up: Tensor, down: Tensor, experts: Experts) -> Tensor:
    weights, chosen, _ = route_reference(x, router, experts)
    rows = []
    for token, of_token, with_weights in zip(x, chosen.tolist(), weights, strict=True):
        parts = [w * (down[e] @ (F.silu(gate[e] @ token) * (up[e] @ token)))
                 for e, w in zip(of_token, with_weights, strict=True)]  # fmt: skip
        rows.append(sum(parts))
    return torch.stack(rows) if rows else x * 1.0


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("tokens", [1, 2, 50])
def test_experts_match_float64(name: str, tokens: int) -> None:
    experts = KINDS[name]
    inputs = [tensor(tokens, 24), *weights_of(experts)]
    assert_same(lambda *t: feed(*t, experts), lambda *t: feed_reference(*t, experts), inputs, rtol=1e-5)


def biases_of(experts: Experts, hidden: int = 24) -> list[Tensor]:
    number, inner = experts.num_experts, experts.moe_intermediate_size
    return [tensor(number, width, seed=seed) for seed, width in enumerate((inner, inner, hidden), 11)]


def feed_biased(experts: Experts, x: Tensor, router: Tensor, *own: Tensor, axis: Axis = ALONE) -> Tensor:
    """``own``: weights of gate, up and down, then their biases."""
    row = Row.of([len(x)], experts=axis)
    routes = ops.router(x, Given(router), None, experts, row)
    sent, at = ops.dispatch(x, routes, row)
    gate, up, down = (Given(*pair) for pair in zip(own[:3], own[3:], strict=True))
    inner = ops.clamped_gated(*ops.expert_column_linears(sent, [gate, up], at, row), 1.702, 2.0, row)
    return ops.combine(ops.expert_row_linear(inner, down, at, row), routes, at, row)


@pytest.mark.parametrize("name", ["softmax", "one", "odd width"])
@pytest.mark.parametrize("tokens", [0, 1, 50])
def test_experts_with_biases_match_float64(name: str, tokens: int) -> None:
    experts = KINDS[name]

    def reference(x: Tensor, router: Tensor, *own: Tensor) -> Tensor:
        weights, chosen, _ = route_reference(x, router, experts)
        y = torch.zeros_like(x) + 0 * sum(t.sum() for t in own)
        for e in range(experts.num_experts):
            gate, up = (F.linear(x, own[i][e], own[3 + i][e]) for i in (0, 1))
            gate, up = gate.clamp(max=2.0), up.clamp(-2.0, 2.0)
            out = F.linear((up + 1) * gate * torch.sigmoid(1.702 * gate), own[2][e], own[5][e])
            y = y + out * (weights * (chosen == e)).sum(1, keepdim=True)
        return y

    inputs = [tensor(tokens, 24), *weights_of(experts), *biases_of(experts)]
    assert_same(lambda *t: feed_biased(experts, *t), reference, inputs, rtol=1e-5)


def test_the_bias_of_an_expert_without_tokens_has_zeros_for_a_gradient() -> None:
    experts = make(num_experts_per_tok=2)
    x, weights, biases = tensor(1, 24), weights_of(experts), biases_of(experts)
    chosen = ops.router(x, Given(weights[0]), None, experts, Row.of([1])).experts.flatten().tolist()
    feed_biased(experts, x, *weights, *biases).sum().backward()
    for bias in biases:
        assert [bool(g.any()) for g in bias.grad] == [e in chosen for e in range(6)]


def test_the_gradients_of_biases_can_come_later() -> None:
    experts, x, router_bias = make(), tensor(50, 24), [tensor(6, seed=2) for _ in range(2)]
    now, later = ([*weights_of(experts), *biases_of(experts)] for _ in range(2))

    def loss(own: list[Tensor], bias: Tensor) -> Tensor:
        routes = ops.router(x, Given(own[0], bias), None, experts, Row.of([50]))
        return feed_biased(experts, x, *own).square().sum() + routes.load.probability.square().sum()

    loss(now, router_bias[0]).backward()
    with DeferredWeightGradients() as deferred:
        loss(later, router_bias[1]).backward()
    assert all(t.grad is None for t in (*later, router_bias[1]))
    deferred.run()
    for a, b in zip([*now, router_bias[0]], [*later, router_bias[1]], strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("inner", [16, 7])
@pytest.mark.parametrize("tokens", [0, 1])
def test_experts_without_tokens_have_zeros_for_gradients(inner: int, tokens: int) -> None:
    experts = make(moe_intermediate_size=inner, num_experts_per_tok=2)
    x, weights = tensor(tokens, 24), weights_of(experts)
    chosen = ops.router(x, Given(weights[0]), None, experts, Row.of([tokens])).experts.flatten().tolist()
    feed(x, *weights, experts).sum().backward()
    assert x.grad is not None
    for weight in weights[1:]:
        assert [bool(g.any()) for g in weight.grad] == [e in chosen for e in range(6)]


def adapters_of(weights: list[Tensor], rank: int) -> list[Tensor]:
    """A and B of gate, of up and of down."""
    shapes = [(len(w), *size) for w in weights[1:] for size in ((rank, w.shape[2]), (w.shape[1], rank))]
    return [tensor(*shape, seed=seed) for seed, shape in enumerate(shapes, 21)]


def feed_adapted(experts: Experts, x: Tensor, router: Tensor, *own: Tensor) -> Tensor:
    """``own``: weights of gate, up and down, then what ``adapters_of`` says."""
    pairs = zip(own[3::2], own[4::2], strict=True)
    layers = [Given(w, None, Adapter(a, b, 0.7)) for w, (a, b) in zip(own[:3], pairs, strict=True)]
    return feed(x, router, *layers, experts)  # type: ignore[misc]


@pytest.mark.parametrize("rank", [4, 3])
@pytest.mark.parametrize("name", ["softmax", "one", "odd width"])
@pytest.mark.parametrize("tokens", [1, 50])
def test_adapters_of_experts_match_float64(name: str, rank: int, tokens: int) -> None:
    experts = KINDS[name]

    def reference(x: Tensor, router: Tensor, *own: Tensor) -> Tensor:
        pairs = zip(own[3::2], own[4::2], strict=True)
        return feed_reference(x, router, *(w + 0.7 * b @ a for w, (a, b) in zip(own[:3], pairs, strict=True)), experts)  # type: ignore[misc]

    weights = weights_of(experts)
    inputs = [tensor(tokens, 24), *weights, *adapters_of(weights, rank)]
    assert_same(lambda *t: feed_adapted(experts, *t), reference, inputs, rtol=1e-5)


@pytest.mark.parametrize("rank", [4, 3])
@pytest.mark.parametrize("tokens", [0, 1])
def test_adapters_of_experts_without_tokens_have_zeros_for_gradients(rank: int, tokens: int) -> None:
    experts = make(num_experts_per_tok=2)
    x, weights = tensor(tokens, 24), weights_of(experts)
    adapters = adapters_of(weights, rank)
    chosen = ops.router(x, Given(weights[0]), None, experts, Row.of([tokens])).experts.flatten().tolist()
    feed_adapted(experts, x, *weights, *adapters).sum().backward()
    for matrix in adapters:
        assert [bool(g.any()) for g in matrix.grad] == [e in chosen for e in range(6)]


def test_adapters_of_experts_learn_the_same_beside_frozen_weights_and_later() -> None:
    experts, x = make(), tensor(50, 24)
    now, later = ([*(weights := weights_of(experts)), *adapters_of(weights, 4)] for _ in range(2))
    feed_adapted(experts, x, *now).square().sum().backward()
    expected, x.grad = x.grad, None
    for weight in later[:4]:
        weight.requires_grad_(False)
    with DeferredWeightGradients() as deferred:
        feed_adapted(experts, x, *later).square().sum().backward()
    assert len(deferred) == 6
    assert all(t.grad is None for t in later)
    deferred.run()
    assert torch.equal(x.grad, expected)
    assert all(t.grad is None for t in later[:4])
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(now[4:], later[4:], strict=True))


def test_a_token_has_the_same_result_among_others() -> None:
    """The k results are added in the order of the token's choices, not in that of experts or arrival."""
    experts = make(num_experts_per_tok=4)
    x, weights = tensor(64, 24), weights_of(experts)
    whole = feed(x, *weights, experts)
    for part in (x[:32], x[32:].flip(0)):
        torch.testing.assert_close(
            feed(part, *weights, experts)[0], whole[(x == part[0]).all(1)][0], rtol=1e-6, atol=1e-6
        )


def _divided(lengths: tuple[int, ...], number: int, chosen: int) -> tuple[Any, Any]:
    """The values and gradients of this rank's tokens and experts; and of its part of everything, computed alone."""
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), len(lengths)
    experts = make(num_experts=number, num_experts_per_tok=chosen)
    whole, dy = tensor(sum(lengths), 24), tensor(sum(lengths), 24, seed=5).detach()
    weights = weights_of(experts)
    y = feed(whole, *weights, experts)
    grads = torch.autograd.grad((y * dy).sum(), [whole, *weights])
    first = sum(lengths[:rank])
    tokens, own = slice(first, first + lengths[rank]), slice(*part_of(number, ranks, rank))
    alone = [y[tokens], grads[0][tokens], *(g[own] for g in grads[2:])]

    x = whole[tokens].detach().requires_grad_()
    router, *matrices = (w.detach().clone() for w in weights)
    matrices = [m[own].requires_grad_() for m in matrices]
    z = feed(x, router, *matrices, experts, axis=Axis(dist.group.WORLD, rank, ranks))  # type: ignore[misc]
    (z * dy[tokens]).sum().backward()
    divided = [z, x.grad, *(m.grad for m in matrices)]
    return [t.detach() for t in divided], [t.detach() for t in alone]  # type: ignore[union-attr]


@pytest.mark.parametrize(("number", "chosen"), [(6, 3), (4, 1), (5, 5)])
@pytest.mark.parametrize("lengths", [(5, 0, 1, 9), (0, 0, 0, 1), (0, 0, 0, 0), (30, 31, 29, 3)], ids=str)
def test_experts_divided_over_ranks_give_what_one_rank_gives(
    workers: Any, lengths: tuple[int, ...], number: int, chosen: int
) -> None:
    for divided, alone in workers(4).run(_divided, lengths, number, chosen):
        for found, wanted in zip(divided, alone, strict=True):
            scale = wanted.abs().max().item() if wanted.numel() else 0.0
            torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6 * max(1.0, scale))


def test_deferred_weight_gradients_equal_immediate_ones() -> None:
    experts, x = make(), tensor(50, 24)
    now, later = weights_of(experts), weights_of(experts)
    gates = [tensor(1, 24, seed=9) for _ in range(2)]

    def loss(weights: list[Tensor], gate: Tensor) -> Tensor:
        return ops.token_gate(x, Given(gate), feed(x, *weights, experts), Row.of([50])).square().sum()

    loss(now, gates[0]).backward()
    with DeferredWeightGradients() as deferred:
        loss(later, gates[1]).backward()
    later.append(gates[1])
    assert all(w.grad is None for w in later)
    assert len(deferred) == 5
    deferred.run()
    for a, b in zip([*now, gates[0]], later, strict=True):
        assert torch.equal(a.grad, b.grad)


def test_a_token_gate_matches_float64() -> None:
    row = Row.of([9])
    assert_same(
        lambda x, w, y: ops.token_gate(x, Given(w), y, row),
        lambda x, w, y: y * (x @ w.t()).sigmoid(),
        [tensor(9, 24), tensor(1, 24), tensor(9, 24, seed=1)],
    )


def test_bfloat16_experts_are_near_and_keep_float32_gradients() -> None:
    experts = make()
    x, weights = tensor(50, 24), weights_of(experts)
    low = feed(x, *weights, experts, NativeOps(torch.bfloat16))
    full = feed(x, *weights, experts)
    assert low.dtype == torch.bfloat16
    assert (low - full).norm() < 0.02 * full.norm()
    low.float().sum().backward()
    assert {w.grad.dtype for w in [x, *weights]} == {torch.float32}


@pytest.mark.parametrize("gated", [True, False])
def test_shared_experts_match_transformers(gated: bool) -> None:
    """The block of Qwen2-MoE; without its gate, the routed and the shared part are simply added."""
    from transformers import Qwen2MoeConfig
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

    from equigrad.config.model import Model
    from equigrad.models.decoder import Decoder
    from tests.models.test_decoder import TINY, in_their_names

    shape = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=40,
                 norm_topk_prob=False)  # fmt: skip
    config = Model.model_validate(TINY | {"num_hidden_layers": 1, "experts": shape | {"shared_expert_gate": gated}})
    model = Decoder(config, ops, "cpu")
    model.initialize(3)
    theirs = Qwen2MoeSparseMoeBlock(Qwen2MoeConfig(**TINY | shape))
    named = {n.removeprefix("model.layers.0"): t for n, t in model.state_dict().items() if ".mlp." in n}
    named.setdefault(".mlp.shared_expert_gate.weight", torch.zeros(1, 48))
    theirs.load_state_dict({n.removeprefix(".mlp."): t for n, t in in_their_names(named, "qwen2_moe").items()})
    x, row = tensor(30, 48), Row.of([30])
    found, _ = model.blocks[0]._feed_experts(x, row)
    wanted = theirs(x[None])[0]
    if not gated:  # a gate of zeros halves
        wanted = wanted + theirs.shared_expert(x) / 2
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
