"""Any layout is one process: loss, gradient norm, every gradient, and the parameters after three steps."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from equigrad.execution import WholeModel
from equigrad.models.generate import generate
from tests.jobs import make_trainer
from tests.parallel.layouts import Layout, full_product, pairwise
from tests.parallel.outcomes import EXPERTS, SPARSE, Outcome, Pools, Rows, check, layout_job, same, three_steps

# Of rows that no context or tensor degree divides, that are shorter than a degree, and empty; and lanes with nothing.
ROWS: list[Rows] = [
    [(9,), (1,), (), (3,), (7, 3), (8, 9)],
    [(9,), (5,), (9,), (), (), (7,), (3,), (1,)],
    [(), (17,), (), (1,)],
]
DEEPER = {"model__num_hidden_layers": 4, "model__initializer_range": 0.05}
MODELS: dict[str, dict[str, Any]] = {"dense": DEEPER, "experts": DEEPER | SPARSE}
# Degrees that the product lacks, and a few on text, in rows that the job itself has packed.
WIDER = [
    {"tp": 4},
    {"cp": 3},
    {"cp": 4},
    {"cp": 4, "cp_zigzag": False},
    {"cp": 4, "cp_strategy": "ulysses"},
]
WIDER_EXPERTS = [
    {"dp_shard": 2},
    {"dp_shard": 4},
    {"dp_shard": 4, "ep": 4},
    {"cp": 2, "dp_shard": 2, "ep": 4, "tp": 2},
]
# A window on one layer of two, sinks and biases wherever gpt-oss has them; limits that clamp, and 5 experts again.
SINKS = {
    "model__initializer_range": 0.05, "model__attention_bias": True, "model__output_bias": True,
    "model__attention_sinks": True, "model__sliding_window": 11, "model__full_attention_layers": [1],
    "model__experts": {
        "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "bias": True, "router_bias": True,
        "activation": "clamped_swiglu", "swiglu_limit": 0.1, "router_aux_loss_coef": 0.05,
    },
}  # fmt: skip


# Every kind of linear, the head too. Larger weights, for an adapter's second matrix starts at nothing.
ADAPTED = {"model__tie_word_embeddings": False, "model__attention_bias": True, "model__output_bias": True,
           "lora": {"rank": 4, "alpha": 8.0, "targets": ["all-linear", "lm_head"]}}  # fmt: skip
ADAPTED_LAYOUTS = [
    {"tp": 2},
    {"cp": 2},
    {"dp_shard": 2},
    {"dp_replicate": 2},
    {"tp": 2, "dp_shard": 2},
    {"pp": 2, "pp_schedule": "zero_bubble"},
    {"pp": 2, "tp": 2},
    {"pp": 2, "dp_shard": 2, "pp_schedule": "zero_bubble"},
]


# Routed experts alone, beside a shared one that stays as it is.
ADAPTED_EXPERTS = SPARSE | {"lora": {"rank": 4, "alpha": 8.0, "targets": ["q_proj", r".*\.experts\..*"]}}
ADAPTED_EXPERTS_LAYOUTS = [
    {"tp": 2},
    {"cp": 2, "ep": 2},
    {"dp_shard": 4},
    {"dp_shard": 4, "ep": 4},
    {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
    {"dp_shard": 2, "ep": 2, "tp": 2},
    {"pp": 2, "tp": 2, "pp_schedule": "zero_bubble"},
    {"pp": 2, "dp_shard": 2, "ep": 2, "pp_schedule": "zero_bubble"},
    {"cp": 2, "dp_shard": 2, "ep": 4, "tp": 2},
]


FURTHER = {"model__mtp_layers": 2, "model__initializer_range": 0.05}
FURTHER_LAYOUTS = [
    {"tp": 2},
    {"cp": 2},
    {"dp_shard": 2},
    {"pp": 2},
    {"tp": 2, "cp": 2},
    {"pp": 2, "dp_shard": 2, "pp_schedule": "zero_bubble"},
]


# Layers 0 and 2 with states, of two key heads: fewer than some degrees. What a state gives may be nearly nothing; then
# the norm behind it, but for a larger eps, makes much of its rounding, and large steps of Adam more of that. Rows of
# whole chunks and remainders, and empty.
RECURRENT = {
    "optim__lr": 1e-3, "model__num_hidden_layers": 3, "model__initializer_range": 0.05, "model__rms_norm_eps": 1e-3,
    "model__qk_norm": True, "model__attn_output_gate": True, "model__zero_centred_norm": True,
    "model__partial_rotary_factor": 0.5,
    "model__linear_attention": {
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 4, "linear_value_head_dim": 6,
        "full_attention_interval": 2,
    },
}  # fmt: skip
RECURRENT_ROWS: list[Rows] = [[(70, 9), (1,), (), (3, 2)], [(1, 5, 66), (130,)], [(), (17,), (90,)]]
RECURRENT_LAYOUTS = [
    {"dp_shard": 2},
    {"cp": 2},
    {"cp": 2, "cp_strategy": "ulysses"},
    {"cp": 3},
    {"cp": 4},
    {"tp": 2},
    {"tp": 4},
    {"pp": 2},
    {"pp": 2, "tp": 2, "pp_schedule": "zero_bubble"},
    {"cp": 2, "tp": 2},
]
LINEAR: Any = RECURRENT["model__linear_attention"]
ONE_HEAD = {"model__linear_attention": LINEAR | {"linear_num_key_heads": 1, "linear_num_value_heads": 2}}


# Three key heads for six query heads, windows that end on other ranks and one layer without.
UNEVEN = {
    "model__num_attention_heads": 6, "model__num_key_value_heads": 3, "model__head_dim": 8,
    "model__sliding_window": 11, "model__full_attention_layers": [1],
}  # fmt: skip


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Outcome]:
    known: dict[str, Outcome] = {}

    def run(changes: dict[str, Any], given: Any = None) -> Outcome:
        key = str((changes, given))
        if key not in known:
            known[key] = three_steps({}, changes, tmp_path_factory.mktemp("alone"), given)
        return known[key]

    return run


@pytest.mark.parametrize(
    ("model", "layout"), full_product() if os.environ.get("EQUIGRAD_TEST_LAYOUTS") == "all" else pairwise(), ids=str
)
def test_any_layout_of_uneven_rows_is_one_process(
    workers: Pools, alone: Any, tmp_path: Path, model: str, layout: Layout
) -> None:
    check(workers, alone, tmp_path, layout, MODELS[model], ROWS)


@pytest.mark.parametrize("layout", WIDER, ids=str)
def test_a_layout_is_one_process(workers: Pools, alone: Any, tmp_path: Path, layout: Layout) -> None:
    check(workers, alone, tmp_path, layout, {})


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_context_ranks_divide_windows_and_uneven_heads(
    workers: Pools, alone: Any, tmp_path: Path, strategy: str
) -> None:
    check(workers, alone, tmp_path, {"cp": 4, "cp_strategy": strategy}, UNEVEN)


@pytest.mark.parametrize(
    "layout",
    [
        {"pp": 2, "pp_stages": 2, "pp_schedule": "interleaved"},
        {"pp": 4},
        {"pp": 4, "pp_schedule": "zero_bubble"},
        {"pp": 2, "pp_stages": 2, "pp_schedule": "zero_bubble", "dp_shard": 2},
        {"pp": 2, "tp": 2, "cp": 2},
        {"pp": 2, "tp": 2, "dp_shard": 2},
    ],
    ids=str,
)
def test_a_pipeline_of_many_blocks(workers: Pools, alone: Any, tmp_path: Path, layout: Layout) -> None:
    check(workers, alone, tmp_path, layout, {"model__num_hidden_layers": 5, "model__tie_word_embeddings": False})


@pytest.mark.parametrize("layout", WIDER_EXPERTS, ids=str)
def test_a_layout_of_experts_is_one_process(workers: Pools, alone: Any, tmp_path: Path, layout: dict[str, int]) -> None:
    check(workers, alone, tmp_path, layout, SPARSE)


def test_tensor_ranks_without_a_feature_of_the_experts(workers: Pools, alone: Any, tmp_path: Path) -> None:
    narrow = {"model__experts": EXPERTS | {"moe_intermediate_size": 1}}
    check(workers, alone, tmp_path, {"tp": 2, "dp_shard": 2, "ep": 2}, SPARSE | narrow)


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2},
        {"cp": 2},
        {"cp": 2, "cp_strategy": "ulysses"},
        {"dp_shard": 2},
        {"dp_shard": 2, "ep": 2},
        {"pp": 2},
        {"dp_shard": 2, "ep": 2, "tp": 2},
        {"pp": 2, "cp": 2, "ep": 2, "pp_schedule": "zero_bubble"},
    ],
    ids=str,
)
def test_sinks_windows_and_biased_experts_in_a_layout_are_one_process(
    workers: Pools, alone: Any, tmp_path: Path, layout: Layout
) -> None:
    check(workers, alone, tmp_path, layout, SINKS)


@pytest.mark.parametrize("layout", ADAPTED_LAYOUTS, ids=str)
def test_a_layout_of_adapters_is_one_process(workers: Pools, alone: Any, tmp_path: Path, layout: Layout) -> None:
    check(workers, alone, tmp_path, layout, ADAPTED, ROWS)


@pytest.mark.parametrize("layout", ADAPTED_EXPERTS_LAYOUTS, ids=str)
def test_a_layout_of_adapted_experts_is_one_process(workers: Pools, alone: Any, tmp_path: Path, layout: Layout) -> None:
    check(workers, alone, tmp_path, layout, ADAPTED_EXPERTS, ROWS)


@pytest.mark.parametrize(
    "layout", [{"dp_shard": 2, "ep": 2, "tp": 2}, {"pp": 2, "pp_schedule": "zero_bubble"}], ids=str
)
def test_adapters_of_some_projections_beside_frozen_biases_and_sinks(
    workers: Pools, alone: Any, tmp_path: Path, layout: Layout
) -> None:
    """The rank is odd, so that each expert's run is a product of its own."""
    check(workers, alone, tmp_path, layout, SINKS | {"lora": {"rank": 3, "targets": ["gate_proj", "down_proj"]}})


