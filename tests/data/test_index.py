"""Spans cover every document exactly once, and what is not trained on is counted."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equigrad.config.data import Source
from equigrad.data import index
from equigrad.data.index import SampleSet, Spans, is_held_out
from equigrad.data.store import open_store
from equigrad.data.tokenizers import byte_tokenizer
from tests.data.conftest import write_jsonl

BYTES = byte_tokenizer()


def spans_of(folder: Path, records: list[dict], context: int, eos: bool = True) -> Spans:
    source = Source(path=str(write_jsonl(folder / "records.jsonl", *records)))
    return Spans(open_store(source, BYTES, eos, folder / "cache"), context)


def whole(spans: Spans, drop_long: bool = False) -> SampleSet:
    members = np.ones(len(spans.store.bytes), bool)
    return SampleSet(spans, members, Source(path="s", modality="m"), 0, held_out=False, drop_long=drop_long)


def prompt(question: int, answer: int) -> dict[str, Any]:
    return {"prompt": "q" * question, "completion": "a" * answer}


@given(texts=st.lists(st.text("abcé", max_size=12), min_size=1), context=st.integers(1, 8), eos=st.booleans())
@settings(max_examples=50, deadline=None)
def test_every_token_is_a_label_exactly_once(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], context: int, eos: bool
) -> None:
    texts = [*texts, "z"]  # a source without any text is refused
    spans = spans_of(tmp_path_factory.mktemp("texts"), [{"text": text} for text in texts], context, eos)
    side = whole(spans)
    refs = side.refs(np.arange(len(side)))
    labels: dict[int, list[int]] = {d: [] for d in range(len(texts))}
    for ref in refs:
        sample = spans.read(ref)
        assert 1 <= len(sample) == ref.length <= context
        assert ref.modality == "m"
        assert ref.loss_tokens == sample.loss.sum() == ref.length
        assert sample.ids.tolist() == [*((labels[ref.document] or [256])[-1:]), *sample.labels.tolist()[:-1]]
        labels[ref.document] += sample.labels.tolist()
    assert [labels[d] for d in labels] == [[*text.encode(), *([256] if eos else [])] for text in texts]
    stats = side.stats
    assert stats.tokens == stats.loss_tokens == sum(map(len, labels.values()))
    assert (stats.bytes, stats.empty) == (sum(len(t.encode()) for t in texts), texts.count(""))
    assert (stats.documents, stats.samples, stats.dropped, stats.left_out) == (len(texts), len(refs), 0, 0)


def test_the_worked_example_of_samples_holds(tmp_path: Path) -> None:
    spans = spans_of(tmp_path, [{"text": "abcd"}], context=3)
    side = whole(spans)
    first, second = (spans.read(ref) for ref in side.refs(np.arange(2)))
    assert (first.ids.tolist(), first.labels.tolist()) == ([256, 97, 98], [97, 98, 99])
    assert (second.ids.tolist(), second.labels.tolist()) == ([99, 100], [100, 256])
    assert first.ids.dtype == first.labels.dtype == np.int64
    assert first.loss.dtype == bool


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1), st.integers(1, 8), st.integers(1, 5))
@settings(max_examples=50, deadline=None)
def test_fine_tuning_keeps_just_the_spans_that_have_a_loss(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[tuple[int, int]], context: int, block: int
) -> None:
    sizes = [*sizes, (1, 1)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "_BLOCK", block)
        spans = spans_of(tmp_path_factory.mktemp("prompts"), [prompt(*s) for s in sizes], context, eos=False)
    expected = []
    for document, (question, answer) in enumerate(sizes):
        loss = [False] * question + [True] * answer
        parts = [loss[i : i + context] for i in range(0, len(loss), context)]
        expected += [(document, k, len(part), sum(part)) for k, part in enumerate(parts) if any(part)]
    side = whole(spans)
    refs = side.refs(np.arange(len(side)))
    assert [(r.document, r.span, r.length, r.loss_tokens) for r in refs] == expected
    assert all(spans.read(ref).loss.sum() == ref.loss_tokens for ref in refs)
    everything = sum(-(-(question + answer) // context) for question, answer in sizes)
    assert side.stats.left_out == everything - len(expected)
    assert side.stats.bytes == side.stats.loss_tokens == sum(answer for _, answer in sizes)


def test_long_fine_tuning_documents_are_dropped_where_asked_and_counted(tmp_path: Path) -> None:
    spans = spans_of(tmp_path, [prompt(1, 2), prompt(5, 5), prompt(3, 0)], context=4)
    side = whole(spans, drop_long=True)
    assert [ref.document for ref in side.refs(np.arange(len(side)))] == [0, 2]
    assert (side.stats.dropped, side.stats.documents, side.stats.bytes) == (1, 3, 2)
    (tmp_path / "text").mkdir()
    texts = whole(spans_of(tmp_path / "text", [{"text": "abcdefgh"}], context=4), drop_long=True)
    assert (texts.stats.dropped, len(texts)) == (0, 3)


def test_every_nth_document_is_held_out() -> None:
    assert np.flatnonzero(is_held_out(np.arange(10), 4)).tolist() == [3, 7]
    assert is_held_out(np.arange(3), 1).all()
    assert not is_held_out(np.arange(3), 0).any()
    assert (is_held_out(3, 4), is_held_out(4, 4), is_held_out(0, 0)) == (True, False, False)


def test_leading_documents_are_taken_whole(tmp_path: Path) -> None:
    side = whole(spans_of(tmp_path, [{"text": text} for text in ("abc", "", "abcdé", "a")], context=4))
    # Inputs per document: 4, 1, 7, 2 in 1, 1, 2, 1 spans.
    taken = {limit: side.documents_within(limit) for limit in (1, 4, 5, 11, 12, 14, 99)}
    assert taken == {1: (1, 3), 4: (1, 3), 5: (2, 3), 11: (2, 3), 12: (4, 9), 14: (5, 10), 99: (5, 10)}
