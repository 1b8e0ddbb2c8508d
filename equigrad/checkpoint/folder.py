"""The folder of a run's checkpoints: which there are, how one enters it, which ones leave.

``step-00000010`` is there in full or not at all: it is written as ``.step-00000010.tmp-1f2e3d4c`` and renamed. One
that is being replaced is called ``step-00000010.old`` for a moment. Everything hidden is rubbish of a save that was
interrupted. Knows nothing of what is in a checkpoint, but that its manifest is written last.
"""

import os
import re
import secrets
import shutil
from pathlib import Path

from equigrad.checkpoint.manifest import MANIFEST
from equigrad.errors import UserError


def step_name(step: int) -> str:
    """The name of the checkpoint of ``step``."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """The step of a checkpoint's name. Raises: UserError if it is not the name of one."""
    if not (match := re.fullmatch(r"step-(\d{8,})(\.old)?", path.name)):
        raise UserError(f"{path} is not named like a checkpoint ({step_name(10)})")
    return int(match[1])


def list_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints, in the order of their steps. Nothing is changed, so tools may look at a live run."""
    named = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}(\.old)?", path.name)]
    names = [path for path in named if path.name.removesuffix(".old") == step_name(step_of(path))]
    names.sort(key=lambda path: path.suffix == "")  # so that an .old one gives way to its replacement
    found = {step_of(path): path for path in names if (path / MANIFEST).is_file()}
    return [found[step] for step in sorted(found)]


def latest(folder: Path) -> Path | None:
    """The checkpoint of the highest step, or None."""
    return next(reversed(list_checkpoints(folder)), None)


def prepare(folder: Path) -> None:
    """Makes the folder, or removes what an interrupted run left in it. No other run may be using it.

    Raises: UserError if the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary(folder, 0, secrets.token_hex(4)).mkdir()
        for path in folder.glob(".step-*.tmp-*"):
            shutil.rmtree(path)
        for aside in folder.glob("step-*.old"):
            replacement = aside.with_suffix("")
            if replacement.exists():
                remove(aside)
            else:
                aside.rename(replacement)
    except OSError as error:
        raise UserError(f"checkpoints cannot be written to {folder}: {error.strerror} ({error.filename})") from error


def temporary(folder: Path, step: int, run: str) -> Path:
    """Where the checkpoint of ``step`` is written; ``run`` tells runs apart, of which an earlier may still be dying."""
    return folder / f".{step_name(step)}.tmp-{run}"


def commit(written: Path, step: int) -> None:
    """Gives the complete checkpoint ``written`` its name. At every moment the old one or the new one is listed."""
    final = written.with_name(step_name(step))
    aside = final.with_name(final.name + ".old")
    _sync(written)
    if final.exists():
        final.rename(aside)
    written.rename(final)
    _sync(final.parent)
    if aside.exists():
        remove(aside)


def prune(folder: Path, saved: int, keep_last: int, keep_every: int) -> None:
    """Removes checkpoints before ``saved``, but for the ``keep_last`` latest (``saved`` is one of them) and every
    multiple of ``keep_every`` (0: none). Later ones belong to a history that the run has left; they are not ours.
    """
    earlier = [path for path in list_checkpoints(folder) if step_of(path) < saved]
    for path in earlier[: max(0, len(earlier) + 1 - keep_last)]:
        if not keep_every or step_of(path) % keep_every:
            remove(path)


def remove(path: Path) -> None:
    """Removes a checkpoint such that it is never seen in part."""
    hidden = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
    path.rename(hidden)
    shutil.rmtree(hidden)


def _sync(folder: Path) -> None:
    """Waits until the names in ``folder`` are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
