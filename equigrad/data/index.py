"""The samples of one side (training or held out) of one source, by number. Knows no order and no other source."""

from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np

from equigrad.config.data import Source
from equigrad.data.samples import Sample, SampleRef
from equigrad.data.store import Store

_BLOCK = 4096  # spans counted at once


@dataclass(frozen=True)
class Stats:
    """What one side of a source holds, and what of it is not trained on. For reports."""

    source: str
    held_out: bool
    documents: int
    """All of this side, also the empty and the dropped ones."""
    empty: int
    """Documents without a byte in the loss: empty texts, chats in which the assistant says nothing."""
    dropped: int
    """Fine-tuning documents longer than the context, dropped by ``too_long = "drop"``."""
    left_out: int
    """Fine-tuning spans without a token in the loss."""
    samples: int
    tokens: int
    """Input tokens of the samples."""
    loss_tokens: int
    bytes: int
    """UTF-8 bytes the samples predict, once each."""


class _Columns(NamedTuple):
    """Arrays [m] of samples: see ``SampleRef``."""

    document: np.ndarray
    span: np.ndarray
    length: np.ndarray
    loss_tokens: np.ndarray


def is_held_out(document: Any, every: int) -> Any:
    """Whether a document (or each of an array), counted from 0, is the n-th, 2n-th, ... of its source; n = 0: never."""
    return document % every == every - 1 if every else document < 0


class Spans:
    """Every span of a store at one context, numbered through all documents."""

    def __init__(self, store: Store, context: int) -> None:
        self.store, self.context = store, context
        self.inputs = np.maximum(np.diff(store.offsets) - 1, 0)
        """Input tokens of each document, int64 [D]."""
        self.first = np.concatenate([[0], np.cumsum(-(-self.inputs // context))])
        """Number of each document's first span, int64 [D + 1]."""
        self.loss_tokens = None if store.loss is None else self._counts(store.loss)
        """Labels of each span that are in the loss, int64 [S]; None: all."""

    def _counts(self, loss: np.ndarray) -> np.ndarray:
        document = np.repeat(np.arange(len(self.inputs)), np.diff(self.first))
        span = np.arange(self.first[-1]) - self.first[document]
        # A span's labels begin one after its first input and reach to where the next span's begin, first tokens of
        # documents aside, and these are never in the loss.
        starts = self.store.offsets[document] + span * self.context + 1
        borders = np.append(starts, len(loss))
        counts = np.empty_like(starts)
        for i in range(0, len(starts), _BLOCK):  # in blocks, since numpy widens all that it sums at once
            block = starts[i : i + _BLOCK]
            labels = loss[block[0] : borders[i + len(block)]]
            counts[i : i + _BLOCK] = np.add.reduceat(labels, block - block[0], dtype=np.int64)
        return counts

    def columns(self, spans: np.ndarray) -> _Columns:
        """What the spans of the given numbers are."""
        document = np.searchsorted(self.first, spans, "right") - 1
        span = spans - self.first[document]
        length = np.minimum(self.inputs[document] - span * self.context, self.context)
        return _Columns(document, span, length, length if self.loss_tokens is None else self.loss_tokens[spans])

    def read(self, ref: SampleRef) -> Sample:
        """The tokens of a sample."""
        start = int(self.store.offsets[ref.document]) + ref.span * self.context
        tokens = self.store.tokens[start : start + ref.length + 1].astype(np.int64)
        if self.store.loss is None:
            loss = np.ones(ref.length, bool)
        else:
            loss = self.store.loss[start + 1 : start + ref.length + 1].astype(bool)
        return Sample({"ids": tokens[:-1], "labels": tokens[1:], "loss": loss})


class SampleSet:
    """The samples of some documents of a source, numbered from 0 in file order: their spans that have a loss."""

    def __init__(
        self, spans: Spans, members: np.ndarray, source: Source, number: int, *, held_out: bool, drop_long: bool
    ) -> None:
        """``members`` (bool [D]) says which documents; ``drop_long`` leaves out fine-tuning ones over the context."""
        self._spans, self._number, self._modality = spans, number, source.modality
        if not drop_long or spans.loss_tokens is None:
            dropped = np.zeros_like(members)
        else:
            dropped = members & (spans.inputs > spans.context)
        all_spans = np.flatnonzero(np.repeat(members & ~dropped, np.diff(spans.first)))
        learned = slice(None) if spans.loss_tokens is None else spans.loss_tokens[all_spans] > 0
        self._numbers = all_spans[learned]
        columns = spans.columns(self._numbers)
        sizes = spans.store.bytes
        self.stats = Stats(
            source=source.path,
            held_out=held_out,
            documents=int(members.sum()),
            empty=int((sizes[members] == 0).sum()),
            dropped=int(dropped.sum()),
            left_out=len(all_spans) - len(self),
            samples=len(self),
            tokens=int(columns.length.sum()),
            loss_tokens=int(columns.loss_tokens.sum()),
            bytes=int(sizes[members & ~dropped].sum()),
        )

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def digest(self) -> str:
        """SHA-256 of the source's tokens, those of the other side included."""
        return self._spans.store.digest

    def refs(self, samples: np.ndarray) -> list[SampleRef]:
        """The samples of the given numbers, int64 [m]."""
        columns = self._spans.columns(self._numbers[samples])
        known = (column.tolist() for column in columns)
        return list(map(SampleRef, repeat(self._number), *known, repeat(self._modality)))

    def documents_within(self, tokens: int) -> tuple[int, int]:
        """How many samples the leading documents have that together hold at most ``tokens`` inputs, and the bytes these
        predict. At least one document, whatever its length."""
        document, _, length, _ = self._spans.columns(self._numbers)
        ends = np.flatnonzero(np.diff(document, append=-1)) + 1  # one after each document's last sample
        count = max(1, int(np.searchsorted(np.cumsum(length)[ends - 1], tokens, "right")))
        return int(ends[count - 1]), int(self._spans.store.bytes[document[ends[:count] - 1]].sum())
