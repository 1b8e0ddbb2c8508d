"""From a schedule's rows to tensors on the device. Both training and evaluation feed the model through here."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from equigrad.data.microbatch import MicroBatch, micro_batch
from equigrad.data.samples import SampleRef
from equigrad.data.stream import Stream
from equigrad.numerics.row import Row
from equigrad.parallel.partition import Partition
from equigrad.parallel.world import World


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


def row_tensors(stream: Stream, samples: Sequence[SampleRef], world: World) -> RowTensors:
    """Read the samples of one row, and keep what is this rank's; without samples the row is empty."""
    read, context = [stream.read(ref) for ref in samples], world.axis("cp")
    partition = Partition.of_row(sum(map(len, read)), context.size, world.layout.zigzag)
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
