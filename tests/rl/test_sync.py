"""Weights that arrive are those of the ranks that train, to the bit, from whatever layout."""

from pathlib import Path
from typing import Any

import pytest
import torch

from equigrad.checkpoint.digest import tree_of_tensors
from equigrad.rl.sync import Weights
from tests.jobs import make_trainer, whole_parameters
from tests.parallel.layouts import Layout
from tests.parallel.outcomes import SPARSE, Pools, layout_job

LAYOUTS: list[Layout] = [
    {},
    {"dp_shard": 2},
    {"tp": 2},
    {"pp": 2},
    {"dp_shard": 2, "ep": 2},
    {"dp_replicate": 2, "tp": 2},
]


def arrived(layout: Layout, kind: str, folder: Path) -> dict[str, Any]:
    """What every rank gets, before and after the parameters changed in their places."""
    trainer = make_trainer(layout_job(layout, **SPARSE, numerics__kind=kind), folder)
    weights, found = Weights(trainer.parameters), []
    for factor in (1.0, -0.5):
        for placed in trainer.parameters.values():
            placed.tensor.mul_(factor)  # and zeros get a sign
        tensors = {name: tensor.clone() for name, tensor in weights}
        whole = whole_parameters(trainer)
        assert tensors.keys() == whole.keys()
        assert all(torch.equal(tensors[name], whole[name]) for name in whole)
        assert weights.digests() == tree_of_tensors(tensors).nodes
        found.append(tree_of_tensors(tensors).root)
    return {"digests": found, "signs": any(bool(t.signbit().logical_and(t == 0).any()) for t in tensors.values())}


@pytest.mark.parametrize("kind", ["native", "exact"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_arrives_is_what_was_trained_on_every_rank(
    workers: Pools, tmp_path: Path, layout: Layout, kind: str
) -> None:
    one = arrived({}, kind, tmp_path / "one")
    assert one["signs"]
    assert len(set(one["digests"])) == 2
    if layout:
        for found in workers(layout_job(layout, **SPARSE).layout.world_size).run(arrived, layout, kind, tmp_path):
            assert found == one