def test_adapters_beside_experts(workers: Pools, alone: Any, tmp_path: Path) -> None:
    """Experts and routers frozen, adapters on attention, dense and shared layers; the balancing term reaches them."""
    check(workers, alone, tmp_path, {"dp_shard": 2, "ep": 2}, SPARSE | {"lora": {"rank": 4}})


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("layout", [{"pp": 2, "dp_shard": 2}, {"pp": 2, "pp_schedule": "zero_bubble"}], ids=str)
def test_stages_and_units_without_anything_to_train(
    workers: Pools, alone: Any, tmp_path: Path, layout: Layout, layer: int
) -> None:
    changes = {"lora": {"rank": 4, "targets": [f"model.layers.{layer}.self_attn.q_proj"]}, "optim__clip_norm": 0.01}
    check(workers, alone, tmp_path, layout, changes)


def test_adapters_keep_other_promises(alone: Any, tmp_path: Path) -> None:
    """Blocks computed again, logits computed again, rows of another size: the same."""
    changes = ADAPTED | {"memory__recompute": "block", "memory__saved_logits_mb": 0, "batch__row_tokens": 48}
    same(three_steps({}, changes, tmp_path), alone(ADAPTED), 0)


@pytest.mark.parametrize("layout", FURTHER_LAYOUTS, ids=str)
def test_a_layout_of_multi_token_prediction_is_one_process(
    workers: Pools, alone: Any, tmp_path: Path, layout: Layout
) -> None:
    check(workers, alone, tmp_path, layout, FURTHER, ROWS)


