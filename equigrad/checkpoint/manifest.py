"""The manifest of a checkpoint: what its files hold, and how to tell that they still hold it.

A checkpoint is a folder of ``rank-00000.safetensors``, ... and ``manifest.json``, which is written last. Every rank's
file holds that rank's boxes of the global tensors; the manifest says which, so files can be read in any layout.
Knows neither PyTorch nor process groups.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from equigrad.checkpoint.boxes import Box, tile
from equigrad.errors import UserError

FORMAT = 1
MANIFEST = "manifest.json"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class StoredFile(_Record):
    """Size in bytes and SHA-256 (hexadecimal) of a file."""

    size: int
    sha256: str


class StoredBox(_Record):
    """The file that holds a box (see ``boxes.Box``) of a tensor, under the tensor's name."""

    file: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class StoredTensor(_Record):
    """A global tensor and the boxes that make it up. ``dtype`` is PyTorch's name: "bfloat16"."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[StoredBox, ...]


class Manifest(_Record):
    """What a checkpoint holds.

    format:    version of the format
    step:      optimizer steps done when it was taken
    files:     by name
    tensors:   by name: "model.<parameter>", "optim.<state>.<parameter>"
    meta:      whatever the trainer keeps beside tensors (data cursor, counters, configuration)
    rank_meta: the same, of each rank that saved (random number generators)
    """

    format: int
    step: int
    files: dict[str, StoredFile]
    tensors: dict[str, StoredTensor]
    meta: dict[str, Any]
    rank_meta: tuple[dict[str, Any], ...]

    @model_validator(mode="after")
    def _stays_in_its_folder(self) -> "Manifest":
        """A manifest may come from anybody: it names files beside it, and no others."""
        if strange := [name for name in self.files if name in (".", "..") or set(name) & set("/\\\0:") or not name]:
            raise ValueError(f"{strange[0]!r} is not the name of a file in the checkpoint's folder")
        for name, tensor in self.tensors.items():
            if missing := [box.file for box in tensor.boxes if box.file not in self.files]:
                raise ValueError(f"{name} lies in {missing[0]!r}, which is not one of the checkpoint's files")
            # Or what is read would depend on the order in which boxes are.
            if not tile(tensor.shape, (Box(box.offset, box.shape) for box in tensor.boxes)):
                raise ValueError(f"the boxes of {name} {list(tensor.shape)} overlap or leave a gap")
        return self


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Writes the manifest of the checkpoint ``path`` and waits until it is on the disk."""
    body = manifest.model_dump()
    with open(path / MANIFEST, "w", encoding="utf-8") as file:
        json.dump({**body, "sha256": _seal(body)}, file)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint ``path``.

    Raises: UserError if there is none, or if it is damaged or of a newer format.
    """
    file = path / MANIFEST
    try:
        body = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path} is not a checkpoint: it has no {MANIFEST}") from None
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is damaged: not valid JSON ({error})") from error
    version = body.get("format") if isinstance(body, dict) else None
    if type(version) is not int or version < 1:
        raise UserError(f"{file} is not the manifest of a checkpoint: it has no format version")
    if version > FORMAT:
        raise UserError(f"{file} has format {version}, of a newer equigrad; this one reads formats up to {FORMAT}")
    if body.pop("sha256", None) != _seal(body):
        raise UserError(f"{file} is damaged: it was changed after it had been written")
    try:
        return Manifest.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{file} is damaged: {where}{': ' * bool(where)}{first['msg']}") from None


def newer_format(path: Path) -> int | None:
    """The format of the checkpoint ``path`` where it is a newer one than this equigrad reads, else None."""
    try:
        version = json.loads((path / MANIFEST).read_bytes())["format"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return version if isinstance(version, int) and version > FORMAT else None


def verify(path: Path, share: int = 0, of: int = 1) -> Manifest:
    """Checks that every file is there in full, and the hashes of this caller's share: of n callers, file i is read by
    caller i mod n.

    Raises: UserError naming the file and what is wrong with it.
    """
    manifest = read_manifest(path)
    for index, (name, stored) in enumerate(sorted(manifest.files.items())):
        check_file(path / name, stored, hashed=index % of == share)
    return manifest


def check_file(file: Path, stored: StoredFile, hashed: bool) -> None:
    """Raises: UserError if the file does not have the size, or (``hashed``) the bytes, that were written."""
    try:
        size = file.stat().st_size
        if size != stored.size:
            raise UserError(f"{file} is damaged: it has {size} bytes, {stored.size} were written")
        if hashed:
            with open(file, "rb") as content:
                if hashlib.file_digest(content, "sha256").hexdigest() != stored.sha256:
                    raise UserError(f"{file} is damaged: its bytes are not those that were written (SHA-256)")
    except FileNotFoundError:
        raise UserError(f"{file} is missing from the checkpoint") from None
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from error


def _seal(body: dict[str, Any]) -> str:
    """SHA-256 of the manifest's other entries. Python writes floats so that they are read back exactly."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
