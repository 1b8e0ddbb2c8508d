"""From a schedule's rows to tensors on the device. Both training and evaluation feed the model through here."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from equigrad.data.samples import SampleRef
from equigrad.data.stream import Stream
from equigrad.numerics.row import Row
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
    read, device, layout = [stream.read(ref) for ref in samples], world.device, world.layout
    lengths = [s.length for s in samples]
    axes = world.axis("cp"), world.axis("tp"), world.axis("ep")
    row = Row.of(lengths, device, *axes, layout.zigzag, layout.cp_strategy)

    def own(name: str) -> Tensor:
        parts = [s.streams[name] for s in read]
        whole = torch.from_numpy(np.concatenate(parts) if parts else np.zeros(0, np.int64))
        return whole if row.context is None else row.context.take(whole)

    ids, labels, loss = own("ids"), own("labels"), own("loss").bool()
    if bool(loss.all()):
        return RowTensors(row, ids.to(device), labels.to(device), None)
    at = loss.nonzero().squeeze(1)
    return RowTensors(row, ids.to(device), labels[at].to(device), at.to(device))
