"""Documents, one after another and in constant memory, from whatever holds them. Knows nothing of tokens or splits.

Whatever is wrong with the input is a ``UserError`` that names the file and the line, row or byte.
"""

import codecs
import glob
import gzip
import hashlib
import importlib
import json
import os
import re
import socket
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import urlsplit

from equigrad.config.data import Source
from equigrad.errors import UserError

PIECE = 1 << 16
"""Characters after which a ``.txt`` document is handed on in pieces."""

_CORPORA = Path(__file__).parent / "corpora"
_LINE_END = re.compile(r"\S\n(?=\S)")


@dataclass(frozen=True, slots=True)
class Text:
    """A document of which every token is learned, or one piece of it: a long ``.txt`` comes in several, in order."""

    where: str
    """File and line, for messages."""
    text: str
    first: bool = True
    """Whether the document begins here."""
    last: bool = True
    """Whether it ends here."""

    @property
    def plain(self) -> str:
        """The text a vocabulary may be trained on."""
        return self.text


@dataclass(frozen=True, slots=True)
class Prompt:
    """A document of which the completion is learned."""

    where: str
    prompt: str
    completion: str
    last = True

    @property
    def plain(self) -> str:
        """The text a vocabulary may be trained on."""
        return self.prompt + self.completion


@dataclass(frozen=True, slots=True)
class Chat:
    """A document of which the assistant's turns are learned: ``[{"role": "user", "content": "Hi"}, ...]``."""

    where: str
    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    last = True

    @property
    def plain(self) -> str:
        """The text a vocabulary may be trained on."""
        contents = (message.get("content") for message in self.messages)
        return "\n".join(content for content in contents if isinstance(content, str))


Document: TypeAlias = Text | Prompt | Chat


class _Record(NamedTuple):
    where: str
    values: dict[str, Any]


def documents(source: Source) -> Iterator[Document]:
    """The documents of a source in file order, files sorted by name; all of one kind.

    A ``.txt`` file is one document. Raises ``UserError`` for what cannot be read or understood, and where there is no
    document at all.
    """
    kind: str = source.format
    record = None
    for record in _records(source):
        if kind == "auto":
            kind = "text" if isinstance(record, Text) else _kind(record, source)
        if isinstance(record, _Record):
            yield _DOCUMENT[kind](record, source)
        elif kind == "text":
            yield record
        else:
            raise UserError(f"{record.where}: a .txt file holds plain text, but this source is read as {kind!r}")
    if record is None:
        raise UserError(f"{source.path} holds no documents")


