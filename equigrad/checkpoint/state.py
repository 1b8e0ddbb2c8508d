"""Saves and loads the state of a run: named tensors in whatever layout, and JSON for the rest.

Tensors come as one flat mapping of names, ``model.<parameter>`` and ``optim.<state>.<parameter>``, to placed local
tensors. Knows neither models nor optimizers, nor who holds what and why: placements say it all.
"""

import json
import secrets
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import safetensors
import torch
import torch.distributed as dist
from torch import Tensor

from equigrad.checkpoint.boxes import Box, claims
from equigrad.checkpoint.folder import commit, prepare, prune, temporary
from equigrad.checkpoint.manifest import (
    FORMAT,
    Manifest,
    StoredFile,
    StoredTensor,
    check_file,
    read_manifest,
    verify,
    write_manifest,
)
from equigrad.config.checkpoint import Checkpoint
from equigrad.errors import UserError
from equigrad.parallel.placement import Placed
from equigrad.parallel.ranks import SharedUserError, gather, rank_and_size, together


class Checkpointer:
    """Saves checkpoints of one run into ``folder``; made and called by all ranks alike.

    With ``config.asynchronous`` a save costs the step one copy of the local state into host memory, kept and used
    again by the next save. A thread writes it, and talks to other ranks over a process group of its own.
    """

    def __init__(self, folder: Path, config: Checkpoint) -> None:
        """Raises: UserError, on every rank, if the folder cannot be written."""
        self._folder, self._config = folder, config
        self._group = dist.new_group(backend="gloo") if dist.is_available() and dist.is_initialized() else None
        self._rank, _ = rank_and_size(self._group)
        self._run = gather(secrets.token_hex(4), self._group)[0]
        together(lambda: prepare(folder) if self._rank == 0 else None, self._group)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None
        self._buffers: dict[str, Tensor] = {}

    def save(
        self,
        step: int,
        tensors: Mapping[str, Placed],
        meta: Mapping[str, Any],
        rank_meta: Mapping[str, Any] | None = None,
    ) -> None:
        """Saves the state after ``step`` steps, replacing a checkpoint of that step, and removes those not to be kept.

        meta:      anything that JSON can hold, the same on every rank
        rank_meta: the same, of this rank
        Waits until the save before this one is done. Tensors may be changed as soon as this returns.
        Raises: UserError, on every rank, if this save (asynchronous: the one before it) could not be written. Earlier
        checkpoints are then intact.
        """
        self.wait()
        meta_now, rank_meta_now = json.loads(json.dumps([meta, rank_meta or {}]))
        if self._config.asynchronous:
            staged, copied = self._stage(tensors)
            self._pending = self._thread.submit(self._write, step, staged, meta_now, rank_meta_now, copied)
        else:
            self._write(step, tensors, meta_now, rank_meta_now)

    def wait(self) -> None:
        """Returns when the last save is on the disk. Raises: as ``save``."""
        if (pending := self._pending) is not None:
            wait([pending])  # interrupted here, it is still pending, and its buffers are not to be touched
            self._pending = None
            pending.result()

    def close(self) -> None:
        """Waits, and gives the buffers and the process group back. Raises: as ``save``."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._buffers = {}
            if self._group is not None:
                dist.destroy_process_group(self._group)

    def _stage(self, tensors: Mapping[str, Placed]) -> tuple[dict[str, Placed], torch.Event | None]:
        """Copies of what this rank is to write, and, where they are still under way, the event that ends them: what
        the device does next comes after the copies, so only the writing thread has to wait."""
        staged, buffers, copied = dict(tensors), {}, None
        for name, placed in tensors.items():
            if placed.placement.replica or not placed.placement.numel:
                continue
            source = placed.tensor.detach()
            buffer = self._buffers.get(name)
            if buffer is None or (buffer.shape, buffer.dtype) != (source.shape, source.dtype):
                buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=not source.is_cpu)
            buffers[name] = buffer.copy_(source, non_blocking=True)
            staged[name] = Placed(placed.placement, buffer)
        self._buffers = buffers
        if any(not placed.tensor.is_cpu for placed in tensors.values()):
            copied = torch.accelerator.current_stream().record_event()
        return staged, copied

    def _write(
        self,
        step: int,
        tensors: Mapping[str, Placed],
        meta: dict[str, Any],
        rank_meta: dict[str, Any],
        copied: torch.Event | None = None,
    ) -> None:
        from equigrad.checkpoint import storage

        if copied is not None:
            copied.synchronize()
        path = temporary(self._folder, step, self._run)

        def finish(
            files: dict[str, StoredFile], stored: dict[str, StoredTensor], rank_meta: list[dict[str, Any]]
        ) -> None:
            manifest = Manifest(
                format=FORMAT, step=step, files=files, tensors=stored, meta=meta, rank_meta=tuple(rank_meta)
            )
            write_manifest(path, manifest)
            commit(path, step)
            prune(self._folder, step, self._config.keep_last, self._config.keep_every)

        try:
            storage.write(path, tensors, rank_meta, finish, self._group)
        except UserError as error:
            raise SharedUserError(
                f"the checkpoint of step {step} could not be saved; earlier ones are intact. {error}"
            ) from error
        finally:
            if self._rank == 0:
                shutil.rmtree(path, ignore_errors=True)


def load(path: Path, tensors: Mapping[str, Placed], only: str = "", group: dist.ProcessGroup | None = None) -> Manifest:
    """Reads the checkpoint ``path`` into the local tensors, whatever layout saved it; a collective of ``group``.

    only: names with this prefix, of ``tensors`` and of the checkpoint ("model.": the weights without the optimizer)
    Returns the manifest: its ``meta`` and ``rank_meta`` are what was saved beside the tensors.
    Raises: UserError, on every rank alike, if the checkpoint is damaged or if its names, shapes or dtypes are not
    those of ``tensors``. No tensor has been changed then.
    """
    from equigrad.checkpoint import storage

    rank, size = rank_and_size(group)
    manifest = together(lambda: verify(path, rank, size), group)
    wanted = {name: placed for name, placed in tensors.items() if name.startswith(only)}
    stored = {name: f"{t.dtype} {list(t.shape)}" for name, t in manifest.tensors.items() if name.startswith(only)}
    here: dict[str, str] = {}
    for claimed in gather(claims(wanted), group):
        for name, claim in claimed.items():
            described = f"{claim.dtype} {list(claim.shape)}"
            if here.setdefault(name, described) == stored.get(name):
                here[name] = described  # so that a rank which differs is heard
    if here != stored:
        raise SharedUserError(f"{path} is a checkpoint of another architecture. {_differences(here, stored)}")
    storage.read(path, manifest, wanted, group)
    return manifest


def read_tensors(path: Path, prefix: str = "model.") -> Iterator[tuple[str, Tensor]]:
    """The whole tensors under ``prefix`` (removed from their names), in name order, made one by one; needs no ranks.

    Raises: UserError if the checkpoint is damaged, as far as sizes tell (``verify`` reads it all).
    """
    manifest = read_manifest(path)
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for name, stored in sorted(manifest.tensors.items()):
            if not name.startswith(prefix):
                continue
            whole = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
            for box in stored.boxes:
                if box.file not in files:
                    check_file(path / box.file, manifest.files[box.file], hashed=False)
                    opened = safetensors.safe_open(path / box.file, framework="pt")
                    files[box.file] = stack.enter_context(opened)
                part = files[box.file].get_tensor(name)
                if (part.dtype, part.shape) != (whole.dtype, box.shape):  # which would be stretched or rounded to fit
                    said = f"{stored.dtype} {list(box.shape)}"
                    raise UserError(f"{path / box.file} is damaged: {name} in it is not {said}, as the manifest says")
                whole[Box(box.offset, box.shape).slices] = part
            yield name.removeprefix(prefix), whole


def _differences(here: Mapping[str, str], stored: Mapping[str, str], most: int = 5) -> str:
    """A few of the names that two descriptions do not share, or describe differently."""
    groups = {
        "Missing from it": sorted(here.keys() - stored.keys()),
        "Not in this model": sorted(stored.keys() - here.keys()),
        "Different": [
            f"{name} ({stored[name]} in it, {here[name]} here)"
            for name in sorted(here.keys() & stored.keys())
            if here[name] != stored[name]
        ],
    }
    return " ".join(
        f"{what}: {', '.join(names[:most])}{f' and {len(names) - most} more' if len(names) > most else ''}."
        for what, names in groups.items()
        if names
    )
