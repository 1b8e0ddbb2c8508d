"""Engines and requests for tests."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from equigrad.models.decoder import Decoder
from equigrad.numerics.row import Row
from equigrad.rl.engine.embedded import EmbeddedEngine, Limits
from equigrad.rl.engine.protocol import Completion, Request, Tokens, never

PROMPTS = [(5, 6, 7), (1,), (9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 11, 12), (30, 31), (7,) * 9, (2, 4)]


class Counted:
    """A model that counts the tokens it is given."""

    def __init__(self, model: Decoder) -> None:
        self._model, self.rows = model, list[int]()
        self.config, self.ops, self.device = model.config, model.ops, model.device

    def __call__(self, ids: Tensor, row: Row, *, at: Tensor | None = None) -> Tensor:
        self.rows.append(len(ids))
        return self._model(ids, row, at=at)


def engine(model: Any, slots: int = 3, capacity: int = 64, prefill_tokens: int = 8192, **more: Any) -> EmbeddedEngine:
    """With weights of version 1."""
    weights = dict(getattr(model, "_model", model).named_parameters())
    return EmbeddedEngine(model, Limits(slots, capacity, prefill_tokens), weights, 1, **more)


def requests(most: int = 12, prompts: Sequence[tuple[int, ...]] = PROMPTS, **more: Any) -> list[Request]:
    """One for each prompt, each with a seed and a limit of its own."""
    return [
        Request(str(n), prompt, most - n % 3, 1, seed=n, **more)  # so they end at different times
        for n, prompt in enumerate(prompts)
    ]


def served(
    engine: EmbeddedEngine, given: Sequence[Request], stopping: Callable[[], bool] = never
) -> dict[str, Completion]:
    """Completions by their ids, of which there is one for each request."""
    found = list(engine.generate(given, stopping))
    assert sorted(c.id for c in found) == sorted(r.id for r in given)
    return {completion.id: completion for completion in found}


def losses(model: Decoder, texts: Sequence[Request], completions: dict[str, Completion]) -> list[Tensor]:
    """Cross-entropies of the completions' tokens in a training forward, all texts in one row. One temperature."""
    whole = [(*r.prompt, *completions[r.id].tokens.ids) for r in texts]
    row = Row.of([len(ids) - 1 for ids in whole])
    ids, labels = (
        torch.tensor([token for text in whole for token in text[cut]]) for cut in (slice(-1), slice(1, None))
    )
    of_rows = model(ids, row, labels, temperature=texts[0].temperature)
    assert isinstance(of_rows, Tensor)
    each = of_rows.split(list(row.lengths))
    return [loss[len(r.prompt) - 1 :] for r, loss in zip(texts, each, strict=True)]


def float32(numbers: Sequence[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


def interrupted(
    engine: EmbeddedEngine, given: Sequence[Request], every: int, version: int = 1
) -> dict[str, Completion]:
    """As ``served``, but in calls that are stopped after so many steps and begun again."""
    waiting, found = list(given), dict[str, Completion]()
    while waiting:
        calls = iter(range(every + 1))
        completions = served(engine, waiting, lambda calls=calls: next(calls) == every)  # type: ignore[misc]
        found |= completions
        left = [request for request in waiting if completions[request.id].finish is None]
        waiting = [completions[r.id].continued(replace(r, begun=Tokens()), version) for r in left]
    return found