@pytest.mark.parametrize("layout", [{"pp": 2, "pp_schedule": "zero_bubble"}, {"dp_shard": 2, "ep": 2}], ids=str)
def test_multi_token_prediction_with_experts_and_an_embedding_of_its_own(
    workers: Pools, alone: Any, tmp_path: Path, layout: Layout
) -> None:
    check(workers, alone, tmp_path, layout, SPARSE | FURTHER | {"model__tie_word_embeddings": False})


@pytest.mark.parametrize(
    "layout",
    [{"dp_shard": 2, "ep": 2}, {"dp_shard": 2, "cp": 2, "ep": 4}, {"pp": 2, "dp_shard": 2}, {"tp": 2, "cp": 2}],
    ids=str,
)
def test_several_objectives_are_each_divided_by_a_count_of_their_own(
    workers: Pools, alone: Any, tmp_path: Path, layout: Layout
) -> None:
    """The next token by the labels in the loss, further ones by those so far ahead, balance by all tokens."""
    check(workers, alone, tmp_path, layout, SPARSE | FURTHER, ROWS)


@pytest.mark.parametrize(
    "layout",
    [{"dp_shard": 2}, {"dp_replicate": 2, "cp": 2, "ep": 2}, {"dp_shard": 4, "pp": 2, "pp_schedule": "zero_bubble"}],
    ids=str,
)
def test_several_modalities_are_one_process(workers: Pools, alone: Any, tmp_path: Path, layout: Layout) -> None:
    """Of one there are fewer samples than lanes, so that a round in the middle has empty rows."""
    sea = {"path": "builtin:moby-dick", "modality": "sea", "weight": 8.0}
    sources = [{"path": "builtin:sotu", "modality": "land"}, sea]
    check(workers, alone, tmp_path, layout, SPARSE | {"data__sources": sources})


