"""Shapes and ops: parameters as they were published, operations and bytes as closed forms have them."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equigrad.config import Job
from equigrad.config.layout import Layout
from equigrad.config.load import make_job
from equigrad.config.model import Experts, LinearAttention, Model
from equigrad.errors import UserError
from equigrad.models.specs import flops_per_token, parameter_count
from equigrad.plan.hardware import DATA
from equigrad.plan.ops import head_ops, layer_ops
from equigrad.plan.shape import Shape, seen_keys
from equigrad.plan.workload import Workload

GPT = Shape.gpt(hidden=1024, layers=2, heads=16, vocab=51200, positions=2048)


def test_parameters_of_every_published_model_are_the_published_ones() -> None:
    rows = [json.loads(line) for line in (DATA / "fsdp_runs.jsonl").read_text().splitlines()]
    for row in rows:
        shape = Shape.gpt(row["hidden"], row["layers"], row["heads"], row["vocab"], row["seq_len"], row["ffn"])
        assert shape.parameters == row["params"], row["model"]
    assert len(rows) == 201


MODELS = [
    Model(vocab_size=1000),
    Model(vocab_size=1000, num_key_value_heads=2, tie_word_embeddings=False, head_dim=32),
    Model(vocab_size=1000, experts=Experts(num_experts=8, shared_expert_intermediate_size=64, shared_expert_gate=True)),
    Model(vocab_size=1000, experts=Experts(decoder_sparse_step=2)),
    Model(vocab_size=1000, sliding_window=64, full_attention_layers=[1]),
]


@pytest.mark.parametrize("model", MODELS, ids=range(len(MODELS)))
def test_a_model_of_equigrad_has_as_many_parameters_and_operations_here_as_there(model: Model) -> None:
    shape = Shape.of(model)
    assert shape.parameters == parameter_count(model)
    assert shape.model_flops(512, causal=True) == pytest.approx(flops_per_token(model, (512 + 1) / 2))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("model", MODELS, ids=range(len(MODELS)))
def test_the_products_of_a_layer_are_those_of_its_matrices(model: Model, tp: int) -> None:
    shape = Shape.of(model)
    for layer in set(shape.layers):
        ops = layer_ops(Workload(shape, 512, 2, 1, Layout(tp=tp)), layer)
        router = layer.sparse * model.hidden_size * (model.experts.num_experts if model.experts else 0)
        weights = tp * (sum(op.sizes[1] for op in ops) - router) + router  # which every tensor rank has whole
        gate = layer.sparse and model.experts is not None and model.experts.shared_expert_gate
        assert weights == sum(shape.layer_parameters(layer)) - (2 + gate) * model.hidden_size


def test_a_model_whose_cost_is_not_known_is_refused() -> None:
    with pytest.raises(UserError, match="neither the gated delta rule nor multi-token prediction"):
        Shape.of(Model(vocab_size=1000, linear_attention=LinearAttention()))


def test_a_job_is_a_workload_of_as_many_tokens() -> None:
    job: Job = make_job(
        {"batch": {"tokens": 65536, "row_tokens": 4096}, "data": {"context": 1024}, "model": {"vocab_size": 512},
         "layout": {"dp_shard": 4, "pp": 2}, "numerics": {"dtype": "bfloat16"}},
        "test",
    )  # fmt: skip
    work = Workload.of(job)
    assert (work.micro_batch, work.micro_batches, work.tokens) == (4, 4, 65536)
    assert sum(len(work.stage(stage)) for stage in range(2)) == job.model.num_hidden_layers


@pytest.mark.parametrize(
    ("tree", "message"),
    [({"numerics": {"dtype": "float32"}}, "native numerics in bfloat16"), ({"batch": {}}, "needs batch.tokens")],
    ids=["float32", "no size"],
)
def test_a_job_without_a_cost_is_refused_with_what_would_have_one(tree: dict[str, Any], message: str) -> None:
    good = {"batch": {"tokens": 4096}, "model": {"vocab_size": 512}, "numerics": {"dtype": "bfloat16"}}
    Workload.of(make_job(good, "test"))
    with pytest.raises(UserError, match=message):
        Workload.of(make_job(good | tree, "test"))


@given(tp=st.sampled_from([1, 2, 4, 8]), rows=st.integers(1, 8))
def test_operations_of_a_layer_are_those_of_its_products_and_scores(tp: int, rows: int) -> None:
    """24 h^2 a token for the products of a layer of GPT, 4 h for each key that is seen (arXiv 2104.04473)."""
    work = Workload(GPT, 2048, rows, 1, Layout(tp=tp))
    whole = tp * sum(op.flops for op in layer_ops(work, GPT.layers[0]))
    assert whole == pytest.approx(work.row_tokens * (24 * 1024**2 + 4 * 1024 * 1024.5))
    unfused = tp * sum(op.flops for op in layer_ops(replace(work, attention="unfused"), GPT.layers[0]))
    assert unfused == pytest.approx(work.row_tokens * (24 * 1024**2 + 4 * 1024 * 2048))


def test_a_window_is_seen_as_counting_keys_has_it() -> None:
    for sequence in (1, 5, 9):
        for window in (None, 1, 4, 12):
            counted = sum(min(n + 1, window or sequence) for n in range(sequence)) / sequence
            assert seen_keys(sequence, window) == pytest.approx(counted)


@given(tp=st.sampled_from([1, 2, 4]), inner=st.sampled_from([1408, 4096]))
def test_products_move_no_less_than_weights_and_no_op_is_negative(tp: int, inner: int) -> None:
    shape = replace(GPT, inner=inner, gated=True)
    work = Workload(shape, 512, 1, 1, Layout(tp=tp))
    for op in [*layer_ops(work, shape.layers[0]), *head_ops(work)]:
        assert min(op.flops, *op.moved, op.saved) >= 0
        if op.product:
            _, k, n = op.product
            assert op.moved[0] >= 2 * k * n or op.name == "attention"
