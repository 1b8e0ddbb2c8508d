"""The samples of a step that did not come from a source of data, with what is known of their tokens."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from equigrad.data.samples import Sample, SampleRef
from equigrad.data.stream import Batch


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
    """Samples with their groups. All get the streams of all; what is not known of a sample is 0."""
    names = sorted({name for sample, _ in made for name in sample.streams})
    refs = [SampleRef(0, i, 0, len(s), int(s.loss.sum()), group=group) for i, (s, group) in enumerate(made)]
    return Samples(tuple(Sample({n: s.streams.get(n, np.zeros(len(s))) for n in names}) for s, _ in made), tuple(refs))
