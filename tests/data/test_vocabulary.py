"""The tokenizer of a job: what the run has, else what the job asks for; trained on training documents alone."""

import time
from pathlib import Path

import pytest

from equigrad.config.data import BatchConfig, Data, Source, TokenizerConfig
from equigrad.data.stream import Stream
from equigrad.data.tokenizers import Tokenizer, byte_tokenizer
from equigrad.data.vocabulary import build_tokenizer, training_texts
from equigrad.errors import UserError
from tests.data.conftest import write_jsonl


@pytest.fixture
def data(tmp_path: Path) -> Data:
    records = ({"text": f"document {n}"} for n in range(7))
    return Data(sources=[Source(path=str(write_jsonl(tmp_path / "a.jsonl", *records)))], held_out_every=3)


def replace(data: Data, **changes: object) -> Data:
    return data.model_copy(update=changes)


def test_held_out_documents_are_not_among_the_training_texts(data: Data) -> None:
    assert list(training_texts(data)) == [f"document {n}" for n in (0, 1, 3, 4, 6)]


def test_a_cap_is_shared_among_sources_by_weight(data: Data, tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("b" * 10)
    two = replace(data, sources=[*data.sources, Source(path=str(tmp_path / "b.txt"), weight=2.0)])
    assert list(training_texts(two, limit=30)) == ["document 0", "b" * 10]


def test_chats_and_prompts_give_their_text(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None}]}
    sources = [
        Source(path=str(write_jsonl(tmp_path / "c.jsonl", chat))),
        Source(path=str(write_jsonl(tmp_path / "p.jsonl", {"prompt": "a", "completion": "b"}))),
    ]
    assert list(training_texts(Data(sources=sources))) == ["Hi", "ab"]


def test_each_kind_of_tokenizer_is_built(data: Data, bpe: Tokenizer, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    assert build_tokenizer(replace(data, tokenizer=TokenizerConfig(kind="bytes")), nowhere).vocab_size == 257
    assert build_tokenizer(replace(data, tokenizer=TokenizerConfig(vocab_size=260)), nowhere).vocab_size == 260
    bpe.save(tmp_path / "saved")
    file = TokenizerConfig(kind="file", path=str(tmp_path / "saved"), eos_token="<|im_end|>")
    read = build_tokenizer(replace(data, tokenizer=file), nowhere)
    assert (read.bos_token, read.eos_token) == (bpe.bos_token, "<|im_end|>")
    assert not nowhere.exists()


def test_the_tokenizer_of_the_run_comes_first(data: Data, tmp_path: Path) -> None:
    byte_tokenizer().save(tmp_path / "run")
    assert build_tokenizer(data, tmp_path / "run").digest == byte_tokenizer().digest


def test_the_jobs_chat_template_comes_first(data: Data, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("T")
    config = TokenizerConfig(kind="bytes", chat_template=str(tmp_path / "t.jinja"))
    assert build_tokenizer(replace(data, tokenizer=config), tmp_path).chat_template == "T"
    missing = TokenizerConfig(kind="bytes", chat_template=str(tmp_path / "nope"))
    with pytest.raises(UserError, match=r"data\.tokenizer\.chat_template .*nope cannot be read"):
        build_tokenizer(replace(data, tokenizer=missing), tmp_path)


def test_moby_dick_is_ready_in_seconds(tmp_path: Path) -> None:
    data = Data(held_out_every=12, cache=str(tmp_path))
    start = time.process_time()
    stream = Stream(data, BatchConfig(), 0, build_tokenizer(data, tmp_path))
    stream.next_batch()
    # About 1 s of one core; generous, since the machine may be slow.
    assert time.process_time() - start < 6
    assert 300_000 < stream.stats[0].tokens < 400_000
