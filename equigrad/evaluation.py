"""Held-out loss: token-weighted, counted once over all ranks, in nats per token and bits per byte."""

import math
from dataclasses import asdict, dataclass
from typing import Protocol

from equigrad.config import Job
from equigrad.data.samples import Reader
from equigrad.data.stream import HeldOut
from equigrad.execution import Execution
from equigrad.parallel.ranks import SharedUserError
from equigrad.parallel.stop import StopRequest
from equigrad.parallel.world import World
from equigrad.schedule.division import schedule_samples

_ROUNDS_PER_STAGE = 8
"""Rounds after which ranks ask each other whether to stop, for each rank of a pipeline, which runs empty then; its rows
are in memory together."""


@dataclass(frozen=True)
class Evaluation:
    """``loss``: mean nats per token in the loss. ``bits_per_byte``: all bits over the UTF-8 bytes of the text."""

    loss: float
    bits_per_byte: float
    perplexity: float
    tokens: int
    bytes: int

    def record(self) -> dict[str, float]:
        """With the names that metrics use."""
        names = {
            "loss": "held_out_loss",
            "bits_per_byte": "held_out_bits_per_byte",
            "perplexity": "held_out_perplexity",
        }
        return {names.get(k, k): v for k, v in asdict(self).items()}

    def summary(self) -> dict[str, float]:
        """With the names that summaries use."""
        found = {name: value for name, value in self.record().items() if name.startswith("held_out")}
        return found | {"held_out_tokens": self.tokens, "held_out_bytes": self.bytes}


class HeldOutResult(Protocol):
    """What a trainer's evaluation gives."""

    def record(self) -> dict[str, float]:
        """With the names that metrics use."""
        ...

    def summary(self) -> dict[str, float]:
        """With the names that summaries use."""
        ...


class Stopped(Exception):
    """What is no step, such as an evaluation, ended early on all ranks, because some rank was asked to stop."""


def evaluate(
    execution: Execution,
    stream: Reader,
    held_out: HeldOut,
    job: Job,
    world: World,
    stop: StopRequest | None = None,
) -> Evaluation:
    """Every rank runs the same number of rounds, with empty rows where samples run out.

    Raises on every rank, before any work, where ranks disagree about it or no token is in the loss; ``Stopped`` soon
    after any rank was asked to ``stop``.
    """
    samples, text_bytes, tokens = held_out.samples, held_out.bytes, held_out.loss_tokens
    schedule = schedule_samples(samples, job.model, world.lanes, job.batch.row_tokens, job.batch.packing)
    facts = {"schedule": {"samples": samples, "rounds": schedule.rounds}, "normaliser": [tokens, text_bytes]}
    world.agree(facts, "the evaluation")
    if not tokens:
        raise SharedUserError(
            f"the held-out set has no token in the loss: {len(samples)} samples, {held_out.tokens} tokens; there is"
            " nothing to divide its loss by"
        )
    own, at_once = 0.0, _ROUNDS_PER_STAGE * world.axis("pp").size
    for first in range(0, len(schedule.rounds), at_once):
        if world.sum([float(stop is not None and stop.asked)])[0]:
            raise Stopped
        own += execution.evaluate(stream, samples, schedule.part(first, first + at_once)).loss
    (total,) = world.sum([own])
    loss = total / tokens
    bits = total / math.log(2) / text_bytes if text_bytes else math.nan
    return Evaluation(loss, bits, math.exp(min(loss, 700.0)), tokens, text_bytes)
