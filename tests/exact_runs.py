"""Runs in exact numerics, compared bit by bit."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from equigrad.audit.cases import unequal_copies
from equigrad.checkpoint.digest import tree
from equigrad.parallel.placement import Placed
from equigrad.parallel.stop import StopRequest
from equigrad.parallel.world import World
from equigrad.trainer import Trainer
from tests.jobs import make_trainer
from tests.parallel.layouts import Layout
from tests.parallel.outcomes import GivenRows, Rows, layout_job

EXACT = {"numerics__kind": "exact"}
FIGURES = ("loss", "balance_loss", "mtp_loss", "grad_norm", "tokens", "executed_tokens", "lr", "expert_load")


def exact_steps(
    layout: Layout,
    changes: dict[str, Any],
    folder: Path,
    given: Sequence[Rows] | None = None,
    steps: int = 3,
    world: World | None = None,
) -> dict[str, Any]:
    """Train on the ranks of this pool, on the job's own text or on ``given`` rows: figures and gradients of each step,
    and all that a checkpoint holds after the last, as digests by name. ``world``: of the layout, where it is known."""
    trainer = make_trainer(layout_job(layout, **{"train__steps": steps} | changes | EXACT), folder, world)
    scheduled: Any = nullcontext()
    if given is not None:
        stream = GivenRows(given, trainer.world.lanes)
        trainer.stream = stream  # type: ignore[assignment]
        scheduled = patch("equigrad.trainer.schedule_samples", stream.schedule)
    with scheduled:
        return outcome(trainer, steps)


def outcome(trainer: Trainer, steps: int) -> dict[str, Any]:
    """What some more steps of a trainer give."""
    gradients: list[dict[str, str]] = []
    norm = trainer.norm

    def kept(found: dict[str, Placed]) -> float:
        gradients.append(dict(tree(found).nodes))
        return norm(found)

    trainer.norm = kept  # type: ignore[method-assign, assignment]
    records = []
    for _ in range(steps):
        record = trainer.update(trainer.stream.next_batch(), StopRequest())[0]
        records.append({key: record[key] for key in FIGURES if key in record})
    trainer.norm = norm  # type: ignore[method-assign]
    assert not unequal_copies(trainer.state())
    return {
        "records": records,
        "gradients": gradients,
        "state": dict(tree(trainer.state()).nodes),
        "redone": trainer.redone,
    }


def differences(many: dict[str, Any], one: dict[str, Any], figures: Sequence[str] = FIGURES) -> list[Any]:
    """Where two outcomes differ in a bit: signs of zeros count."""
    found: list[Any] = [] if many["redone"] == one["redone"] else ["steps done again"]
    for step, (a, b) in enumerate(zip(many["records"], one["records"], strict=True)):
        found += [(step, key, a[key], b[key]) for key in figures if key in b and a[key] != b[key]]
        ours, theirs = (outcome["gradients"][step] for outcome in (one, many))
        found += [(step, "gradient", name) for name in ours.keys() | theirs if ours.get(name) != theirs.get(name)]
    ours, theirs = one["state"], many["state"]
    return found + [name for name in ours.keys() | theirs if ours.get(name) != theirs.get(name)]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Of one shape, type, and the same bytes."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return torch.equal(*(x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)))
