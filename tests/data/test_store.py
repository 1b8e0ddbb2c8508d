"""A store holds the documents, is built once and whole, and never mistakes anything else for itself."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from equigrad.config.data import Source
from equigrad.data import store as module
from equigrad.data.store import cache_folder, open_store
from equigrad.data.tokenizers import Tokenizer, byte_tokenizer
from equigrad.errors import UserError
from tests.data.conftest import write_jsonl

BYTES = byte_tokenizer()
TEXTS = ["ab", "", "é"]


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return Source(path=str(write_jsonl(tmp_path / "a.jsonl", *({"text": text} for text in TEXTS))))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_a_store_holds_the_sequences_end_to_end(source: Source, cache: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    store = open_store(source, BYTES, True, cache, lambda *state: seen.append(state))
    assert store.tokens.tolist() == [256, 97, 98, 256, 256, 256, 256, 0xC3, 0xA9, 256]
    assert store.offsets.tolist() == [0, 4, 6, 10]
    assert store.bytes.tolist() == [2, 0, 2]
    assert store.loss is None
    assert (store.tokens.dtype, store.offsets.dtype) == (np.uint16, np.int64)
    assert not store.tokens.flags.writeable
    assert seen == [(source.path, 3, 10)]


def test_a_fine_tuning_store_has_a_loss_that_no_first_token_is_in(tmp_path: Path, cache: Path) -> None:
    records = [{"prompt": "a", "completion": "b"}, {"prompt": "", "completion": "cd"}]
    store = open_store(Source(path=str(write_jsonl(tmp_path / "p.jsonl", *records))), BYTES, True, cache)
    assert store.loss is not None
    assert store.loss.tolist() == [0, 0, 1, 1, 0, 1, 1, 1]
    assert store.bytes.tolist() == [1, 2]


def test_batches_do_not_change_a_store(source: Source, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = open_store(source, BYTES, True, cache / "1")
    monkeypatch.setattr("equigrad.data.encoding.BATCH", 1)
    piecewise = open_store(source, BYTES, True, cache / "2")
    assert piecewise.digest == whole.digest
    assert np.array_equal(piecewise.tokens, whole.tokens)


def test_a_store_is_built_once(source: Source, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = open_store(source, BYTES, True, cache).digest
    monkeypatch.setattr(module, "encode", None)
    assert open_store(source, BYTES, True, cache).digest == digest
    assert len(list(cache.iterdir())) == 1


def test_everything_that_decides_the_contents_has_its_own_store(source: Source, cache: Path, bpe: Tokenizer) -> None:
    def build(tokenizer: Tokenizer = BYTES, eos: bool = True, source: Source = source) -> str:
        return open_store(source, tokenizer, eos, cache).digest

    build()
    build(bpe)
    build(eos=False)
    build(BYTES.replaced(chat_template="{{ messages }}"))
    assert len(list(cache.iterdir())) == 4
    before = build()
    os.utime(source.path, ns=(1, 1))
    assert build() == before  # another key, the same tokens
    write_jsonl(Path(source.path), {"text": "other"})
    assert build() != before
    assert len(list(cache.iterdir())) == 6


def test_a_large_vocabulary_is_stored_in_four_bytes(source: Source, cache: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.vocab_size = 70_000  # type: ignore[misc]
    assert open_store(source, tokenizer, True, cache).tokens.dtype == np.uint32


@pytest.mark.parametrize("name", ["tokens.bin", "offsets.bin", "bytes.bin", "meta.json"])
@pytest.mark.parametrize("damage", ["cut", "longer", "gone"])
def test_a_damaged_store_is_built_again(name: str, damage: str, source: Source, cache: Path) -> None:
    digest = open_store(source, BYTES, True, cache).digest
    (file,) = cache.glob(f"*/{name}")
    content = file.read_bytes()
    file.write_bytes(content[:-1] if damage == "cut" else content + b"}")
    if damage == "gone":
        file.unlink()
    assert open_store(source, BYTES, True, cache).digest == digest
    assert file.read_bytes() == content
    assert len(list(cache.iterdir())) == 1


PROGRAM = """
import sys, time
from pathlib import Path
from equigrad.config.data import Source
from equigrad.data.store import open_store
from equigrad.data.tokenizers import byte_tokenizer
wait = lambda *state: (print("building", flush=True), time.sleep(float(sys.argv[3])))
print(open_store(Source(path=sys.argv[1]), byte_tokenizer(), True, Path(sys.argv[2]), wait).digest)
"""


def start(source: Source, cache: Path, wait: float) -> subprocess.Popen:
    command = [sys.executable, "-c", PROGRAM, source.path, str(cache), str(wait)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_two_processes_may_build_at_once(source: Source, cache: Path) -> None:
    runs = [start(source, cache, 1.5) for _ in range(2)]
    outputs = [run.communicate(timeout=60)[0].split() for run in runs]
    assert outputs[0][0] == "building"  # on a slow machine the second may come when the first has done it all
    assert outputs[0][-1] == outputs[1][-1] == open_store(source, BYTES, True, cache).digest
    assert len(list(cache.iterdir())) == 1


def test_a_killed_build_is_not_mistaken_for_a_store(source: Source, cache: Path) -> None:
    run = start(source, cache, 60)
    assert run.stdout is not None
    assert run.stdout.readline() == "building\n"
    run.send_signal(signal.SIGKILL)
    run.wait()
    run.stdout.close()
    (left,) = cache.iterdir()
    assert "unfinished" in left.name
    assert open_store(source, BYTES, True, cache).offsets.tolist() == [0, 4, 6, 10]


def test_what_killed_builds_left_goes_once_nobody_builds(source: Source, cache: Path, tmp_path: Path) -> None:
    other = Source(path=str(write_jsonl(tmp_path / "other.jsonl", {"text": "other"})))
    run = start(source, cache, 60)
    assert run.stdout is not None
    assert run.stdout.readline() == "building\n"
    (left,) = cache.iterdir()
    for path in (left, *left.rglob("*")):
        os.utime(path, (1, 1))
    open_store(other, BYTES, True, cache)
    assert left.exists()  # its process lives
    run.send_signal(signal.SIGKILL)
    run.wait()
    run.stdout.close()
    open_store(other, BYTES, False, cache)
    assert not left.exists()
    assert len(list(cache.iterdir())) == 2


def test_a_cache_that_cannot_be_written_is_told(source: Source, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write .*\$EQUIGRAD_CACHE"):
        open_store(source, BYTES, True, tmp_path / "file" / "cache")


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 100_000)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limit[1]))
    try:
        with pytest.raises(UserError, match="cannot write tokenised data"):
            open_store(Source(path=str(tmp_path / "a.txt")), BYTES, True, cache)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    "record", [{"text": ""}, {"prompt": "a", "completion": ""}, {"messages": [{"role": "user", "content": "a"}]}]
)
def test_a_source_with_nothing_to_learn_is_refused(record: dict, tmp_path: Path, cache: Path) -> None:
    source = Source(path=str(write_jsonl(tmp_path / "a.jsonl", record, record)))
    with pytest.raises(UserError, match=r"a\.jsonl: nothing to learn: none of its 2 documents"):
        open_store(source, BYTES, True, cache)
    assert list(cache.iterdir()) == []


def test_an_error_in_the_middle_of_a_source_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\nbroken\n')
    with pytest.raises(UserError, match=":2: not valid JSON"):
        open_store(Source(path=str(tmp_path / "a.jsonl")), BYTES, True, cache)
    assert list(cache.iterdir()) == []


def test_the_cache_is_the_jobs_or_the_environments_or_the_homes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQUIGRAD_CACHE", "/e")
    assert cache_folder("/c") == Path("/c")
    assert cache_folder(None) == Path("/e")
    monkeypatch.delenv("EQUIGRAD_CACHE")
    assert cache_folder(None) == Path.home() / ".cache" / "equigrad"


def test_meta_is_readable(source: Source, cache: Path) -> None:
    open_store(source, BYTES, True, cache)
    (file,) = cache.glob("*/meta.json")
    meta = json.loads(file.read_text())
    assert meta["source"] == source.path
    assert meta["arrays"]["tokens"] == ["<u2", 10]
    assert time.time() - file.stat().st_mtime < 600
