"""The stream is exact: every byte once an epoch, shares by weight, budgets kept, and a cursor that resumes."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equigrad.config.data import BatchConfig, Data, Source
from equigrad.data import stream as module
from equigrad.data.sources import documents
from equigrad.data.stream import Batch, Stream
from equigrad.data.tokenizers import Tokenizer, byte_tokenizer
from equigrad.errors import UserError
from tests.data.conftest import write_jsonl

BYTES = byte_tokenizer()


@pytest.fixture
def texts(tmp_path: Path) -> Source:
    """Twelve documents of 1 to 56 bytes."""
    records = ({"text": chr(97 + n) * (1 + 5 * n)} for n in range(12))
    return Source(path=str(write_jsonl(tmp_path / "texts.jsonl", *records)))


@pytest.fixture
def prompts(tmp_path: Path) -> Source:
    records = ({"prompt": "q" * n, "completion": "a" * (n % 4)} for n in range(20))
    return Source(path=str(write_jsonl(tmp_path / "prompts.jsonl", *records)), weight=3.0)


def stream(*sources: Source, seed: int = 0, batch: BatchConfig | None = None, **data: Any) -> Stream:
    settings = Data(sources=list(sources), **({"context": 16} | data))
    return Stream(settings, batch or BatchConfig(tokens=64), seed, BYTES)


def decoded(stream: Stream, refs: Any, tokenizer: Tokenizer) -> dict[int, str]:
    labels: dict[int, list[int]] = {}
    for ref in sorted(refs, key=lambda ref: (ref.document, ref.span)):
        labels.setdefault(ref.document, []).extend(stream.read(ref).labels.tolist())
    return {document: tokenizer.decode(ids) for document, ids in labels.items()}


def test_an_epoch_and_the_held_out_samples_give_back_every_document(bpe: Tokenizer) -> None:
    data = Data(sources=[Source(path="builtin:moby-dick")], held_out_every=12, context=100)
    whole = Stream(data, BatchConfig(tokens=4096), 0, bpe)
    train, held_out = whole.stats
    assert (train.documents, held_out.documents) == (128, 11)
    refs: list = []
    while len(refs) < train.samples:
        refs += whole.next_batch().samples
    assert len(set(refs[: train.samples])) == train.samples
    evaluated = whole.held_out()
    assert {ref.document for ref in evaluated.samples} == set(range(11, 139, 12))
    found = decoded(whole, [*refs[: train.samples], *evaluated.samples], bpe)
    originals = [document.plain for document in documents(data.sources[0])]
    assert [found[d] for d in range(139)] == originals
    assert train.bytes + held_out.bytes == sum(len(text.encode()) for text in originals)
    assert (evaluated.bytes, evaluated.tokens) == (held_out.bytes, held_out.tokens)


@given(budget=st.integers(16, 200), seed=st.integers(0, 3), shuffle=st.booleans())
@settings(max_examples=20, deadline=None)
def test_a_step_takes_samples_in_order_while_they_fit(budget: int, seed: int, shuffle: bool) -> None:
    source = Source(path="builtin:moby-dick")
    settings = {"seed": seed, "shuffle": shuffle}
    batches = stream(source, batch=BatchConfig(tokens=budget), **settings)
    one_by_one = stream(source, batch=BatchConfig(samples=1), **settings)
    steps = [batches.next_batch() for _ in range(20)]
    assert [step.step for step in steps] == list(range(1, 21))
    for step, following in pairwise(steps):
        assert step.tokens == sum(ref.length for ref in step.samples) <= budget
        assert step.loss_tokens == sum(ref.loss_tokens for ref in step.samples)
        assert step.tokens + following.samples[0].length > budget
    for ref in (ref for step in steps for ref in step.samples):
        assert one_by_one.next_batch().samples == (ref,)


def test_a_sample_over_the_budget_is_a_step_of_its_own(texts: Source) -> None:
    assert len(stream(texts, batch=BatchConfig(tokens=1)).next_batch().samples) == 1


def test_a_step_may_be_a_number_of_samples_and_spans_epochs(texts: Source) -> None:
    some = stream(texts, batch=BatchConfig(samples=5))
    total = some.stats[0].samples
    refs = [ref for _ in range(total) for ref in some.next_batch().samples]
    assert len(refs) == 5 * total
    epochs = [refs[i : i + total] for i in range(0, 5 * total, total)]
    assert all(set(epoch) == set(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 5  # each in an order of its own


def test_the_default_budget_is_16384_tokens() -> None:
    step = stream(Source(path="builtin:moby-dick"), batch=BatchConfig(), context=512).next_batch()
    assert 16384 - 512 < step.tokens <= 16384


def test_without_shuffle_samples_come_in_file_order(texts: Source) -> None:
    plain = stream(texts, shuffle=False, batch=BatchConfig(samples=stream(texts).stats[0].samples))
    refs = plain.next_batch().samples
    assert list(refs) == sorted(refs, key=lambda ref: (ref.document, ref.span))
    assert plain.next_batch().samples == refs


def test_lookup_blocks_do_not_change_the_order(texts: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = stream(texts)
    expected = [whole.next_batch() for _ in range(30)]
    monkeypatch.setattr(module, "_BLOCK", 3)
    blocks = stream(texts)
    assert [blocks.next_batch() for _ in range(30)] == expected


def test_the_seed_decides_the_order(texts: Source) -> None:
    orders = [[stream(texts, seed=seed).next_batch() for _ in range(3)] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    documents = [ref.document for ref in orders[2][0].samples]
    assert documents == [2, 8, 3, 10, 4]  # on every machine


def test_shares_of_tokens_converge_to_the_weights(texts: Source, prompts: Source) -> None:
    mixed = stream(texts, prompts, batch=BatchConfig(tokens=4000))
    shares = [0, 0]
    for ref in (ref for _ in range(10) for ref in mixed.next_batch().samples):
        shares[ref.source] += ref.length
        # At every moment, to within one sample of each.
        assert abs(shares[0] / 1.0 - shares[1] / 3.0) <= 16
    assert sum(shares) > 30_000


# ---- the cursor


@given(before=st.integers(0, 12), after=st.integers(1, 5), samples=st.one_of(st.none(), st.integers(1, 30)))
@settings(max_examples=30, deadline=None)
def test_a_cursor_resumes_exactly(before: int, after: int, samples: int | None) -> None:
    sources = [Source(path="builtin:moby-dick"), Source(path="builtin:moby-dick", weight=0.3)]
    budget = BatchConfig(tokens=None if samples else 300, samples=samples)
    first, second = (stream(*sources, batch=budget, held_out_every=60) for _ in range(2))
    for _ in range(before):
        first.next_batch()
    cursor = json.loads(json.dumps(first.cursor()))
    expected = [first.next_batch() for _ in range(after)]
    second.next_batch()  # wherever it stands
    second.seek(cursor)
    assert second.cursor() == cursor
    assert [second.next_batch() for _ in range(after)] == expected


def test_a_cursor_of_other_data_is_refused(texts: Source, prompts: Source) -> None:
    cursor = stream(texts).cursor()
    with pytest.raises(UserError, match="context was 16 and is 8"):
        stream(texts, context=8).seek(cursor)
    with pytest.raises(UserError, match="seed was 0 and is 1"):
        stream(texts, seed=1).seek(cursor)
    with pytest.raises(UserError, match=r"weights was \[1.0\] and is \[1.0, 3.0\]"):
        stream(texts, prompts).seek(cursor)
    write_jsonl(Path(texts.path), {"text": "changed"})
    with pytest.raises(UserError, match=r"the tokens of .*texts\.jsonl are not the same"):
        stream(texts).seek(cursor)


def test_a_cursor_survives_a_moved_file_and_another_budget(texts: Source) -> None:
    first = stream(texts)
    first.next_batch()
    moved = Source(path=str(Path(texts.path).rename(Path(texts.path).with_name("moved.jsonl"))))
    second = stream(moved, batch=BatchConfig(samples=1))
    second.seek(first.cursor())
    ref = first.next_batch().samples[0]
    assert second.next_batch() == Batch(2, (ref,), ref.length, ref.loss_tokens)


# ---- held out


def test_held_out_sources_are_held_out_whole(texts: Source, prompts: Source) -> None:
    both = stream(texts, held_out_sources=[prompts])
    train, held_out = both.stats
    assert (train.source, train.held_out, train.documents) == (texts.path, False, 12)
    assert (held_out.source, held_out.held_out, held_out.documents) == (prompts.path, True, 20)
    evaluated = both.held_out()
    assert {ref.source for ref in evaluated.samples} == {1}
    assert evaluated.loss_tokens == sum(int(both.read(ref).loss.sum()) for ref in evaluated.samples)
    assert evaluated.bytes == held_out.bytes == sum(n % 4 for n in range(20))


def test_a_limit_takes_whole_documents_of_every_source(texts: Source, prompts: Source) -> None:
    both = stream(texts, prompts, held_out_every=2)
    everything, some, least = both.held_out(), both.held_out(150), both.held_out(1)
    assert least.tokens <= some.tokens <= 150 < everything.tokens
    for part in (some, least):
        assert {ref.source for ref in part.samples} == {0, 1}
        whole = {(ref.source, ref.document) for ref in part.samples}
        kept = [ref for ref in everything.samples if (ref.source, ref.document) in whole]
        assert list(part.samples) == kept
        texts_bytes = sum(1 + 5 * document for source, document in whole if source == 0)
        assert part.bytes == texts_bytes + sum(document % 4 for source, document in whole if source == 1)


def test_nothing_held_out_is_nothing(texts: Source) -> None:
    nothing = stream(texts).held_out(100)
    assert (nothing.samples, nothing.tokens, nothing.bytes) == ((), 0, 0)


def test_a_source_without_training_samples_is_refused(tmp_path: Path) -> None:
    long = Source(path=str(write_jsonl(tmp_path / "long.jsonl", {"prompt": "long", "completion": "longer"})))
    with pytest.raises(UserError, match=r"long\.jsonl has no training samples"):
        stream(long, context=4, too_long="drop")


def test_dropped_and_left_out_are_in_the_stats(prompts: Source) -> None:
    split, dropped = stream(prompts, context=4).stats[0], stream(prompts, context=4, too_long="drop").stats[0]
    assert (split.dropped, split.left_out > 0) == (0, True)
    assert dropped.dropped > 0
    assert dropped.documents == split.documents == 20
