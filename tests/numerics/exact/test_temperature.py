"""Training at a temperature: exact numerics against native, and bit by bit on divided models."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from equigrad.data.stream import Stream
from tests.parallel.layouts import Layout
from tests.parallel.outcomes import Outcome, Pools, layout_job, three_steps
from tests.parallel.test_layouts import ADAPTED

MODELS: dict[str, dict[str, Any]] = {"dense": {}, "adapted head": ADAPTED}
FIGURES = ("loss", "grad_norm")


def steps(layout: Layout, changes: dict[str, Any], folder: Path, temperature: float = 0.7) -> Outcome:
    """Three steps at a temperature."""
    following = Stream.next_batch
    with patch.object(Stream, "next_batch", lambda stream: replace(following(stream), temperature=temperature)):
        return three_steps(layout, changes, folder)


def figures(outcome: Outcome) -> list[Any]:
    return [record[key] for record in outcome["records"] for key in FIGURES]


@pytest.mark.parametrize("model", MODELS)
def test_it_learns_as_in_native_numerics_and_otherwise_than_at_temperature_1(model: str, tmp_path: Path) -> None:
    native, exact = (steps({}, MODELS[model] | {"numerics__kind": kind}, tmp_path) for kind in ("native", "exact"))
    assert figures(exact) == pytest.approx(figures(native), rel=1e-5)
    for name, parameter in native["parameters"].items():
        assert (exact["parameters"][name] - parameter).norm() <= 1e-3 * parameter.norm() + 1e-9, name
    other = steps({}, MODELS[model] | {"numerics__kind": "native"}, tmp_path, 1.0)
    assert figures(other) != pytest.approx(figures(native), rel=1e-3)


def test_a_divided_vocabulary_learns_as_a_whole_one_in_native_numerics(workers: Pools, tmp_path: Path) -> None:
    one = steps({}, ADAPTED, tmp_path)
    for many in workers(2).run(steps, {"tp": 2}, ADAPTED, tmp_path):
        assert figures(many) == pytest.approx(figures(one), rel=1e-5)


@pytest.mark.parametrize("model", MODELS)
def test_divided_and_made_again_it_has_the_same_bits(model: str, workers: Pools, tmp_path: Path) -> None:
    changes = MODELS[model] | {"numerics__kind": "exact"}
    one = steps({}, changes, tmp_path)
    outcomes = [steps({}, changes | {"memory__saved_logits_mb": 0}, tmp_path)]
    for layout in ({"tp": 2}, {"pp": 2, "pp_schedule": "zero_bubble"}):
        outcomes += workers(layout_job(layout).layout.world_size).run(steps, layout, changes, tmp_path)
    for many in outcomes:
        assert figures(many) == figures(one)
        assert not [n for n, p in one["parameters"].items() if not torch.equal(many["parameters"][n], p)]
