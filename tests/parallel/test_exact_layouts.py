"""In exact numerics any layout has the very bits of one process: figures, gradients, parameters, moments and grids."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.exact_runs import differences, exact_steps
from tests.parallel.layouts import Layout, full_product, pairwise
from tests.parallel.outcomes import Pools, Rows, layout_job
from tests.parallel.test_layouts import (
    ADAPTED,
    ADAPTED_LAYOUTS,
    FURTHER,
    FURTHER_LAYOUTS,
    MODELS,
    ROWS,
    SINKS,
    WIDER,
    WIDER_EXPERTS,
)

FULL = os.environ.get("EQUIGRAD_TEST_LAYOUTS") == "all"
LAYOUTS = full_product() if FULL else pairwise()
STEPS = 20 if FULL else 3
GIVEN: list[Rows] = [*ROWS, *[[(9, 1), (3,)], [(), (10, 7)], [(17,), ()]] * 6]
SINKS_LAYOUTS: list[Layout] = [
    {"tp": 2},
    {"cp": 2},
    {"cp": 3, "cp_strategy": "ulysses"},
    {"dp_shard": 2, "ep": 2},
    {"pp": 2, "tp": 2},
]
UNTIED: dict[str, Any] = {"model__tie_word_embeddings": False}
HALF = {"numerics__dtype": "bfloat16"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], Any]:
    """What one process has; computed once for a model."""
    known: dict[str, Any] = {}

    def run(changes: dict[str, Any]) -> Any:
        key = repr(changes)
        if key not in known:
            known[key] = exact_steps({}, changes, tmp_path_factory.mktemp("alone"), GIVEN, STEPS)
        return known[key]

    return run


def check(workers: Pools, alone: Any, folder: Path, layout: Layout, changes: dict[str, Any]) -> None:
    pool = workers(layout_job(layout, **changes).layout.world_size)
    for many in pool.run(exact_steps, layout, changes, folder, GIVEN, STEPS):
        assert not differences(many, alone(changes))


@pytest.mark.parametrize(("model", "layout"), LAYOUTS, ids=str)
def test_product(workers: Pools, alone: Any, tmp_path: Path, model: str, layout: Layout) -> None:
    check(workers, alone, tmp_path, layout, MODELS[model])


@pytest.mark.parametrize("layout", WIDER, ids=str)
def test_wider_degrees(workers: Pools, alone: Any, tmp_path: Path, layout: Layout) -> None:
    check(workers, alone, tmp_path, layout, MODELS["dense"])


@pytest.mark.parametrize("layout", WIDER_EXPERTS, ids=str)
def test_wider_degrees_of_experts(workers: Pools, alone: Any, tmp_path: Path, layout: Layout) -> None:
    check(workers, alone, tmp_path, layout, MODELS["experts"])


@pytest.mark.parametrize("layout", SINKS_LAYOUTS, ids=str)
def test_windows_and_sinks(workers: Pools, alone: Any, tmp_path: Path, layout: Layout) -> None:
    check(workers, alone, tmp_path, layout, SINKS | UNTIED)


@pytest.mark.parametrize("layout", ADAPTED_LAYOUTS, ids=str)
def test_adapters(workers: Pools, alone: Any, tmp_path: Path, layout: Layout) -> None:
    check(workers, alone, tmp_path, layout, ADAPTED)


@pytest.mark.parametrize("layout", FURTHER_LAYOUTS, ids=str)
def test_multi_token_prediction(workers: Pools, alone: Any, tmp_path: Path, layout: Layout) -> None:
    check(workers, alone, tmp_path, layout, FURTHER)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"cp": 2, "dp_shard": 2}, {"pp": 2, "tp": 2}], ids=str)
def test_bfloat16(workers: Pools, alone: Any, tmp_path: Path, layout: Layout) -> None:
    check(workers, alone, tmp_path, layout, MODELS["experts"] | HALF)


@pytest.mark.parametrize("layout", [{"tp": 2, "cp": 4}, {"tp": 4, "cp": 2}], ids=str)
def test_the_pair_that_others_tell_apart(workers: Pools, alone: Any, tmp_path: Path, layout: Layout) -> None:
    """tp 2 with cp 4 against tp 4 with cp 2: on other systems losses drift apart between such layouts."""
    check(workers, alone, tmp_path, layout, MODELS["dense"])
