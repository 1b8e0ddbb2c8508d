"""The order of samples: mixture, epochs and steps, with a cursor that resumes exactly.

Every rank computes the same stream from the configuration alone. Nothing here knows how many ranks there are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from equigrad.config.data import BatchConfig, Data
from equigrad.data.index import SampleSet, Spans, Stats, is_held_out
from equigrad.data.samples import Sample, SampleRef
from equigrad.data.shuffle import Permutation
from equigrad.data.store import OnProgress, cache_folder, open_store
from equigrad.data.tokenizers import Tokenizer
from equigrad.errors import UserError

_BLOCK = 4096  # samples looked up at once


@dataclass(frozen=True)
class Batch:
    """The samples of one step, over all ranks."""

    step: int
    """Counted from 1."""
    samples: tuple[SampleRef, ...]
    tokens: int
    """Input tokens."""
    loss_tokens: int
    """Labels in the loss: the step's normaliser."""
    contents: str = ""
    """SHA-256 of the samples, where ranks have not read them from the same files."""
    temperature: float = 1.0
    """Logits are divided by it."""
    facts: Mapping[str, float] = field(default_factory=dict)
    """What the step's record says of the samples besides."""


@dataclass(frozen=True)
class HeldOut:
    """Held-out samples, in file order."""

    samples: tuple[SampleRef, ...]
    tokens: int
    loss_tokens: int
    bytes: int
    """UTF-8 bytes the samples predict, once each: what bits per byte divide by."""


class Batches(Protocol):
    """Where a trainer's steps come from. Every rank has an equal one."""

    def next_batch(self) -> Batch:
        """The samples of the next step."""
        ...

    def read(self, ref: SampleRef) -> Sample:
        """The tokens of a sample of that step, or of a held-out one."""
        ...

    def held_out(self, max_tokens: int | None = None) -> HeldOut:
        """The samples of an evaluation."""
        ...

    def cursor(self) -> dict[str, Any]:
        """Where it stands, as JSON values; among them ``sources``, one for each source of text."""
        ...

    def seek(self, cursor: dict[str, Any]) -> None:
        """Stand where ``cursor`` was taken. Raises ``UserError`` where what follows would not be the same as then."""
        ...

    @property
    def digests(self) -> Sequence[tuple[str, str]]:
        """Path and SHA-256 of the tokens of each source."""
        ...

    def close(self) -> None:
        """Nothing is wanted of it any more."""
        ...


