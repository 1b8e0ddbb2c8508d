"""Run folders: where a job's resolved form, tokenizer, checkpoints, metrics and report live.

    runs/<name>/
      job.toml        the resolved job
      tokenizer/      tokenizer.json and its configuration
      checkpoints/    step-00000100/ ...
      metrics.jsonl   one record a line
      rollouts.jsonl  what reinforcement learning trained on, some of it
      trajectory.jsonl  digests of every step, with audit.enabled
      summary.json    once the run has finished
      report.html

A run is never overwritten by accident. Torch-free.
"""

import errno
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pydantic import BaseModel

from equigrad.config import Job, dump_toml
from equigrad.config.load import make_job, override_value, parse_overrides, read_toml, set_key
from equigrad.errors import UserError
from equigrad.files import write_json, write_text, writing

# What a resumed run may not change: the meaning of its state.
_FIXED = ("seed", "model", "lora", "data", "numerics.kind", "optim.name")
_FREE = ("data.cache", "model.experts.router_aux_loss_coef", "model.mtp_loss_coef")
_LOCK = ".lock"
# What is shown of a summary; the rest may be anything.
_SUMMARY: dict[str, Any] = {"steps": int, "tokens": int, "wall_seconds": int | float, "parameter_digest": str}
_HELD_OUT: dict[str, Any] = {
    "held_out_loss": int | float, "held_out_bits_per_byte": int | float, "held_out_tokens": int, "held_out_bytes": int,
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A run folder and the names inside it."""

    folder: Path

    @property
    def job_file(self) -> Path:
        return self.folder / "job.toml"

    @property
    def tokenizer(self) -> Path:
        return self.folder / "tokenizer"

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def rollouts(self) -> Path:
        return self.folder / "rollouts.jsonl"

    @property
    def summary(self) -> Path:
        return self.folder / "summary.json"

    def exists(self) -> bool:
        """Whether a run has been started here."""
        return self.job_file.exists()

    def job(self) -> Job:
        """The resolved job of this run."""
        if not self.exists():
            raise UserError(f"{self.folder} is not a run folder: it has no job.toml")
        return make_job(read_toml(self.job_file), str(self.job_file))

    def check_free(self) -> None:
        """``UserError`` unless a new run may be started here."""
        if self.exists():
            raise UserError(
                f"{self.folder} already holds a run; --resume continues it, --run DIR chooses another folder"
            )
        if self.folder.exists() and (not self.folder.is_dir() or self._strangers()):
            raise UserError(f"{self.folder} exists and is not an empty folder; choose another one")
        folder = self.folder.absolute()
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            raise UserError(f"cannot write {self.folder}: {existing} is not a folder one may write into")

    def _strangers(self) -> bool:
        """Whether there is more than what a start that failed leaves behind."""
        names = {p.name for p in self.folder.iterdir()}
        saved = any((self.folder / "checkpoints").glob("step-*"))
        ours = not names or _LOCK in names  # a start locks the folder first: without a lock, all in it is the user's
        left = {_LOCK, "tokenizer", "checkpoints", "metrics.jsonl", "rollouts.jsonl", "tensorboard", "trajectory.jsonl"}
        return saved or not ours or not names <= left

    def clear(self) -> None:
        """Take away what a start that failed left behind."""
        with writing(self.folder):
            for name in ("tokenizer", "checkpoints", "tensorboard"):
                shutil.rmtree(self.folder / name, ignore_errors=True)

    def lock(self) -> IO[str]:
        """Hold the run for this process until the file returned is closed. ``UserError`` where another one holds it."""
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            held = (self.folder / _LOCK).open("a+")
        try:
            import fcntl

            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            pass  # no such locks on this system
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                why = f"{self.folder} cannot be locked ({error.strerror})"
                print(f"note: {why}; nothing keeps a second process out of it", file=sys.stderr)
                return held
            held.seek(0)
            owner = held.read().strip()
            held.close()
            raise UserError(f"{self.folder} is in use by another process ({owner})") from None
        held.truncate(0)
        held.write(f"process {os.getpid()} on {platform.node()}\n")
        held.flush()
        return held

    def forget_end(self) -> None:
        """Take away what a run leaves at its end: it goes on, and is not finished until it ends again."""
        for path in (self.summary, self.folder / "sample.json"):
            path.unlink(missing_ok=True)

    def write_job(self, job: Job) -> None:
        """Create the folder and write the resolved job, atomically."""
        write_text(self.job_file, dump_toml(job))

    def check_restart(self) -> None:
        """A run that is resumed without a checkpoint begins again. ``UserError`` where it had ended, and so had one."""
        if self.summary.exists():
            raise UserError(
                f"{self.folder} has ended once, as its summary.json says, but its checkpoints are gone; put them back,"
                " or start a new run elsewhere"
            )
        if self.metrics.exists():
            print(f"{self.folder} has no checkpoint: it begins again at step 1, and its records with it")

    def read_summary(self) -> dict[str, Any]:
        """``summary.json``. ``UserError`` where it cannot be read, or is no summary."""
        try:
            summary = json.loads(self.summary.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{self.summary} cannot be read: {error}; remove it to have it made again") from None
        held_out = isinstance(summary, dict) and summary.get("held_out_loss") is not None
        for key, kind in (_SUMMARY | _HELD_OUT if held_out else _SUMMARY).items():
            if not isinstance(summary, dict) or not isinstance(summary.get(key), kind):
                raise UserError(
                    f"{self.summary} is not the summary of a run: {key} is missing or wrong; remove it to have it made"
                    " again"
                )
        return dict(summary)

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write ``summary.json``, atomically."""
        write_json(self.summary, summary)


def resumed_job(run: Run, path: Path | None, overrides: Sequence[str]) -> Job:
    """The job to go on with: the run's own, under what a job file and overrides say. What they leave out stays as it
    was; what gives the run's state its meaning cannot change."""
    stored = run.job()
    tree = stored.model_dump(exclude_none=True)
    if path is not None:
        _overlay(tree, read_toml(path))
    origin: dict[str, str] = {}
    for key, text in parse_overrides(overrides):
        if key == "optim.preset":
            raise UserError("a preset gives a run its values at the start; change those of a resumed run one by one")
        set_key(tree, key, override_value(key, text), origin)
    job = make_job(tree, str(path or run.job_file), origin)
    changed = [key for key in _different(stored, job) if {key, key.split(".")[0]} & {*_FIXED} and key not in _FREE]
    if changed:
        raise UserError(f"{run.folder}: a resumed run cannot change {', '.join(changed)}; start a new run for that")
    return job


def _overlay(tree: dict[str, Any], upper: dict[str, Any]) -> None:
    for key, value in upper.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            _overlay(tree[key], value)
        else:
            tree[key] = value


def _different(a: BaseModel, b: BaseModel, prefix: str = "") -> Iterator[str]:
    """Dotted keys whose values differ."""
    for name in type(a).model_fields:
        x, y = getattr(a, name), getattr(b, name)
        if isinstance(x, BaseModel) and isinstance(y, BaseModel):
            yield from _different(x, y, f"{prefix}{name}.")
        elif x != y:
            yield prefix + name
