"""From a schedule's rows to tensors on the device. Both training and evaluation feed the model through here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from equigrad.data.microbatch import MicroBatch, micro_batch
from equigrad.data.samples import Reader, Sample, SampleRef
from equigrad.models.decoder import Ahead
from equigrad.numerics.row import Row
from equigrad.parallel.partition import Partition
from equigrad.parallel.world import World


@dataclass(frozen=True)
class RowTensors:
    """The tokens of a row, in the order of its segments.

    ids:    [own tokens] int64
    labels: [n] int64, those of them that are in the loss
    at:     [n] int64, the own tokens that predict them; None where that is all
    ahead:  for each module for multi-token prediction
    known:  by name, what is known of the labels, [n] float64
    """

    row: Row
    ids: Tensor
    labels: Tensor
    at: Tensor | None
    ahead: tuple[Ahead, ...] = ()
    known: Mapping[str, Tensor] = field(default_factory=dict)


def further_loss_tokens(stream: Reader, samples: Sequence[SampleRef], depth: int) -> int:
    """How many labels of the samples are ``depth`` places further than some token of theirs: the normaliser of what a
    module for multi-token prediction has to say of them."""
    whole = sum(max(s.length - depth, 0) for s in samples if s.loss_tokens == s.length)
    return whole + sum(int(stream.read(s).loss[depth:].sum()) for s in samples if s.loss_tokens != s.length)


def row_tensors(
    stream: Reader, samples: Sequence[SampleRef], world: World, further: int = 0, known: Sequence[str] = ()
) -> RowTensors:
    """Read the samples of one row, and keep what is this rank's; without samples the row is empty. ``further``: for so
    many modules for multi-token prediction; ``known``: streams that an objective reads."""
    read, context = [_with_further(stream.read(ref), further) for ref in samples], world.axis("cp")
    partition = Partition.of_row(sum(map(len, read)), context.size, world.layout.zigzag)
    return to_tensors(micro_batch(read, partition, context.rank), world, further, known)


def to_tensors(part: MicroBatch, world: World, further: int = 0, known: Sequence[str] = ()) -> RowTensors:
    """What this rank was given of a row, on its device."""
    device, layout = world.device, world.layout
    axes = world.axis("cp"), world.axis("tp"), world.axis("ep")
    row = Row.of(part.lengths, device, *axes, layout.zigzag, layout.cp_strategy)

    def own(name: str) -> Tensor:
        return torch.from_numpy(part.streams.get(name, np.zeros(0, np.int64)))

    ids, labels, loss = own("ids"), own("labels"), own("loss")
    streams = {name: own(name).double() for name in known}
    at, ahead = None, []
    if not bool(loss.all()):
        at = loss.bool().nonzero().squeeze(1)
        labels, streams = labels[at], {name: stream[at] for name, stream in streams.items()}
        at = at.to(device)
    for depth in range(1, further + 1):
        where = own(f"loss+{depth}").bool().nonzero().squeeze(1)
        targets = own(f"labels+{depth}")[where]
        ahead.append(Ahead(own(f"ids+{depth}").to(device), targets.to(device), where.to(device)))
    streams = {name: stream.to(device) for name, stream in streams.items()}
    return RowTensors(row, ids.to(device), labels.to(device), at, tuple(ahead), streams)


def _with_further(sample: Sample, depth: int) -> Sample:
    """The sample with streams of tokens that are 1 to ``depth`` places further, made before ranks divide it."""
    streams = dict(sample.streams)
    for places in range(1, depth + 1):
        further = _further(sample, places)
        streams |= {f"{name}+{places}": s for name, s in zip(("ids", "labels", "loss"), further, strict=True)}
    return Sample(streams)


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