@pytest.mark.parametrize("layout", [{"dp_shard": 2}, {"cp": 2}], ids=str)
@pytest.mark.parametrize("kind", ["linear", "dynamic"])
def test_scaled_positions_are_one_process(
    workers: Pools, alone: Any, tmp_path: Path, layout: Layout, kind: str
) -> None:
    scaled = {"model__rope_scaling": {"kind": kind, "factor": 2.0}, "model__max_position_embeddings": 12}
    check(workers, alone, tmp_path, layout, scaled | {"data__context": 12}, ROWS)


@pytest.mark.parametrize("layout", [{"dp_shard": 2}, {"dp_replicate": 2, "pp": 2}], ids=str)
def test_groups_are_one_process(workers: Pools, alone: Any, tmp_path: Path, layout: Layout) -> None:
    check(workers, alone, tmp_path, layout, {"batch__tokens": 200}, "grouped")


@pytest.mark.parametrize("layout", RECURRENT_LAYOUTS, ids=str)
def test_a_layout_of_recurrent_states_is_one_process(
    workers: Pools, alone: Any, tmp_path: Path, layout: Layout
) -> None:
    check(workers, alone, tmp_path, layout, RECURRENT, RECURRENT_ROWS)


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        ({"cp": 2, "ep": 2}, {"model__experts": EXPERTS}),
        ({"dp_shard": 2, "ep": 2, "tp": 2}, {"model__experts": EXPERTS}),
        ({"pp": 2, "cp": 2, "pp_schedule": "zero_bubble"}, {"model__mtp_layers": 1}),
        ({"pp": 2, "tp": 2, "pp_schedule": "zero_bubble"}, {"lora": {"rank": 3}}),
        ({"cp": 2}, {"memory__recompute": "block"}),
        ({"tp": 2, "dp_shard": 2}, ONE_HEAD),
        ({"tp": 2, "cp": 2}, ONE_HEAD),
        ({"pp": 2, "tp": 2, "pp_schedule": "zero_bubble"}, ONE_HEAD),
    ],
    ids=lambda v: ", ".join(v),
)
def test_recurrent_states_keep_other_promises(
    workers: Pools, alone: Any, tmp_path: Path, layout: Layout, more: dict[str, Any]
) -> None:
    """Beside experts, modules for multi-token prediction and adapters, computed again, and where ranks have no head."""
    check(workers, alone, tmp_path, layout, RECURRENT | {"data__context": 80} | more)


