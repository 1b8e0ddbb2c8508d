"""What every other room calls a sample. Knows nothing of where tokens come from or who computes them.

A document is the token sequence s = [BOS, t1, ..., tn], then EOS if the job asks for it. Its inputs are s[:-1] and its
labels s[1:]. With a context of C, span k is inputs[k*C : (k+1)*C] with the labels at the same places: positions restart
in each span, the last label of a span is the first input of the next, and every token is a label exactly once.

Worked example: "abcd" as bytes with EOS (256 begins and ends a text) and a context of 3:

    s       256  97  98  99 100 256
    span 0  ids  256  97  98     labels  97  98  99
    span 1  ids   99 100         labels 100 256
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np


class SampleRef(NamedTuple):
    """What a schedule needs to know of a sample without reading its tokens.

    Span 1 of the example above, were it document 7 of the first source, is
    ``SampleRef(source=0, document=7, span=1, length=2, loss_tokens=2)``.
    """

    source: int
    """Index into ``data.sources`` followed by ``data.held_out_sources``."""
    document: int
    """Index of the document in its source, held-out documents included."""
    span: int
    """Which span of the document."""
    length: int
    """Input tokens, at least 1."""
    loss_tokens: int
    """Labels that are in the loss, at least 1."""
    modality: str = "text"
    """What kind of tokens they are: ``modality`` of the source. A round of rows has one."""
    group: int | None = None
    """Samples of one modality with the same number belong together, and share a row where they fit: the answers to one
    prompt, say. For those who make samples themselves; those of a source are each alone."""


@dataclass(frozen=True, eq=False)
class Sample:
    """Tokens and per-token streams, all of shape [length]; raises ``ValueError`` where a stream has another shape.

    Always there: ``ids`` and ``labels`` (int64), and ``loss`` (bool: whether the label is in the loss). Objectives
    add streams of their own (weights, log-probs, advantages) under their own names.
    """

    streams: Mapping[str, np.ndarray]

    def __post_init__(self) -> None:
        shapes = {name: stream.shape for name, stream in self.streams.items()}
        if any(shape != (len(self),) for shape in shapes.values()):
            raise ValueError(f"the streams of a sample must share one length, but their shapes are {shapes}")

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def ids(self) -> np.ndarray:
        """Input tokens, int64 [length]."""
        return self.streams["ids"]

    @property
    def labels(self) -> np.ndarray:
        """The token that follows each input, int64 [length]."""
        return self.streams["labels"]

    @property
    def loss(self) -> np.ndarray:
        """Whether each label is in the loss, bool [length]."""
        return self.streams["loss"]


class Reader(Protocol):
    """Whoever has the tokens of samples."""

    def read(self, ref: SampleRef) -> Sample: ...
