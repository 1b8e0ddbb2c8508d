"""Held-out loss: token-weighted, counted once over all ranks, in nats per token and bits per byte."""

import math
from dataclasses import asdict, dataclass

import torch

from equigrad.config import Job
from equigrad.data.stream import HeldOut, Stream
from equigrad.models.decoder import Decoder
from equigrad.parallel.world import World
from equigrad.rows import row_tensors, schedule_samples


@dataclass(frozen=True)
class Evaluation:
    """``loss``: mean nats per token in the loss. ``bits_per_byte``: all bits over the UTF-8 bytes of the text."""

    loss: float
    bits_per_byte: float
    perplexity: float
    tokens: int
    bytes: int

    def record(self) -> dict[str, float]:
        """With the names that metrics and summaries use."""
        names = {
            "loss": "held_out_loss",
            "bits_per_byte": "held_out_bits_per_byte",
            "perplexity": "held_out_perplexity",
        }
        return {names.get(k, k): v for k, v in asdict(self).items()}


@torch.no_grad()
def evaluate(model: Decoder, stream: Stream, held_out: HeldOut, job: Job, world: World) -> Evaluation:
    """Every rank runs the same number of rounds, with empty rows where samples run out."""
    samples, text_bytes = held_out.samples, held_out.bytes
    schedule = schedule_samples(samples, job.model, world.lanes, job.batch.row_tokens)
    total, tokens = 0.0, 0
    for row in schedule.lane(world.lane):
        batch = row_tensors(stream, [samples[i] for i in row], world)
        losses = model(batch.ids, batch.row, batch.labels, batch.at)
        if world.counts:
            total += float(losses.double().sum())
            tokens += len(batch.labels)
    total, count = world.sum([total, float(tokens)])
    tokens = int(count)
    loss = total / tokens
    bits = total / math.log(2) / text_bytes if text_bytes else math.nan
    return Evaluation(loss, bits, math.exp(min(loss, 700.0)), tokens, text_bytes)
