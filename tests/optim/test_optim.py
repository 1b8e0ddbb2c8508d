"""AdamW, learning-rate schedules and the gradient norm against PyTorch and closed forms."""

import math
import re
from itertools import pairwise
from typing import Any

import pytest
import torch

from equigrad.config.optim import Optim
from equigrad.models.specs import Spec, parameter_specs
from equigrad.optim.arithmetic import Native
from equigrad.optim.norm import clip, local_square_sum
from equigrad.optim.optimizer import Optimizer
from equigrad.optim.schedule import learning_rate
from equigrad.parallel.collectives import ALONE
from equigrad.parallel.placement import place_all
from tests.jobs import tiny_job


def test_adamw_matches_pytorch_with_decay_on_matrices_only() -> None:
    generator = torch.Generator().manual_seed(0)
    matrix, vector = (torch.randn(*s, generator=generator) for s in ((4, 3), (3,)))
    config = Optim(lr=0.1, betas=(0.8, 0.9), weight_decay=0.2, eps=1e-6)
    ours = place_all([("m", matrix.clone()), ("v", vector.clone())])
    specs = {"m": Spec((4, 3), "matrix"), "v": Spec((3,), "vector")}
    optimizer = Optimizer(config, ours, specs, Native(ALONE.add))
    theirs = [torch.nn.Parameter(matrix.clone()), torch.nn.Parameter(vector.clone())]
    groups = [{"params": theirs[:1], "weight_decay": 0.2}, {"params": theirs[1:], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=0.1, betas=(0.8, 0.9), eps=1e-6)
    for lr in (0.1, 0.05, 0.2):
        gradients = [torch.randn(t.shape, generator=generator) for t in theirs]
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient.clone()
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
        optimizer.step(place_all(zip("mv", gradients, strict=True)), lr)
    for name, parameter in zip("mv", theirs, strict=True):
        torch.testing.assert_close(ours[name].tensor, parameter.data, rtol=1e-6, atol=1e-7)
    assert set(optimizer.state()) == {"exp_avg.m", "exp_avg.v", "exp_avg_sq.m", "exp_avg_sq.v"}
    assert optimizer.updates == 3


WITH_EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "mlp_only_layers": [0],
    "shared_expert_intermediate_size": 8, "shared_expert_gate": True,
}  # fmt: skip
GATED: dict[str, Any] = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "full_attention_interval": 2}


@pytest.mark.parametrize(
    "lora", [None, {"rank": 2, "targets": ["all-linear", r".*\.experts\..*"]}], ids=["all", "lora"]
)
def test_hidden_matrices_are_the_weights_of_linear_layers_between_embedding_and_head(lora: Any) -> None:
    """As the documentation lists them: the router, the gate of the shared expert and both factors of adapters too."""
    job = tiny_job(model__experts=WITH_EXPERTS, model__linear_attention=GATED, model__tie_word_embeddings=False,
                   model__num_hidden_layers=3, model__attention_bias=True, model__mtp_layers=0 if lora else 1,
                   lora=lora)  # fmt: skip
    trained = {name: spec for name, spec in parameter_specs(job.model, job.lora).items() if spec.trained}
    linear = r"model\.layers\..*(_proj|in_proj_\w+|mlp\.gate|shared_expert_gate)(\.lora_[AB])?\.weight"
    hidden = {name for name, spec in trained.items() if spec.is_matrix}
    assert hidden == {name for name in trained if re.fullmatch(linear, name)}
    assert all(spec.is_matrix for spec in trained.values()) == (lora is not None)


@pytest.mark.parametrize("kind", ["cosine", "linear", "wsd", "constant"])
def test_learning_rate_warms_up_stays_below_the_peak_and_ends_at_the_minimum(kind: str) -> None:
    config = Optim(lr=1.0, schedule=kind, warmup_steps=10, min_lr_ratio=0.1, decay_fraction=0.3)
    rates = [learning_rate(config, step, 100) for step in range(101)]
    assert rates[:11] == pytest.approx([(i + 1) / 11 for i in range(11)])
    assert max(rates) == 1.0
    assert all(a >= b for a, b in pairwise(rates[10:]))
    assert rates[100] == pytest.approx(1.0 if kind == "constant" else 0.1)
    if kind == "cosine":
        assert rates[55] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.5)))
    if kind == "wsd":
        assert rates[70] == 1.0
        assert rates[85] == pytest.approx(0.1 + 0.9 * 0.5)


def test_schedule_steps_decouples_the_schedule_from_the_length_of_the_run() -> None:
    whole, part = Optim(lr=1.0), Optim(lr=1.0, schedule_steps=20)
    assert [learning_rate(whole, s, 20) for s in range(10)] == [learning_rate(part, s, 10) for s in range(10)]


def test_norm_and_clipping_match_pytorch() -> None:
    tensors = [torch.randn(5, 3), torch.randn(7), torch.zeros(0, 3)]
    parameters = [torch.nn.Parameter(torch.zeros_like(t)) for t in tensors]
    for parameter, tensor in zip(parameters, tensors, strict=True):
        parameter.grad = tensor.clone()
    placed = place_all((str(i), t) for i, t in enumerate(tensors))
    norm = float(local_square_sum(placed.values())) ** 0.5
    assert norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(parameters, 0.5)), rel=1e-6)
    clip(placed.values(), norm, 0.5)
    for i, parameter in enumerate(parameters):
        torch.testing.assert_close(placed[str(i)].tensor, parameter.grad, rtol=1e-5, atol=1e-7)
    before = placed["0"].tensor.clone()
    clip(placed.values(), 0.4, 0.5)
    assert torch.equal(before, placed["0"].tensor)


def test_the_norm_of_a_large_tensor_is_right_and_does_not_depend_on_its_division() -> None:
    large = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0))
    exact = large.double().square().sum().item()
    for parts in (1, 8):
        pieces = place_all((str(i), t) for i, t in enumerate(large.chunk(parts)))
        assert float(local_square_sum(pieces.values())) == pytest.approx(exact, rel=1e-6)
