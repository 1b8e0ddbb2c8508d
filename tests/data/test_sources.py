"""Sources give every document, unaltered, and say exactly what is wrong with a bad file."""

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equigrad.config.data import Source
from equigrad.data import sources
from equigrad.data.sources import Chat, Prompt, Text, documents, fingerprint
from equigrad.errors import UserError
from tests.data.conftest import write_jsonl

TEXTS = ["one", "", "zwei\nZeilen é😀"]
ROWS = [{"text": text, "n": n} for n, text in enumerate(TEXTS)]


def texts(path: str | Path, **options: Any) -> list[str]:
    return [document.plain for document in documents(Source(path=str(path), **options))]


# ---- what comes out


@pytest.mark.parametrize(("name", "count", "size"), [("moby-dick", 139, 1216302), ("sotu", 233, 10761202)])
def test_the_corpora_are_built_in(name: str, count: int, size: int) -> None:
    found = texts(f"builtin:{name}")
    assert (len(found), sum(len(text.encode()) for text in found)) == (count, size)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_json_lines_give_their_texts_and_places(name: str, tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / name, *ROWS)
    assert texts(file) == TEXTS
    assert [d.where for d in documents(Source(path=str(file)))] == [f"{file}:{n}" for n in (1, 2, 3)]


def test_blank_lines_and_a_byte_order_mark_are_no_records(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n\n  \r\n{"text": "b"}')
    assert [(d.where, d.plain) for d in documents(Source(path=str(file)))] == [(f"{file}:1", "a"), (f"{file}:4", "b")]


def test_parquet_gives_its_rows_across_row_groups(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet", row_group_size=2)
    assert texts(tmp_path / "a.parquet") == TEXTS
    assert texts(tmp_path / "a.parquet", format="text") == TEXTS


def test_a_glob_gives_its_files_sorted_by_name(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.txt").write_text(name)
    write_jsonl(tmp_path / "d.jsonl", {"text": "d"})
    assert texts(tmp_path / "*.txt") == ["a", "b", "c"]
    assert texts(tmp_path / "*") == ["a", "b", "c", "d"]


@pytest.mark.parametrize("saved", [False, True])
def test_a_folder_of_datasets_works_offline(saved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "data"
    if saved:
        datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)).save_to_disk(folder)
    else:
        folder.mkdir()
        write_jsonl(folder / "train.jsonl", *ROWS)
    source = Source(path=f"hf:{folder}")
    assert [(d.where, d.plain) for d in documents(source)] == [
        (f"hf:{folder}: row {n + 1}", TEXTS[n]) for n in range(3)
    ]
    assert fingerprint(source) == fingerprint(source)
    with pytest.raises(UserError, match="cannot be loaded"):
        texts(f"hf:{folder}", split="nope")


def test_a_hub_that_cannot_be_reached_is_told_at_once_and_once() -> None:
    code = "from equigrad.data.sources import *; next(documents(Source(path='hf:nobody/nothing')))"
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:1"}
    kept = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy") and k != "HF_HUB_OFFLINE"}
    done = subprocess.run([sys.executable, "-c", code], env=kept | nowhere, capture_output=True, text=True, timeout=25)
    assert "UserError: hf:nobody/nothing: cannot be loaded: 127.0.0.1 cannot be reached" in done.stderr
    assert "Retry" not in done.stderr


@given(st.text(st.sampled_from("ab \n\r\té😀"), max_size=60), st.integers(1, 12))
@settings(deadline=None)
def test_pieces_of_a_text_file_join_to_the_file(tmp_path_factory: pytest.TempPathFactory, text: str, size: int) -> None:
    file = tmp_path_factory.getbasetemp() / "pieces.txt"
    file.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "PIECE", size)
        pieces = [d for d in documents(Source(path=str(file))) if isinstance(d, Text)]
    assert "".join(piece.text for piece in pieces) == text
    assert [p.first for p in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [p.last for p in pieces] == [False] * (len(pieces) - 1) + [True]
    assert all(len(piece.text) <= size for piece in pieces)


def test_a_text_file_is_cut_between_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PIECE", 12)
    (tmp_path / "a.txt").write_text("one two\nthree\n\n four five six seven")
    assert texts(tmp_path / "a.txt") == ["one two\n", "three\n\n", " four five s", "ix seven"]


CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo", "tool_calls": None}]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_chats_and_prompts_are_told_by_their_keys(suffix: str, tmp_path: Path) -> None:
    records = {"chat": {"messages": CHAT, "text": "x"}, "prompt": {"prompt": "p", "completion": "c", "text": "x"}}
    for name, record in records.items():
        if suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist([record]), tmp_path / f"{name}{suffix}")
        else:
            write_jsonl(tmp_path / f"{name}{suffix}", record)
    (chat,) = documents(Source(path=str(tmp_path / f"chat{suffix}")))
    (prompt,) = documents(Source(path=str(tmp_path / f"prompt{suffix}")))
    assert isinstance(chat, Chat)
    assert chat.messages == [CHAT[0], {"role": "assistant", "content": "Yo"}]  # absent is absent
    assert isinstance(prompt, Prompt)
    assert (prompt.prompt, prompt.completion) == ("p", "c")
    assert texts(tmp_path / f"chat{suffix}", format="text") == ["x"]


def test_tools_come_with_the_chat(tmp_path: Path) -> None:
    (chat,) = documents(
        Source(path=str(write_jsonl(tmp_path / "a.jsonl", {"messages": CHAT, "tools": [{"name": "f"}]})))
    )
    assert isinstance(chat, Chat)
    assert chat.tools == [{"name": "f"}]


def test_documents_stream(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\nbroken')
    stream: Iterator = documents(Source(path=str(tmp_path / "a.jsonl")))
    assert next(stream).plain == "a"
    with pytest.raises(UserError):
        next(stream)


# ---- what is wrong

GOOD = b'{"text": "a"}\n'
BAD_FILES = {
    "malformed JSON": (".jsonl", GOOD + b'{"text": "b"\n', r":2: not valid JSON: .* at column \d+"),
    "not an object": (".jsonl", GOOD + b'["b"]\n', r":2: a line must hold an object .*, not list"),
    "not UTF-8": (".jsonl", GOOD + b'{"text": "\xff"}\n', ":2: not UTF-8 at byte 11 of the line"),
    "not UTF-8 text": (".txt", "é".encode() * 40000 + b"\xff", ": not UTF-8 at byte 80001"),
    "cut UTF-8 text": (".txt", b"a\n\xf0\x9f", ": not UTF-8 at byte 3"),
    "half a surrogate pair": (".jsonl", b'{"text": "\\ud83d"}', ":1: holds half of a surrogate pair"),
    "endless number": (".jsonl", b'{"text": ' + b"1" * 5000 + b"}", ":1: not valid JSON"),
    "missing text": (".jsonl", GOOD + b'{"body": "b", "id": 1}\n', ":2: no key 'text'; the keys are 'body', 'id'"),
    "no text key": (".jsonl", b'{"body": "b", "id": 1}\n', r":1: neither 'text'.*\('body', 'id'\).*text_key"),
    "number for text": (".jsonl", b'{"text": 1}\n', ":1: 'text' must be a string, not int"),
    "null for text": (".jsonl", b'{"text": null}\n', ":1: 'text' must be a string, not NoneType"),
    "number for completion": (".jsonl", b'{"prompt": "", "completion": 1}', ":1: 'completion' must be a string"),
    "empty messages": (".jsonl", b'{"messages": []}', ':1: "messages" must be a list of at least one'),
    "messages of strings": (".jsonl", b'{"messages": ["Hi"]}', ':1: "messages" must be a list of at least one'),
    "missing role": (".jsonl", b'{"messages": [{"content": "a"}]}', ':1: message 1: "role" must be a string'),
    "number for content": (".jsonl", b'{"messages": [{"role": "user", "content": 1}]}', '"content" must be .* not int'),
    "tools as text": (".jsonl", b'{"messages": [{"role": "user"}], "tools": "f"}', ':1: "tools" must be a list'),
    "empty": (".jsonl", b"", "holds no documents"),
    "blank": (".jsonl", b"\n \n", "holds no documents"),
    "damaged gzip": (".jsonl.gz", gzip.compress(GOOD * 999)[:-10], "is damaged"),
    "not gzip": (".jsonl.gz", GOOD, "is damaged"),
    "flipped gzip": (".jsonl.gz", gzip.compress(GOOD)[:12] + b"\xff\xff" + gzip.compress(GOOD)[14:], "is damaged"),
    "damaged parquet": (".parquet", b"PAR1" + b"\0" * 50, "is damaged"),
    "unknown suffix": (".doc", b"", r"cannot tell what it holds .* \.txt, \.jsonl, \.jsonl\.gz, \.parquet"),
}


@pytest.mark.parametrize("fault", BAD_FILES)
def test_a_bad_file_is_told_by_place_and_fault(fault: str, tmp_path: Path) -> None:
    suffix, content, message = BAD_FILES[fault]
    file = tmp_path / f"data{suffix}"
    file.write_bytes(content)
    with pytest.raises(UserError, match=message) as raised:
        texts(file)
    assert str(raised.value).startswith(str(file))


@pytest.mark.parametrize("fault", ["text that is not UTF-8", "a date past the year 9999"])
def test_a_parquet_value_that_python_cannot_hold_is_told(fault: str, tmp_path: Path) -> None:
    column = (
        pa.array([b"good", b"\xff"]).view(pa.string())
        if "UTF-8" in fault
        else pa.array([1, 10**18]).cast("timestamp[us]")
    )
    pq.write_table(pa.table({"text": ["a", "b"], "other": column}), tmp_path / "bad.parquet")
    with pytest.raises(UserError, match=r"bad\.parquet is damaged or cannot be read"):
        texts(tmp_path / "bad.parquet")


def test_a_source_that_is_not_there_is_told(tmp_path: Path) -> None:
    for path, message in [
        (tmp_path / "a.jsonl", "no such file"),
        (tmp_path / "*.jsonl", "no file matches"),
        (tmp_path, r"is a folder; name its files, as in .*/\*\.jsonl"),
        ("builtin:nope", "there are builtin:moby-dick, builtin:sotu"),
    ]:
        with pytest.raises(UserError, match=message):
            texts(path)


def test_a_text_file_cannot_be_a_chat(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(UserError, match=r"\.txt file holds plain text"):
        texts(tmp_path / "a.txt", format="messages")


def test_a_missing_library_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "a.parquet").touch()
    with pytest.raises(UserError, match=r"pip install 'equigrad\[data\]'"):
        texts(tmp_path / "a.parquet")


# ---- what identifies it


def test_a_fingerprint_changes_with_the_files_and_how_they_are_read(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", *ROWS)
    source = Source(path=str(file))
    before = fingerprint(source)
    assert json.loads(json.dumps(before)) == before == fingerprint(source)
    assert fingerprint(source.model_copy(update={"text_key": "n"})) != before
    write_jsonl(file, *ROWS, {"text": "more"})
    assert fingerprint(source) != before