class Stream:
    """All samples of a job: training batches one after another without end, and the held-out samples."""

    def __init__(
        self, data: Data, batch: BatchConfig, seed: int, tokenizer: Tokenizer, progress: OnProgress | None = None
    ) -> None:
        """Tokenise what the cache lacks, index it, and stand before step 1.

        Raises ``UserError`` for what is wrong with the data, for a source without training samples, and for documents
        that are held out of which none has a token in the loss.
        """
        self._batch = batch
        self._step = 0
        self._spans: list[Spans] = []
        self._feeds: list[_Feed] = []
        self._held_out: list[SampleSet] = []
        for number, source in enumerate([*data.sources, *data.held_out_sources]):
            store = open_store(source, tokenizer, data.append_eos, cache_folder(data.cache), progress)
            spans = Spans(store, data.context)
            documents = np.arange(len(store.bytes))
            every = data.held_out_every if number < len(data.sources) else 1
            out, drop = is_held_out(documents, every), data.too_long == "drop"
            self._spans.append(spans)
            self._held_out.append(SampleSet(spans, out, source, number, held_out=True, drop_long=drop))
            if number < len(data.sources):
                training = SampleSet(spans, ~out, source, number, held_out=False, drop_long=drop)
                self._feeds.append(_Feed(training, source.weight, (seed, number) if data.shuffle else None))
        if not any(map(len, self._held_out)) and any(side.stats.documents for side in self._held_out):
            raise UserError(_nothing_to_evaluate([side.stats for side in self._held_out]))
        # What decides the order besides the tokens themselves; a cursor is good only where all of it is the same.
        self._order = data.model_dump(include={"context", "held_out_every", "too_long", "shuffle"})
        self._order |= {"seed": seed, "weights": [source.weight for source in data.sources]}

    @property
    def stats(self) -> tuple[Stats, ...]:
        """Of each source's training side, then of each held-out side that has documents."""
        held_out = (side.stats for side in self._held_out if side.stats.documents)
        return (*(feed.samples.stats for feed in self._feeds), *held_out)

    @property
    def digests(self) -> list[tuple[str, str]]:
        """Path and SHA-256 of the tokens of each source, those of held-out sources included."""
        return [(side.stats.source, side.digest) for side in self._held_out]

    def next_batch(self) -> Batch:
        """The samples of the next step: in order while they fit the budget, at least one.

        Each comes from the source that has given the fewest tokens for its weight, so shares converge to the weights.
        A sample that does not fit begins the next step. A source at its end goes on with its next epoch.
        """
        taken: list[SampleRef] = []
        tokens = 0
        while True:
            feed = min(self._feeds, key=lambda f: f.tokens / f.weight)  # the first of equals
            ref = feed.peek()
            if taken and self._full(len(taken), tokens + ref.length):
                break
            taken.append(ref)
            tokens += ref.length
            feed.advance()
        self._step += 1
        return Batch(self._step, tuple(taken), tokens, sum(ref.loss_tokens for ref in taken))

    def _full(self, taken: int, tokens: int) -> bool:
        samples = self._batch.samples
        return taken >= samples if samples is not None else tokens > self._batch.budget

    def read(self, ref: SampleRef) -> Sample:
        """The tokens of a sample, training or held out."""
        return self._spans[ref.source].read(ref)

    def held_out(self, max_tokens: int | None = None) -> HeldOut:
        """The held-out samples, source after source.

        With ``max_tokens`` each source gives its share of them in whole documents, so that bytes stay exact, and at
        least one document.
        """
        sides = [side for side in self._held_out if len(side)]
        total = sum(side.stats.tokens for side in sides)
        refs, size = [], 0
        for side in sides:
            share = total if max_tokens is None else max_tokens * side.stats.tokens // total
            samples, predicted = side.documents_within(share)
            refs += side.refs(np.arange(samples))
            size += predicted
        return HeldOut(tuple(refs), sum(r.length for r in refs), sum(r.loss_tokens for r in refs), size)

    def cursor(self) -> dict[str, Any]:
        """Where the stream stands, as JSON values: the next batch after ``seek`` is the next batch here."""
        sources = [{"digest": f.samples.digest, "samples": f.drawn, "tokens": f.tokens} for f in self._feeds]
        return {"step": self._step, "order": self._order, "sources": sources}

    def seek(self, cursor: dict[str, Any]) -> None:
        """Stand where ``cursor`` was taken. Raises ``UserError`` where data or order are not the same as then."""
        order = {name: (cursor["order"].get(name), value) for name, value in self._order.items()}
        wrong = [f"{name} was {then} and is {now}" for name, (then, now) in order.items() if then != now]
        if len(cursor["sources"]) == len(self._feeds):
            wrong += [
                f"the tokens of {feed.samples.stats.source} are not the same"
                for feed, saved in zip(self._feeds, cursor["sources"], strict=True)
                if feed.samples.digest != saved["digest"]
            ]
        if wrong:
            raise UserError(f"the data is not what the run was trained on, so it cannot go on: {'; '.join(wrong)}")
        self._step = cursor["step"]
        for feed, saved in zip(self._feeds, cursor["sources"], strict=True):
            feed.drawn, feed.tokens = saved["samples"], saved["tokens"]

    def close(self) -> None:
        """Nothing is to be done."""


def _nothing_to_evaluate(sides: Sequence[Stats]) -> str:
    told = [
        f"{s.source}: {s.documents} documents held out, of these {s.empty} without text in the loss and {s.dropped}"
        " longer than the context"
        for s in sides
        if s.documents
    ]
    return (
        f"the held-out set has no token in the loss ({'; '.join(told)}); choose others with data.held_out_every and"
        " data.held_out_sources, or hold out none"
    )


class _Feed:
    """A source's training samples, epoch after epoch; ``drawn`` and ``tokens`` say where it stands."""

    def __init__(self, samples: SampleSet, weight: float, key: tuple[int, int] | None) -> None:
        """``key``: seed and source of the shuffle; None: file order."""
        if not len(samples):
            stats = samples.stats
            raise UserError(
                f"{stats.source} has no training samples: {stats.documents} of its documents are not held out, and of"
                f" these {stats.empty} have no text in the loss and {stats.dropped} are longer than the context"
            )
        self.samples, self.weight, self._key = samples, weight, key
        self.drawn = self.tokens = 0
        self._block: tuple[int, int] | None = None
        self._refs: list[SampleRef] = []

    def peek(self) -> SampleRef:
        """The next sample."""
        epoch, place = divmod(self.drawn, len(self.samples))
        block = place // _BLOCK
        if self._block != (epoch, block):
            places = np.arange(block * _BLOCK, min((block + 1) * _BLOCK, len(self.samples)))
            if self._key is not None:
                places = Permutation(len(self.samples), *self._key, epoch)(places)
            self._block, self._refs = (epoch, block), self.samples.refs(places)
        return self._refs[place % _BLOCK]

    def advance(self) -> None:
        """Go past the next sample."""
        self.tokens += self.peek().length
        self.drawn += 1
