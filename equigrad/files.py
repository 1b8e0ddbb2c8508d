"""Writing files: in one piece, and with errors that say what could not be written."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from equigrad.errors import UserError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What goes wrong with a file or folder while it is written (a full disk, say) is a ``UserError``."""
    try:
        yield
    except OSError as error:
        at = f" ({error.filename})" if error.filename not in (None, str(path)) else ""
        raise UserError(f"cannot write {path}: {error.strerror or error}{at}") from None


@contextmanager
def in_one_piece(path: Path) -> Iterator[Path]:
    """A name beside ``path`` to write to; in the end it becomes ``path``. An error leaves ``path`` as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.tmp")
    try:
        yield aside
        aside.replace(path)
    except BaseException:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a file in one piece. ``UserError`` where the folder cannot be written."""
    if not path.name:
        raise UserError(f"cannot write {path}: not a file's name")
    with writing(path), in_one_piece(path) as aside:
        aside.write_text(text, encoding="utf-8")


def check_target(path: Path, untouched: Path | None = None) -> None:
    """``UserError`` where a file cannot be written to, or lies in the folder ``untouched``."""
    with writing(path):
        if path.is_dir() or not path.name:
            raise UserError(f"cannot write {path}: not a file's name")
        if untouched is not None and path.resolve().is_relative_to(untouched.resolve()):
            raise UserError(f"cannot write {path}: {untouched} is what is looked at, and stays as it is")
        existing = next(folder for folder in path.absolute().parents if folder.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            raise UserError(f"cannot write {path}: {existing} is not a folder one may write into")


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file in one piece."""
    write_text(path, json.dumps(value, indent=2) + "\n")
