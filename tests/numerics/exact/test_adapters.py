"""Adapters of routed experts in exact numerics."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel.layouts import Layout
from tests.parallel.outcomes import SPARSE, Outcome, Pools, layout_job, three_steps

ADAPTED = SPARSE | {"lora": {"rank": 3, "targets": ["q_proj", r".*\.experts\..*"]}}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """What one process has in numerics of some kind."""
    return lambda kind: three_steps({}, ADAPTED | {"numerics__kind": kind}, tmp_path_factory.mktemp("alone"))


def losses(outcome: Outcome) -> list[Any]:
    return [record[key] for record in outcome["records"] for key in ("loss", "grad_norm")]


def test_adapters_of_experts_learn_as_in_native_numerics(alone: Any) -> None:
    native, exact = alone("native"), alone("exact")
    assert losses(exact) == pytest.approx(losses(native), rel=1e-5)
    for name, parameter in native["parameters"].items():
        assert (exact["parameters"][name] - parameter).norm() <= 1e-3 * parameter.norm() + 1e-9, name


@pytest.mark.parametrize(
    "layout", [{"tp": 2}, {"dp_shard": 2, "ep": 2, "tp": 2}, {"pp": 2, "pp_schedule": "zero_bubble"}], ids=str
)
def test_adapters_of_experts_have_the_same_bits_on_any_layout(
    workers: Pools, alone: Any, tmp_path: Path, layout: Layout
) -> None:
    exact, one = ADAPTED | {"numerics__kind": "exact"}, alone("exact")
    for many in workers(layout_job(layout, **ADAPTED).layout.world_size).run(three_steps, layout, exact, tmp_path):
        assert losses(many) == losses(one)
        wrong = [n for n, p in one["parameters"].items() if not torch.equal(many["parameters"][n], p)]
        assert not wrong
