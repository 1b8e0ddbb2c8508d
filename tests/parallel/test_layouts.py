"""Any layout is one process: loss, gradient norm, every gradient, and the parameters after three steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from equigrad.parallel.stop import StopRequest
from tests.jobs import assemble, make_trainer, tiny_job, whole_parameters
from tests.workers import Workers

Pools = Callable[[int], Workers]
Outcome = dict[str, Any]
Layout = dict[str, Any]

LAYOUTS = [
    {"tp": 2},
    {"tp": 4},
    {"tp": 2, "dp_shard": 2},
    {"pp": 2},
    {"pp": 2, "dp_shard": 2},
    {"pp": 2, "tp": 2, "pp_schedule": "zero_bubble"},
    {"pp": 2, "cp": 2, "pp_schedule": "gpipe"},
    {"cp": 2},
    {"cp": 2, "cp_zigzag": False},
    {"cp": 2, "cp_strategy": "ulysses"},
    {"cp": 3},
    {"cp": 3, "cp_strategy": "ulysses", "cp_zigzag": True},
    {"cp": 4},
    {"cp": 4, "cp_zigzag": False},
    {"cp": 4, "cp_strategy": "ulysses"},
    {"cp": 2, "tp": 2},
    {"cp": 2, "tp": 2, "cp_strategy": "ulysses"},
    {"cp": 2, "dp_shard": 2},
    {"cp": 2, "dp_replicate": 2, "cp_strategy": "ulysses"},
    {"cp": 2, "tp": 2, "dp_shard": 2},
]


def _job(layout: Layout, **changes: Any) -> Any:
    choices = {f"layout__{key}": value for key, value in layout.items()}
    return tiny_job(**{"train__steps": 3, "model__num_key_value_heads": 4} | choices | changes)


def _three_steps(layout: Layout, changes: dict[str, Any], folder: Path) -> Outcome:
    trainer, gradients, stop = make_trainer(_job(layout, **changes), folder), [], StopRequest()
    plain = trainer.gradients

    def kept() -> Any:
        found = plain()
        gradients.append(assemble({n: p.renamed(n) for n, p in found.items()}))
        return found

    trainer.gradients = kept  # type: ignore[method-assign]
    records = [trainer.update(trainer.stream.next_batch(), stop)[0] for _ in range(3)]
    return {"records": records, "gradients": gradients, "parameters": whole_parameters(trainer)}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], Outcome]:
    known: dict[str, Outcome] = {}

    def run(changes: dict[str, Any]) -> Outcome:
        key = str(changes)
        if key not in known:
            known[key] = _three_steps({}, changes, tmp_path_factory.mktemp("alone"))
        return known[key]

    return run


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Within 1e-5 of the tensor's size."""
    return bool((found - expected).norm() <= 1e-5 * expected.norm() + 1e-9)


# Three key heads for six query heads, windows that end on other ranks and one layer without.
UNEVEN = {
    "model__num_attention_heads": 6, "model__num_key_value_heads": 3, "model__head_dim": 8,
    "model__sliding_window": 11, "model__full_attention_layers": [1],
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_layout_is_one_process(workers: Pools, alone: Any, tmp_path: Path, layout: Layout) -> None:
    _compare(workers, alone, tmp_path, layout, {})


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_context_ranks_divide_windows_and_uneven_heads(
    workers: Pools, alone: Any, tmp_path: Path, strategy: str
) -> None:
    _compare(workers, alone, tmp_path, {"cp": 4, "cp_strategy": strategy}, UNEVEN)


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
    _compare(workers, alone, tmp_path, layout, {"model__num_hidden_layers": 5, "model__tie_word_embeddings": False})


def _compare(workers: Pools, alone: Any, tmp_path: Path, layout: Layout, changes: dict[str, Any]) -> None:
    size = _job(layout).layout.world_size
    one = alone(changes)
    for rank, many in enumerate(workers(size).run(_three_steps, layout, changes, tmp_path)):
        for key in ("loss", "grad_norm", "tokens", "executed_tokens"):
            found, expected = ([record[key] for record in outcome["records"]] for outcome in (many, one))
            assert found == pytest.approx(expected, rel=1e-5), (rank, key)
        for step in range(3):
            wrong = [n for n, g in one["gradients"][step].items() if not close(many["gradients"][step][n], g)]
            assert not wrong, (rank, step, wrong)
        wrong = [n for n, p in one["parameters"].items() if not close(many["parameters"][n], p)]
        assert not wrong, (rank, wrong)
