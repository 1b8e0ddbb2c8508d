"""The memory estimate of a dry run against what a step allocates."""

from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from equigrad.config import Job
from equigrad.memory import estimate as guesses
from equigrad.memory.estimate import estimate
from equigrad.numerics.row import Row
from equigrad.optim import arithmetic, assignment, exchange
from equigrad.parallel.placement import Placed
from equigrad.trainer import Trainer
from tests.jobs import make_trainer, tiny_job

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "mlp_only_layers": [0]}
BIASED = {"bias": True, "router_bias": True, "activation": "clamped_swiglu"}
SHARED = {"shared_expert_intermediate_size": 48, "shared_expert_gate": True}
NEXT = {
    "model__qk_norm": True, "model__attn_output_gate": True, "model__zero_centred_norm": True,
    "model__linear_attention": {"linear_key_head_dim": 16, "linear_value_head_dim": 24, "full_attention_interval": 2},
}  # fmt: skip


def saved_bytes(trainer: Trainer, tokens: int) -> int:
    """What the forward pass of a row of two samples keeps on this rank."""
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    world = trainer.world
    row = Row.of([tokens // 2] * 2, "cpu", world.axis("cp"), world.axis("tp"), world.axis("ep"))
    ids = torch.arange(len(row.positions)) % 257
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = trainer.model(ids, row, ids).sum()
    loss.backward()  # so that no rank waits for another one's
    return sum(saved.values())


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
    measured = saved_bytes(trainer, 400)
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


def _measured(layout: dict[str, Any], experts: Any, folder: Path) -> tuple[int, int, int]:
    """Bytes of saved activations, of parameters and of the optimizer's state on this rank."""
    trainer = make_trainer(divided_job(layout, experts), folder)
    state = [sum(p.tensor.nbytes for p in found.values()) for found in (trainer.parameters, trainer.optimizer.state())]
    return saved_bytes(trainer, 400) if layout.get("pp", 1) == 1 else 0, *state


def divided_job(layout: dict[str, Any], experts: Any) -> Job:
    return tiny_job(model__hidden_size=64, model__intermediate_size=160, model__num_hidden_layers=4,
                    batch__row_tokens=400, model__experts=experts, layout=layout)  # fmt: skip


@pytest.mark.parametrize("experts", [None, EXPERTS | SHARED], ids=["dense", "experts"])
@pytest.mark.parametrize("layout", [{"cp": 2}, {"tp": 2}, {"cp": 2, "tp": 2}, {"pp": 2}, {"dp_shard": 2}], ids=str)
def test_what_is_divided_is_a_part_on_each_rank(workers: Any, tmp_path: Path, layout: Any, experts: Any) -> None:
    job = divided_job(layout, experts)
    guess = estimate(job, (9, 1) if "pp" in layout else (1,))
    found = workers(job.layout.world_size).run(_measured, layout, experts, tmp_path)
    found = found[:1] if "pp" in layout else found  # the rank with the many rows
    activations, parameters, moments = (max(sizes) for sizes in zip(*found, strict=True))
    assert guess.optimizer == pytest.approx(moments, rel=0.02)
    sharded = job.layout.data_lanes * job.layout.cp > 1
    assert guess.parameters > parameters if sharded else guess.parameters == pytest.approx(parameters, rel=0.01)
    if activations:
        assert guess.activations + guess.logits == pytest.approx(activations, rel=0.2)


def peak_bytes(run: Callable[[], object]) -> int:
    """The most that is allocated at one time and was not before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    assert profiled.profiler is not None
    found = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(found, key=lambda event: event.start_ns())]
    return max(accumulate(sizes), default=0)


@pytest.mark.parametrize("numerics", [{}, {"dtype": "bfloat16"}, {"kind": "exact"}], ids=str)
@pytest.mark.parametrize("experts", [None, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize(("rule", "vocabulary"), [("muon", 257), ("normuon", 257), ("meqmuon", 257), ("meqmuon", 8000)])
def test_the_memory_of_an_update_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str, vocabulary: int, experts: Any, numerics: Any
) -> None:
    """Of matrices that take several waves, or of an embedding that takes several pieces; activations are few."""
    for module, entries in ((assignment, 1 << 15), (guesses, 1 << 15), (exchange, 1 << 13)):
        monkeypatch.setattr(module, "_AT_ONCE" if module is exchange else "WAVE_ENTRIES", entries)
    for module in (arithmetic, guesses):
        monkeypatch.setattr(module, "PIECE_ENTRIES", 1 << 13)
    job = tiny_job(model__hidden_size=64, model__intermediate_size=160, model__num_hidden_layers=4,
                   batch__row_tokens=48, memory__recompute="block", model__experts=experts, optim__name=rule,
                   model__vocab_size=vocabulary, numerics=numerics)  # fmt: skip
    trainer = make_trainer(job, tmp_path)
    gradients = {name: Placed(p.placement, p.tensor.clone()) for name, p in trainer.parameters.items()}
    measured = peak_bytes(lambda: trainer.optimizer.step(gradients, 0.1))
    guess = estimate(job)
    assert guess.activations + guess.logits + guess.working == pytest.approx(measured, rel=0.25)


def test_a_pipeline_holds_several_rows() -> None:
    one, two = (estimate(divided_job({"pp": 2}, None), alive).activations for alive in ((1, 1), (2, 1)))
    assert two == 2 * one
    assert estimate(divided_job({}, None)).activations == pytest.approx(2 * one, rel=0.3)
