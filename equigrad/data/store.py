"""A tokenised source on disk: built once, streaming, and memory-mapped afterwards. Knows nothing of contexts or splits.

``<cache>/<key>/`` holds raw little-endian arrays and ``meta.json``. The key covers everything that decides the
contents, so a store never goes stale; a changed source simply has another key.
"""

import errno
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from equigrad.config.data import Source
from equigrad.data.encoding import Encoded, encode
from equigrad.data.sources import documents, fingerprint
from equigrad.data.tokenizers import Tokenizer
from equigrad.errors import UserError

VERSION = 1  # of the files and of what documents become; part of the key

_UNFINISHED = ".unfinished-"
_STALE_SECONDS = 3600

OnProgress = Callable[[str, int, int], None]
"""Called while a store is built with the source's path and the documents and tokens so far."""


class Store:
    """The sequences s of all documents, end to end. Arrays are read-only memory maps.

    Worked example, bytes with EOS: the documents "ab" and "" are tokens [256, 97, 98, 256, 256, 256], offsets
    [0, 4, 6], bytes [2, 0] and no loss.
    """

    tokens: np.ndarray
    """uint16 or uint32 [N]."""
    offsets: np.ndarray
    """int64 [D + 1]: document d is tokens[offsets[d] : offsets[d + 1]]."""
    bytes: np.ndarray
    """int64 [D]: UTF-8 bytes of each document's text that is in the loss."""
    loss: np.ndarray | None
    """uint8 [N], fine-tuning sources only: 1 where the token is in the loss as a label; a first token never is."""
    digest: str
    """SHA-256 of the arrays."""

    def __init__(self, folder: Path) -> None:
        """Map a finished store; ``OSError`` or ``ValueError`` where it is missing or damaged."""
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        arrays = {name: _map(folder / f"{name}.bin", *shape) for name, shape in meta["arrays"].items()}
        self.tokens, self.offsets, self.bytes = arrays["tokens"], arrays["offsets"], arrays["bytes"]
        self.loss = arrays.get("loss")
        self.digest = meta["digest"]


def open_store(
    source: Source, tokenizer: Tokenizer, append_eos: bool, cache: Path, progress: OnProgress | None = None
) -> Store:
    """The store of a source, built first where the cache does not have it whole.

    Any number of processes may do this at once. Raises ``UserError`` for what is wrong with the source, a source with
    nothing to learn, and a cache that cannot be written.
    """
    folder = cache / _key(source, tokenizer, append_eos)
    store = _intact(folder)
    if store is not None:
        return store
    batches = encode(documents(source), tokenizer, append_eos)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        prefix = f"{folder.name}{_UNFINISHED}"
        with _building(cache), tempfile.TemporaryDirectory(prefix=prefix, dir=cache) as work:
            _write(Path(work) / "store", batches, source, tokenizer, progress)
            return _install(Path(work) / "store", folder)
    except OSError as error:
        raise UserError(
            f"cannot write tokenised data to {cache}: {error.strerror or error};"
            " set data.cache or $EQUIGRAD_CACHE to a folder that has room"
        ) from None


@contextmanager
def _building(cache: Path) -> Iterator[None]:
    """Hold the cache as one of those that build in it, and first take away what killed builds have left.

    Only where nobody holds it, and where nothing was written for an hour: locks of some network file systems are seen
    by one machine alone.
    """
    try:
        import fcntl
    except ImportError:  # no such locks on this system: everything stays
        yield
        return
    held = os.open(cache, os.O_RDONLY)
    try:
        with suppress(OSError):  # somebody builds
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for left in cache.glob(f"*{_UNFINISHED}*"):
                if time.time() - max(path.stat().st_mtime for path in (left, *left.rglob("*"))) > _STALE_SECONDS:
                    shutil.rmtree(left, ignore_errors=True)
        with suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_SH)
        yield
    finally:
        os.close(held)


def cache_folder(configured: str | None) -> Path:
    """Where stores live: ``data.cache``, else ``$EQUIGRAD_CACHE``, else ``~/.cache/equigrad``."""
    return Path(configured or os.environ.get("EQUIGRAD_CACHE") or "~/.cache/equigrad").expanduser()