def json_records(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of the ``.jsonl`` and ``.jsonl.gz`` files that a path or glob names, each with its file and line."""
    for file in _files(path):
        yield from _read_jsonl_gz(file) if file.name.endswith(".gz") else _read_jsonl(file)


def fingerprint(source: Source) -> list[Any]:
    """What changes when the documents change, as plain values: file names, sizes and times, or a content hash."""
    how = [source.path, source.format, source.text_key]
    if source.path.startswith("hf:"):
        return [*how, source.split, source.subset, _hugging_face(source)._fingerprint]
    if source.path.startswith("builtin:"):
        return [*how, *(hashlib.sha256(file.read_bytes()).hexdigest() for file in _files(source.path))]
    stats = [(file, file.stat()) for file in _files(source.path)]
    return [*how, *([str(file.absolute()), stat.st_size, stat.st_mtime_ns] for file, stat in stats)]


def check(source: Source) -> None:
    """``UserError`` where the files of a source are missing or of no known kind. Opens none, and asks no hub."""
    if not source.path.startswith("hf:"):
        for file in _files(source.path):
            _reader(file)


# ---- records to documents


def _kind(record: _Record, source: Source) -> str:
    keys = record.values.keys()
    if "messages" in keys:
        return "messages"
    if {"prompt", "completion"} <= keys:
        return "prompt"
    if source.text_key in keys:
        return "text"
    raise UserError(
        f"{record.where}: neither {source.text_key!r}, 'messages' nor 'prompt' and 'completion' are among the keys"
        f" ({_names(record)}); name the one that holds the text with text_key"
    )


def _text(record: _Record, source: Source) -> Text:
    return Text(record.where, _string(record, source.text_key))


def _prompt(record: _Record, source: Source) -> Prompt:
    return Prompt(record.where, _string(record, "prompt"), _string(record, "completion"))


def _chat(record: _Record, source: Source) -> Chat:
    messages = _value(record, "messages")
    if not (isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages)):
        raise UserError(f'{record.where}: "messages" must be a list of at least one {{"role", "content"}} object')
    for number, message in enumerate(messages, 1):
        for key, allowed in (("role", str), ("content", str | list | None)):
            if not isinstance(message.get(key), allowed):
                found = type(message.get(key)).__name__
                raise UserError(f'{record.where}: message {number}: "{key}" must be a string, not {found}')
    tools = record.values.get("tools")
    if not isinstance(tools, list | None):
        raise UserError(f'{record.where}: "tools" must be a list, not {type(tools).__name__}')
    # Columns fill absent keys with None, which templates would write out; `transformers` drops them too.
    return Chat(record.where, [{k: v for k, v in m.items() if v is not None} for m in messages], tools)


_DOCUMENT: dict[str, Callable[[_Record, Source], Document]] = {"text": _text, "prompt": _prompt, "messages": _chat}


def _string(record: _Record, key: str) -> str:
    value = _value(record, key)
    if not isinstance(value, str):
        raise UserError(f"{record.where}: {key!r} must be a string, not {type(value).__name__}")
    return value


def _value(record: _Record, key: str) -> Any:
    if key not in record.values:
        raise UserError(f"{record.where}: no key {key!r}; the keys are {_names(record)}")
    return record.values[key]


def _names(record: _Record) -> str:
    return ", ".join(map(repr, record.values)) or "none"


# ---- files to records


def _records(source: Source) -> Iterator[_Record | Text]:
    if source.path.startswith("hf:"):
        rows = _hugging_face(source)
        with _reading(source.path):
            yield from (_Record(f"{source.path}: row {number}", row) for number, row in enumerate(rows, 1))
        return
    for file in _files(source.path):
        yield from _reader(file)(file)


def _files(path: str) -> list[Path]:
    """The files a path names, at least one."""
    if path.startswith("builtin:"):
        file = _CORPORA / f"{path.removeprefix('builtin:').replace('-', '_')}.jsonl.gz"
        if not file.is_file():
            names = sorted(f.name.removesuffix(".jsonl.gz").replace("_", "-") for f in _CORPORA.glob("*.jsonl.gz"))
            raise UserError(f"{path}: there is no such corpus; there are builtin:{', builtin:'.join(names)}")
        return [file]
    expanded = Path(path).expanduser()
    try:
        if expanded.is_file():
            return [expanded]
    except OSError as error:  # a name that is too long
        raise UserError(f"{path[:80]}: {error.strerror}") from None
    if expanded.is_dir():
        raise UserError(f"{path} is a folder; name its files, as in {path.rstrip('/')}/*.jsonl")
    files = sorted(Path(name) for name in glob.glob(str(expanded), recursive=True))
    if not files:
        raise UserError(f"{path}: no file matches" if glob.has_magic(path) else f"{path}: no such file")
    return [file for file in files if file.is_file()]


def _reader(file: Path) -> Callable[[Path], Iterator[_Record | Text]]:
    for suffix, reader in _READERS.items():
        if file.name.endswith(suffix):
            return reader
    raise UserError(f"{file}: cannot tell what it holds by its name; it should end in {', '.join(_READERS)}")


@contextmanager
def _reading(file: Path | str, *damage: type[Exception]) -> Iterator[None]:
    """A file that cannot be read, or is damaged, is the user's to mend."""
    faults: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error, *damage)
    try:
        yield
    except faults as error:
        raise UserError(f"{file} is damaged or cannot be read: {error}") from None


