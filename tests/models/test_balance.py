"""What is learned from the loads of a step: by whom, when, and never by halves."""

from pathlib import Path
from typing import Any

import pytest
import torch

from equigrad.models.balance import Balance
from equigrad.numerics.native import NativeOps
from equigrad.numerics.routing import Load
from equigrad.numerics.row import Row
from equigrad.objectives.load_balance import load_balance
from equigrad.parallel.placement import place
from equigrad.parallel.stop import StopRequest
from tests.jobs import Records, make_trainer, tiny_job
from tests.numerics.layers import Given

EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "router_aux_loss_coef": 0.1, "router_bias_update_rate": 0.01,
}  # fmt: skip


def job(**changes: Any) -> Any:
    return tiny_job(model__experts=EXPERTS, **changes)


def learned(trainer: Any) -> dict[str, list[Any]]:
    """The counts and the biases."""
    tensors = {n: p.tensor for n, p in trainer.state().items() if n.startswith("routing") or "correction" in n}
    assert len(tensors) == 3
    return {n: t.tolist() for n, t in tensors.items()}


def make_balance() -> tuple[Balance, torch.Tensor]:
    model = job().model.model_copy(update={"num_hidden_layers": 1})
    bias = torch.zeros(4)
    name = "model.layers.0.mlp.gate.e_score_correction_bias"
    return Balance(model, {name: place(name, bias)}, torch.device("cpu"), 0), bias


def test_before_the_first_step_all_experts_are_alike() -> None:
    balance, _ = make_balance()
    assert balance.shares([0]).tolist() == [[0.5] * 4]


def test_shares_are_those_of_the_last_step_and_biases_move_towards_the_mean() -> None:
    balance, bias = make_balance()
    for counts in ([3, 1, 0, 0], [1, 1, 2, 0]):
        balance.count({0: Load(torch.tensor(counts), torch.zeros(4))})
    taken, _ = balance.take()
    assert taken.tolist() == [[4, 2, 2, 0]]
    assert balance.shares([0]).tolist() == [[0.5] * 4]  # not before the step is done
    assert balance.metrics(taken) == {"expert_load": 2.0, "dropped_tokens": 0}
    balance.update(taken)
    assert balance.shares([0]).tolist() == [[1.0, 0.5, 0.5, 0.0]]
    assert bias.tolist() == pytest.approx([-0.01, 0.0, 0.0, 0.01])
    assert not balance.take()[0].any()


def test_every_token_of_a_step_is_counted_and_none_is_dropped(tmp_path: Path) -> None:
    trainer = make_trainer(job(), tmp_path)
    for _ in range(2):
        record, _ = trainer.update(trainer.stream.next_batch(), StopRequest())
        assert record["dropped_tokens"] == 0
        assert record["expert_load"] >= 1
        assert [sum(layer) for layer in learned(trainer)["routing.counts"]] == [2 * record["tokens"]] * 2


def test_a_refused_step_leaves_counts_and_biases_as_they_were(tmp_path: Path) -> None:
    trainer = make_trainer(job(train__non_finite="skip"), tmp_path)
    trainer.update(trainer.stream.next_batch(), StopRequest())
    before, whole = learned(trainer), trainer.execution.train

    def poison(*arguments: Any) -> Any:
        result = whole(*arguments)
        next(trainer.model.parameters()).grad.fill_(torch.inf)
        return result

    trainer.execution.train = poison  # type: ignore[method-assign]
    trainer.update(trainer.stream.next_batch(), StopRequest())
    assert trainer.counters["skipped"] == 1
    assert learned(trainer) == before
    trainer.execution.train = whole  # type: ignore[method-assign]
    record, _ = trainer.update(trainer.stream.next_batch(), StopRequest())
    assert sum(learned(trainer)["routing.counts"][0]) == 2 * record["tokens"]  # nothing left over of the refused one


def test_evaluation_counts_nothing(tmp_path: Path) -> None:
    trainer = make_trainer(job(), tmp_path)
    trainer.evaluate(Records(), 200)
    assert not any(taken.any() for taken in trainer.balance.take())


@pytest.mark.parametrize("way", ["term", "bias"])
def test_loads_even_out(way: str) -> None:
    """A router that prefers one expert, and tokens that differ: either way, a step behind, spreads them."""
    balance, bias = make_balance()
    experts = job().model.experts
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 8, generator=generator)
    x[:, 0] = 1.0
    weight = torch.randn(4, 8, generator=generator) * 0.3
    weight[0, 0] += 2.0
    weight.requires_grad_()
    uneven = []
    for _ in range(100):
        load = NativeOps().router(x, Given(weight), bias, experts, Row.of([200])).load
        if way == "term":
            load_balance([load.probability], balance.shares([0]), 1, 200).backward()
            with torch.no_grad():
                weight -= 0.1 * weight.grad
            weight.grad = None
        balance.count({0: load})
        counts, _ = balance.take()
        balance.update(counts)
        if way == "term":
            bias.zero_()
        uneven.append(balance.metrics(counts)["expert_load"])
    assert uneven[0] > 1.7
    assert max(uneven[-10:]) < 1.25


def test_the_loss_reported_is_that_of_the_language_model(tmp_path: Path) -> None:
    """The first step of two runs that differ in the coefficient alone."""
    records = []
    for coefficient in (0.0, 1.0):
        changed = EXPERTS | {"router_aux_loss_coef": coefficient}
        trainer = make_trainer(tiny_job(model__experts=changed), tmp_path / str(coefficient))
        records.append(trainer.update(trainer.stream.next_batch(), StopRequest())[0])
    assert records[0]["loss"] == records[1]["loss"]
    assert records[0]["balance_loss"] == 0
    assert records[1]["balance_loss"] == pytest.approx(2, rel=1e-5)
    assert records[0]["grad_norm"] != records[1]["grad_norm"]