def _key(source: Source, tokenizer: Tokenizer, append_eos: bool) -> str:
    decides = [VERSION, fingerprint(source), tokenizer.digest, tokenizer.chat_template, append_eos]
    return hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:32]


def _map(file: Path, dtype: str, count: int) -> np.ndarray:
    if file.stat().st_size != count * np.dtype(dtype).itemsize:
        raise ValueError(f"{file} does not have the size its meta.json tells")
    return np.asarray(np.memmap(file, dtype, mode="r", shape=(count,)))


def _intact(folder: Path) -> Store | None:
    try:
        return Store(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _install(built: Path, folder: Path) -> Store:
    """Give a finished build its name at once and whole. Where another process was faster, its equal store stays."""
    for attempt in range(100):
        try:
            built.rename(folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        store = _intact(folder)
        if store is not None:
            return store
        with suppress(FileNotFoundError):  # another process may have put it aside
            folder.rename(built.with_name(f"damaged-{attempt}"))  # goes with the temporary folder
    raise OSError(f"{folder} keeps being damaged")


def _write(
    folder: Path,
    batches: Iterator[list[Encoded]],
    source: Source,
    tokenizer: Tokenizer,
    progress: OnProgress | None,
) -> None:
    folder.mkdir()
    first = next(batches)  # a source without documents has raised by now
    dtypes = {"tokens": "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4", "offsets": "<i8", "bytes": "<i8"}
    if first[0].loss is not None:
        dtypes["loss"] = "u1"
    with ExitStack() as stack:
        columns = {n: stack.enter_context(_Column(folder / f"{n}.bin", dtype)) for n, dtype in dtypes.items()}
        learned = _fill(columns, chain([first], batches), source.path, progress)
    if not learned:
        count = columns["bytes"].count
        raise UserError(f"{source.path}: nothing to learn: none of its {count} documents has text in the loss")
    arrays = {name: [c.dtype, c.count] for name, c in columns.items()}
    digest = hashlib.sha256(json.dumps([[n, c.dtype, c.digest] for n, c in sorted(columns.items())]).encode())
    meta = {"version": VERSION, "source": source.path, "tokenizer": tokenizer.digest, "digest": digest.hexdigest()}
    with open(folder / "meta.json", "w", encoding="utf-8") as file:
        json.dump(meta | {"arrays": arrays}, file, indent=1)
        _sync(file)


def _fill(
    columns: "dict[str, _Column]", batches: Iterator[list[Encoded]], path: str, progress: OnProgress | None
) -> bool:
    """Append all documents to the columns; whether any byte is in the loss."""
    columns["offsets"].write([0])
    end = size = total = 0
    for batch in batches:
        ends, sizes = [], []
        for piece in batch:
            end += len(piece.ids)
            size += piece.bytes
            total += piece.bytes
            if piece.last:
                ends.append(end)
                sizes.append(size)
                size = 0
        columns["tokens"].write(np.concatenate([piece.ids for piece in batch]))
        if "loss" in columns:
            columns["loss"].write(np.concatenate([piece.loss for piece in batch if piece.loss is not None]))
        columns["offsets"].write(ends)
        columns["bytes"].write(sizes)
        if progress is not None:
            progress(path, columns["bytes"].count, end)
    return total > 0


class _Column:
    """A one-dimensional array that grows on disk, with the digest of its bytes."""

    def __init__(self, path: Path, dtype: str) -> None:
        self.dtype, self.count = dtype, 0
        self._file = open(path, "wb")  # noqa: SIM115 (closed by __exit__)
        self._hash = hashlib.sha256()

    def write(self, values: Any) -> None:
        raw = np.asarray(values).astype(self.dtype).tobytes()
        self._file.write(raw)
        self._hash.update(raw)
        self.count += len(values)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def __enter__(self) -> "_Column":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._file:
            if kind is None:
                _sync(self._file)


def _sync(file: Any) -> None:
    """After a power cut a renamed file must not be longer than what of it reached the disk."""
    file.flush()
    os.fsync(file.fileno())
