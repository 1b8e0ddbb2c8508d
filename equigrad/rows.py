"""From a schedule's rows to tensors on the device. Both training and evaluation feed the model through here."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from equigrad.config.model import Model
from equigrad.data.samples import Sample, SampleRef
from equigrad.data.stream import Stream
from equigrad.models.decoder import Ahead
from equigrad.models.specs import token_flops
from equigrad.numerics.row import Row
from equigrad.parallel.world import World
from equigrad.schedule.packing import Schedule, plan


@dataclass(frozen=True)
class RowTensors:
    """The tokens of a row, in the order of its segments.

    ids:    [own tokens] int64
    labels: [n] int64, those of them that are in the loss
    at:     [n] int64, the own tokens that predict them; None where that is all
    ahead:  for each module for multi-token prediction
    """

    row: Row
    ids: Tensor
    labels: Tensor
    at: Tensor | None
    ahead: tuple[Ahead, ...] = ()


def further_loss_tokens(stream: Stream, samples: Sequence[SampleRef], depth: int) -> int:
    """How many labels of the samples are ``depth`` places further than some token of theirs: the normaliser of what a
    module for multi-token prediction has to say of them."""
    whole = sum(max(s.length - depth, 0) for s in samples if s.loss_tokens == s.length)
    return whole + sum(int(stream.read(s).loss[depth:].sum()) for s in samples if s.loss_tokens != s.length)


def schedule_samples(
    samples: Sequence[SampleRef], model: Model, lanes: int, row_tokens: int, packing: str = "best_fit"
) -> Schedule:
    """The schedule of these samples, balanced by the operations each of them costs."""
    lengths = [s.length for s in samples]
    flops = token_flops(model)
    cost = {n: n * flops((n + 1) / 2) for n in set(lengths)}
    return plan(lengths, [cost[n] for n in lengths], lanes, row_tokens, packing)  # type: ignore[arg-type]


def row_tensors(stream: Stream, samples: Sequence[SampleRef], world: World, further: int = 0) -> RowTensors:
    """Read the samples of one row, and keep what is this rank's; without samples the row is empty. ``further``: for so
    many modules for multi-token prediction."""
    read, device, layout = [stream.read(ref) for ref in samples], world.device, world.layout
    lengths = [s.length for s in samples]
    axes = world.axis("cp"), world.axis("tp"), world.axis("ep")
    row = Row.of(lengths, device, *axes, layout.zigzag, layout.cp_strategy)

    def own(parts: Sequence[np.ndarray]) -> Tensor:
        whole = torch.from_numpy(np.concatenate(parts) if parts else np.zeros(0, np.int64))
        return whole if row.context is None else row.context.take(whole)

    ids, labels, loss = (own([s.streams[name] for s in read]) for name in ("ids", "labels", "loss"))
    at, ahead = None, []
    if not bool(loss.all()):
        at = loss.bool().nonzero().squeeze(1)
        labels, at = labels[at].to(device), at.to(device)
    for depth in range(1, further + 1):
        streams = [_further(sample, depth) for sample in read]
        tokens, targets, wanted = (own([s[part] for s in streams]) for part in range(3))
        where = wanted.bool().nonzero().squeeze(1)
        ahead.append(Ahead(tokens.to(device), targets[where].to(device), where.to(device)))
    return RowTensors(row, ids.to(device), labels.to(device), at, tuple(ahead))


def _further(sample: Sample, depth: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The tokens ``depth`` places further than a sample's, the labels of those, and which of these are to be predicted.

    Made of the whole sample, before ranks divide it. At the end, where there is no token so far ahead, it is the last:
    no label is predicted from there, and no token that predicts one sees it.

    Worked example: of tokens a b c with the labels b c d, one place further are b c d, with the labels c d and none.
    """
    text = np.append(sample.ids, sample.labels[-1:])
    at = np.arange(len(sample)) + depth
    inside = np.minimum(at, len(sample) - 1)
    return text[np.minimum(at, len(sample))], sample.labels[inside], sample.loss[inside] & (at < len(sample))
