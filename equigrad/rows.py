"""From a schedule's rows to tensors on the device. Both training and evaluation feed the model through here."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from equigrad.config.model import Model
from equigrad.data.microbatch import MicroBatch, micro_batch
from equigrad.data.samples import SampleRef
from equigrad.data.stream import Stream
from equigrad.models.specs import token_flops
from equigrad.numerics.row import Row, row_partition
from equigrad.parallel.world import World
from equigrad.schedule.packing import Schedule, plan


@dataclass(frozen=True)
class RowTensors:
    """The tokens of a row, in the order of its segments.

    ids:    [own tokens] int64
    labels: [n] int64, those of them that are in the loss
    at:     [n] int64, the own tokens that predict them; None where that is all
    """

    row: Row
    ids: Tensor
    labels: Tensor
    at: Tensor | None


def schedule_samples(
    samples: Sequence[SampleRef], model: Model, lanes: int, row_tokens: int, packing: str = "best_fit"
) -> Schedule:
    """The schedule of these samples, balanced by the operations each of them costs."""
    lengths = [s.length for s in samples]
    flops = token_flops(model)
    cost = {n: n * flops((n + 1) / 2) for n in set(lengths)}
    return plan(lengths, [cost[n] for n in lengths], lanes, row_tokens, packing)  # type: ignore[arg-type]


def row_tensors(stream: Stream, samples: Sequence[SampleRef], world: World) -> RowTensors:
    """Read the samples of one row, and keep what is this rank's; without samples the row is empty."""
    read, context = [stream.read(ref) for ref in samples], world.axis("cp")
    partition = row_partition(sum(map(len, read)), context.size, world.layout.zigzag)
    return to_tensors(micro_batch(read, partition, context.rank), world)


def to_tensors(part: MicroBatch, world: World) -> RowTensors:
    """What this rank was given of a row, on its device."""
    device, layout = world.device, world.layout
    axes = world.axis("cp"), world.axis("tp"), world.axis("ep")
    row = Row.of(part.lengths, device, *axes, layout.zigzag, layout.cp_strategy)
    empty = np.zeros(0, np.int64)
    ids, labels, loss = (torch.from_numpy(part.streams.get(name, empty)) for name in ("ids", "labels", "loss"))
    if bool(loss.all()):
        return RowTensors(row, ids.to(device), labels.to(device), None)
    at = loss.nonzero().squeeze(1)
    return RowTensors(row, ids.to(device), labels[at].to(device), at.to(device))
