"""The memory estimate of a dry run against what a step allocates."""

from pathlib import Path
from typing import Any

import pytest
import torch

from equigrad.memory.estimate import estimate
from equigrad.numerics.row import Row
from tests.jobs import make_trainer, tiny_job

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "mlp_only_layers": [0]}
BIASED = {"bias": True, "router_bias": True, "activation": "clamped_swiglu"}
SHARED = {"shared_expert_intermediate_size": 48, "shared_expert_gate": True}
NEXT = {
    "model__qk_norm": True, "model__attn_output_gate": True, "model__zero_centred_norm": True,
    "model__linear_attention": {"linear_key_head_dim": 16, "linear_value_head_dim": 24, "full_attention_interval": 2},
}  # fmt: skip


@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("experts", [None, EXPERTS, EXPERTS | SHARED, EXPERTS | BIASED])
@pytest.mark.parametrize("mixer", [{}, NEXT], ids=["attention", "states"])
def test_state_is_exact_and_activations_are_close(tmp_path: Path, recompute: str, experts: Any, mixer: Any) -> None:
    job = tiny_job(model__hidden_size=64, model__intermediate_size=160, model__num_hidden_layers=4,
                   batch__row_tokens=400, memory__recompute=recompute, model__experts=experts, **mixer)  # fmt: skip
    trainer = make_trainer(job, tmp_path)
    guess = estimate(job)
    assert guess.parameters == sum(4 * p.numel() for p in trainer.model.parameters())
    assert guess.gradients == guess.parameters
    assert guess.optimizer == sum(p.tensor.nbytes for p in trainer.optimizer.state().values())
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    known = {p.untyped_storage().data_ptr() for p in trainer.model.parameters()}
    row, ids = Row.of([200, 200]), torch.arange(400) % 257
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        trainer.model(ids, row, ids)
    measured = sum(size for at, size in saved.items() if at not in known)
    if recompute == "none":  # otherwise the block that is alive during the backward pass comes on top
        assert measured == pytest.approx(guess.activations + guess.logits, rel=0.15)
    else:
        assert measured < guess.activations + guess.logits


def test_sharding_divides_state_and_gathers_parameters() -> None:
    one, four = (estimate(tiny_job(layout__dp_shard=n, layout__reduce_every_round=True)) for n in (1, 4))
    assert four.optimizer == pytest.approx(one.optimizer / 4, rel=0.01)
    assert four.gradients == pytest.approx(one.gradients / 4, rel=0.01)
    assert one.parameters / 4 < four.parameters < 1.3 * one.parameters


def test_experts_that_are_divided_are_gathered_in_part() -> None:
    one, two = (estimate(tiny_job(model__experts=EXPERTS, layout__dp_shard=2, layout__ep=n,
                                  model__num_hidden_layers=2)) for n in (1, 2))  # fmt: skip
    assert two.optimizer == one.optimizer
    assert two.gradients < one.gradients
    assert two.parameters < one.parameters
