"""From a schedule's rows to tensors on the device. Both training and evaluation feed the model through here."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from equigrad.config.model import Model
from equigrad.data.samples import SampleRef
from equigrad.data.stream import Stream
from equigrad.models.specs import token_flops
from equigrad.numerics.row import Row
from equigrad.schedule.packing import Schedule, plan


@dataclass(frozen=True)
class RowTensors:
    """The tokens of a row, in the order of its segments.

    ids:    [T] int64
    labels: [n] int64, those that are in the loss
    at:     [n] int64, the tokens that predict them; None where n = T
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


def row_tensors(stream: Stream, samples: Sequence[SampleRef], device: torch.device) -> RowTensors:
    """Read the samples of one row; without samples the row is empty."""
    read = [stream.read(ref) for ref in samples]

    def joined(name: str) -> Tensor:
        parts = [s.streams[name] for s in read]
        return torch.from_numpy(np.concatenate(parts) if parts else np.zeros(0, np.int64))

    row, labels, loss = Row.of([s.length for s in samples], device), joined("labels"), joined("loss").bool()
    if bool(loss.all()):
        return RowTensors(row, joined("ids").to(device), labels.to(device), None)
    at = loss.nonzero().squeeze(1)
    return RowTensors(row, joined("ids").to(device), labels[at].to(device), at.to(device))