def _decoded(layout: Layout, folder: Path) -> list[list[int]]:
    trainer = make_trainer(layout_job(layout, **RECURRENT), folder)
    model = WholeModel(trainer.world, trainer.parts)
    return generate(model, [[5, 6, 7], [1], list(range(70))], 12, temperature=0, tensor=trainer.world.axis("tp"))


@pytest.mark.parametrize("layout", [{"tp": 4}, {"pp": 2, "tp": 2}], ids=str)
def test_divided_states_go_on_as_those_of_one_process(workers: Pools, tmp_path: Path, layout: Layout) -> None:
    assert workers(4).run(_decoded, layout, tmp_path) == [_decoded({}, tmp_path)] * 4


@pytest.mark.parametrize("experts", [{}, {"num_experts": 4}, {"scoring_func": "sigmoid"}], ids=str)
@pytest.mark.parametrize("rows", [48, 1000])
def test_micro_batches_of_experts_are_one_batch(alone: Any, tmp_path: Path, rows: int, experts: dict[str, Any]) -> None:
    """Counts of a row mean nothing: the load-balancing term has those of the step before."""
    changes = SPARSE | {"model__experts": EXPERTS | experts}
    same(three_steps({}, changes | {"batch__row_tokens": rows}, tmp_path), alone(changes), 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"layout__reduce_every_round": True, "layout__reshard_after_forward": False},
        {"memory__recompute": "block"},
        {"batch__tokens": None, "batch__samples": 3},
    ],
    ids=str,
)
def test_divided_experts_keep_other_promises(
    workers: Pools, alone: Any, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Reduced often, recomputed, or with a lane that has no token and so sends nothing to anybody's experts."""
    check(workers, alone, tmp_path, {"dp_shard": 4, "ep": 2}, SPARSE | changes)


@pytest.mark.parametrize(
    "changes",
    [SPARSE, SINKS, ADAPTED, ADAPTED_EXPERTS, RECURRENT],
    ids=["experts", "sinks", "adapters", "adapted experts", "states"],
)
@pytest.mark.parametrize("layout", [{"pp": 2, "tp": 2}, {"pp": 2, "dp_shard": 2}, {"pp": 2, "cp": 2}], ids=str)
def test_what_is_computed_again_may_have_its_weight_gradients_later(
    workers: Pools, alone: Any, tmp_path: Path, layout: Layout, changes: dict[str, Any]
) -> None:
    recomputed = changes | {"memory__recompute": "block", "batch__row_tokens": 96}
    check(workers, alone, tmp_path, layout | {"pp_schedule": "zero_bubble"}, recomputed)


def _compiled_steps(*args: Any) -> Outcome:
    """Traced, but not turned into machine code, which takes a while and is the same on all layouts."""
    with patch("torch.compile", partial(torch.compile, backend="aot_eager")):
        return three_steps(*args)


def test_compiled_blocks_of_tensor_ranks_are_one_process(workers: Pools, alone: Any, tmp_path: Path) -> None:
    """With rows of several lengths, none of which the ranks divide alike."""
    changes = {"model__qk_norm": True, "model__initializer_range": 0.05, "model__num_hidden_layers": 1}
    rows, compiled = [[(8,)], [(7,)], [(5,)]], changes | {"numerics__compile": True}
    for rank, many in enumerate(workers(2).run(_compiled_steps, {"tp": 2}, compiled, tmp_path, rows)):
        same(many, alone(changes, rows), rank)
