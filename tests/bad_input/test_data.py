"""Data that is missing, empty or malformed."""

import gzip
import json
from pathlib import Path

import pytest

from equigrad.cli import main
from tests.bad_input.given import TEXT, Bad, job


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("missing.txt", "missing.txt: no such file"),
        ("none/*.jsonl", "none/*.jsonl: no file matches"),
        (".", "is a folder; name its files"),
        ("builtin:mobydick", "there are builtin:moby-dick, builtin:sotu"),
        ("job.toml", "cannot tell what it holds by its name; it should end in .txt, .jsonl, .jsonl.gz, .parquet"),
    ],
)
def test_a_missing_source_is_named(path: str, complaint: str, bad: Bad) -> None:
    assert complaint in bad("train", job(data__sources=path))


@pytest.mark.parametrize("name", ["empty.txt", "empty.jsonl", "empty.jsonl.gz"])
def test_an_empty_source_is_named(name: str, bad: Bad) -> None:
    Path(name).write_bytes(gzip.compress(b"") if name.endswith(".gz") else b"")
    assert bad("train", job(data__sources=name)).startswith(name)


def test_texts_that_are_all_empty_are_named(bad: Bad) -> None:
    Path("blank.jsonl").write_text('{"text": ""}\n\n{"text": ""}\n')
    assert "blank.jsonl: nothing to learn" in bad("train", job(data__sources="blank.jsonl"))


def test_no_tokenizer_is_trained_on_nothing(bad: Bad) -> None:
    Path("empty.txt").touch()
    assert "empty.txt: no text" in bad("tokenizer", "train", "empty.txt", "--out", "t")
    assert not Path("t").exists()


@pytest.mark.parametrize("packed", [False, True], ids=["jsonl", "jsonl.gz"])
@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b'{"text": "b"', "not valid JSON"),
        (b"text", "not valid JSON"),
        (b'["text"]', "must hold an object"),
        (b'{"txt": "b"}', "no key 'text'; the keys are 'txt'"),
        (b'{"text": 3}', "'text' must be a string, not int"),
        (b'{"text": "\xff"}', "not UTF-8"),
        (b'{"text": "\\ud800"}', "surrogate"),
    ],
)
def test_a_malformed_line_is_named_by_file_and_number(line: bytes, complaint: str, packed: bool, bad: Bad) -> None:
    name = "bad.jsonl.gz" if packed else "bad.jsonl"
    content = b'{"text": "a"}\n\n' + line + b"\n"
    Path(name).write_bytes(gzip.compress(content) if packed else content)
    found = bad("train", job(data__sources=name))
    assert found.startswith(f"{name}:3: ")
    assert complaint in found


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"messages": []}', "must be a list of at least one"),
        ('{"messages": [{"role": "user"}, {"content": "b"}]}', 'message 2: "role" must be a string'),
        ('{"messages": [{"role": "user", "content": 3}]}', 'message 1: "content" must be a string'),
        ('{"prompt": "a"}', "no key 'messages'"),
    ],
)
def test_a_malformed_chat_is_named_by_file_and_number(line: str, complaint: str, bad: Bad) -> None:
    good = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'
    Path("chats.jsonl").write_text(f"{good}\n{line}\n")
    found = bad("train", job(data__sources="chats.jsonl"))
    assert found.startswith("chats.jsonl:2: ")
    assert complaint in found


@pytest.mark.parametrize("name", ["cut.jsonl.gz", "not.jsonl.gz", "not.parquet"])
def test_a_damaged_file_is_named(name: str, bad: Bad) -> None:
    lines = "".join(json.dumps({"text": line}) + "\n" for line in TEXT.splitlines())
    packed = gzip.compress(lines.encode())
    Path(name).write_bytes(packed[: len(packed) // 2] if name.startswith("cut") else b"plain words")
    assert bad("train", job(data__sources=name)).startswith(f"{name} is damaged")


def test_a_text_that_is_not_utf8_is_named_with_its_place(bad: Bad) -> None:
    Path("latin.txt").write_bytes(b"caf\xe9 au lait")
    assert "latin.txt: not UTF-8 at byte 4" in bad("train", job(data__sources="latin.txt"))


def test_data_that_is_all_held_out_is_named(bad: Bad) -> None:
    found = bad("train", job(), "--data.held_out_every", "1")
    assert "data.held_out_every: 1 holds out every document" in found


def test_a_dry_run_finds_a_missing_source(bad: Bad) -> None:
    assert "missing.txt: no such file" in bad("train", job(data__sources="missing.txt"), "--dry-run")
    assert "none/*.jsonl: no file" in bad("train", job(data__held_out_sources="none/*.jsonl"), "--dry-run")


def test_a_run_that_failed_on_its_data_leaves_its_folder_free(bad: Bad) -> None:
    bad("train", job(data__sources="missing.txt"), "--run", "new")
    assert main(["train", job(), "--run", "new"]) == 0


def test_a_held_out_set_without_anything_to_learn_is_told_before_training(bad: Bad) -> None:
    Path("mute.jsonl").write_text('{"messages": [{"role": "user", "content": "Hello?"}]}\n')
    found = bad("train", job(data__held_out_sources="mute.jsonl"))
    assert "mute.jsonl: nothing to learn" in found
    assert not Path("runs/tiny/checkpoints").exists()


def test_a_name_that_no_file_can_have_is_named(bad: Bad) -> None:
    assert "File name too long" in bad("train", job(data__sources="a" * 5000 + ".txt"))