def _read_txt(file: Path) -> Iterator[Text]:
    """One document. Cutting alters no byte, and no token either where a line ends within the piece."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    text, first, position = "", True, 0
    with _reading(file), open(file, "rb") as stream:
        while block := stream.read(PIECE):
            text += _decoded(decoder, block, file, position)
            position += len(block)
            while len(text) > PIECE:
                cut = _cut(text)
                yield Text(str(file), text[:cut], first, last=False)
                text, first = text[cut:], False
    text += _decoded(decoder, b"", file, position)
    yield Text(str(file), text, first)


def _decoded(decoder: codecs.IncrementalDecoder, block: bytes, file: Path, position: int) -> str:
    pending = len(decoder.getstate()[0])
    try:
        return decoder.decode(block, final=not block)
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 at byte {position - pending + error.start + 1}") from None


def _cut(text: str) -> int:
    """Where to end a piece of at most PIECE characters: best between two lines with text, where no word goes on."""
    ends = [match.end() for match in _LINE_END.finditer(text, 0, PIECE + 1)]
    return ends[-1] if ends else text.rfind("\n", 0, PIECE) + 1 or PIECE


def _read_jsonl(file: Path, opener: Callable[..., Any] = open) -> Iterator[_Record]:
    with _reading(file), opener(file, "rb") as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                yield _Record(f"{file}:{number}", _json_object(line, f"{file}:{number}"))


def _read_jsonl_gz(file: Path) -> Iterator[_Record]:
    return _read_jsonl(file, gzip.open)


def _json_object(line: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line.removeprefix(codecs.BOM_UTF8).decode("utf-8"))
        if b"\\ud" in line.lower():  # an escaped half of a surrogate pair is JSON, but no text
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 at byte {error.start + 1} of the line") from None
    except UnicodeEncodeError:
        raise UserError(f"{where}: holds half of a surrogate pair, which is not a character") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not valid JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f'{where}: a line must hold an object such as {{"text": "..."}}, not {type(value).__name__}')
    return value


def _read_parquet(file: Path) -> Iterator[_Record]:
    pyarrow, parquet = _extra("pyarrow"), _extra("pyarrow.parquet")
    # A string column may hold bytes that are not UTF-8, a date one that Python cannot tell: found out value by value.
    with _reading(file, pyarrow.ArrowException, ValueError, OverflowError):
        rows = (row for batch in parquet.ParquetFile(file).iter_batches(1024) for row in batch.to_pylist())
        yield from (_Record(f"{file}: row {number}", row) for number, row in enumerate(rows, 1))


_READERS: dict[str, Callable[[Path], Iterator[_Record | Text]]] = {
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".jsonl.gz": _read_jsonl_gz,
    ".parquet": _read_parquet,
}


def _hugging_face(source: Source) -> Any:
    """The dataset behind ``hf:NAME``, or behind ``hf:FOLDER`` as ``save_to_disk`` or plain data files left it."""
    name = source.path.removeprefix("hf:")
    folder = Path(name).expanduser()
    fault = None if folder.is_dir() else _hub_fault()
    datasets = _extra("datasets")
    try:
        if any((folder / file).is_file() for file in ("state.json", "dataset_dict.json")):
            loaded = datasets.load_from_disk(str(folder))
            return loaded[source.split] if isinstance(loaded, dict) else loaded
        return datasets.load_dataset(str(folder) if folder.is_dir() else name, source.subset, split=source.split)
    except Exception as error:  # hubs, caches and loaders fail in more ways than can be listed
        why = f"{fault}, and the local cache does not have it" if fault else error
        raise UserError(f"{source.path}: cannot be loaded: {why}") from None


@lru_cache(1)
def _hub_fault() -> str | None:
    """Why the hub cannot be reached, if so: then its library is told to look at its cache alone, since otherwise it
    retries for half a minute, aloud, before it does so. Effective where that library is not imported yet."""
    from urllib.request import getproxies

    address = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    if os.environ.get("HF_HUB_OFFLINE") or address.scheme in getproxies():
        return None  # whether a proxy reaches it cannot be told from here
    try:
        port = address.port or (80 if address.scheme == "http" else 443)
        socket.create_connection((address.hostname or "", port), timeout=10).close()
    except (OSError, ValueError) as error:
        os.environ["HF_HUB_OFFLINE"] = "1"
        return f"{address.hostname} cannot be reached ({getattr(error, 'strerror', None) or error})"
    return None


def _extra(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        name = module.partition(".")[0]
        raise UserError(f"{name} is not installed; it comes with: pip install 'equigrad[data]'") from None
