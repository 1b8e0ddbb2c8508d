"""The samples of a step that did not come from a source of data, with what is known of their tokens."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from equigrad.data.samples import Sample, SampleRef
from equigrad.data.stream import Batch
from equigrad.rl.rollouts import Rollout, Segment


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples, what a schedule needs to know of each, and who reads them."""

    samples: tuple[Sample, ...]
    refs: tuple[SampleRef, ...]

    def read(self, ref: SampleRef) -> Sample:
        return self.samples[ref.document]

    def batch(self, step: int) -> Batch:
        """All of them as a step."""
        tokens, labels = (sum(getattr(ref, name) for ref in self.refs) for name in ("length", "loss_tokens"))
        return Batch(step, self.refs, tokens, labels, self._digest())

    def reading(self, streams: Iterable[str]) -> "Samples":
        """The same, each with all of these streams; what is not known of a sample is 0."""
        names = sorted({*streams, "ids", "labels", "loss"})
        whole = [Sample({n: s.streams.get(n, np.zeros(len(s))) for n in names}) for s in self.samples]
        return Samples(tuple(whole), self.refs)

    def _digest(self) -> str:
        found = hashlib.sha256()
        for sample in self.samples:
            for name, stream in sorted(sample.streams.items()):
                found.update(f"{name} {len(stream)} {stream.dtype.str} ".encode())
                found.update(np.ascontiguousarray(stream).data)
        return found.hexdigest()


def known(sample: Sample, streams: Mapping[str, np.ndarray | float]) -> Sample:
    """A sample with further streams, float64. Of tokens that are in no loss they are 0, whatever they were."""
    with np.errstate(invalid="ignore"):
        cleared = {name: np.where(sample.loss, stream, 0.0).astype(np.float64) for name, stream in streams.items()}
    return Sample({**sample.streams, **cleared})


def together(made: Sequence[tuple[Sample, int | None]]) -> Samples:
    """Samples with their groups."""
    refs = [SampleRef(0, i, 0, len(s), int(s.loss.sum()), group=group) for i, (s, group) in enumerate(made)]
    return Samples(tuple(sample for sample, _ in made), tuple(refs))


def plain(rollouts: Sequence[Rollout]) -> Samples:
    """A sample of each segment of each rollout that has a token to learn from: what a model is to be asked about."""
    groups: dict[str, int] = {}
    made = list[tuple[Sample, int | None]]()
    for rollout in rollouts:
        group = groups.setdefault(rollout.group, len(groups))
        made += [(of_segment(segment), group) for segment in rollout.segments if segment.learned.any()]
    return together(made)


def of_segment(segment: Segment) -> Sample:
    """Its tokens; those that are learned from are in the loss."""
    return Sample({"ids": segment.ids[:-1], "labels": segment.ids[1:], "loss": segment.learned})
