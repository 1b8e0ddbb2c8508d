"""The embedded engine in exact numerics: bit by bit, its log-probabilities are those of the training forward, however
either was divided, and nothing but prompt, seed and weights decides what a request gets."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from equigrad.execution import WholeModel
from equigrad.models.decoder import Decoder
from equigrad.numerics.row import Row
from equigrad.rl.engine.embedded import EmbeddedEngine, Limits
from equigrad.rl.engine.protocol import Completion
from tests.exact_runs import EXACT, same_bits
from tests.jobs import make_trainer
from tests.parallel.outcomes import SPARSE, layout_job
from tests.parallel.test_layouts import ADAPTED, RECURRENT, SINKS
from tests.rl.engine.given import engine, float32, interrupted, losses, requests, served
from tests.workers import Workers

# Large weights: the probabilities are far from equal.
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"model__initializer_range": 0.2},
    "experts": SPARSE | {"model__initializer_range": 0.2},
    "windows and sinks": SINKS,
    "recurrent": RECURRENT,
    "adapted": ADAPTED | {"model__initializer_range": 0.2},
}


def model_of(changes: dict[str, Any], folder: Path) -> Decoder:
    model = make_trainer(layout_job({}, **changes, **EXACT), folder).model
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B.weight"):  # it starts at nothing
                parameter += torch.linspace(-0.1, 0.1, parameter.numel(), dtype=parameter.dtype).view_as(parameter)
    return model


@pytest.mark.parametrize("model", MODELS)
def test_log_probabilities_are_the_training_forward_s_byte_for_byte(model: str, tmp_path: Path) -> None:
    decoder = model_of(MODELS[model], tmp_path)
    for temperature in (0.7, 1.0, 1.3):
        given = requests(14, temperature=temperature)
        found = served(engine(decoder), given)
        # All in one row, each alone, and in rows of two: with gradients and without.
        for size in (len(given), 1, 2):
            for first in range(0, len(given), size):
                texts = given[first : first + size]
                with torch.set_grad_enabled(size == 2):
                    for request, loss in zip(texts, losses(decoder, texts, found), strict=True):
                        assert same_bits(float32(found[request.id].tokens.log_probs), -loss.detach())


@pytest.mark.parametrize("model", ["experts", "windows and sinks", "recurrent"])
def test_neighbours_slots_arrival_and_interruptions_change_no_bit(model: str, tmp_path: Path) -> None:
    decoder = model_of(MODELS[model], tmp_path)
    given = requests(9, temperature=0.9, top_p=0.9, top_k=40)
    expected = served(engine(decoder), given)
    assert served(engine(decoder, 1), given) == expected
    assert served(engine(decoder, 4, prefill_tokens=1), given[::-1]) == expected
    assert served(engine(decoder), given[2:3]) == {"2": expected["2"]}
    assert interrupted(engine(decoder), given, 2) == expected


LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("dense", {"tp": 2}),
    ("windows and sinks", {"tp": 2}),
    ("recurrent", {"tp": 2}),
    ("experts", {"tp": 2}),
    ("experts", {"dp_shard": 2, "ep": 2}),
    ("dense", {"pp": 2}),
]


@pytest.mark.parametrize(("model", "layout"), LAYOUTS, ids=str)
def test_a_divided_model_draws_the_same_with_the_same_bits(
    model: str, layout: dict[str, Any], workers: Callable[[int], Workers], tmp_path: Path
) -> None:
    expected = on_ranks({}, MODELS[model], tmp_path)
    for found in workers(2).run(on_ranks, layout, MODELS[model], tmp_path):
        assert found == expected


def on_ranks(layout: dict[str, Any], changes: dict[str, Any], folder: Path) -> dict[str, Completion]:
    """What requests get on this rank, which is what a training forward on the same ranks says."""
    trainer = make_trainer(layout_job(layout, **changes, **EXACT), folder)
    world = trainer.world
    model: Any = WholeModel(world, trainer.parts)
    given = requests(6, temperature=0.8)
    one = EmbeddedEngine(model, Limits(3, 48), {}, 1, world.axis("tp"), world.axis("ep"))
    found = served(one, given)
    if layout.get("tp", 1) > 1 or not layout:
        check_against_training(trainer.model, given, found, world)
    return found


def check_against_training(model: Decoder, given: Any, found: dict[str, Completion], world: Any) -> None:
    """The vocabulary and the tokens of the residual stream are divided over the tensor ranks."""
    for request in given:
        ids = torch.tensor([*request.prompt, *found[request.id].tokens.ids])
        row, at = Row.of([len(ids) - 1], tensor=world.axis("tp")), torch.arange(len(request.prompt) - 1, len(ids) - 1)
        loss = model(ids[:-1], row, ids[at + 1], at, temperature=request.temperature)
        assert same_bits(float32(found[request.id].tokens.log_probs), -loss.detach())
