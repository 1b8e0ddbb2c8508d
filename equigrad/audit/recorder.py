"""Writes the trajectory of a run while it trains, and goes on with it where the run goes on."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from equigrad import __version__
from equigrad.audit import trajectory
from equigrad.audit.trajectory import SECTIONS, Contradiction, Line, Unverifiable, canonical, linked, sha
from equigrad.checkpoint.digest import tree
from equigrad.data.stream import Batch, Batches
from equigrad.errors import UserError
from equigrad.files import in_one_piece, writing
from equigrad.trainer import Trainer


def batch_digest(stream: Batches, batch: Batch) -> str:
    """SHA-256 of the samples in their order: of each one its streams by name, little-endian behind a line that tells
    name, type and length."""
    found = hashlib.sha256()
    for ref in batch.samples:
        for name, values in sorted(stream.read(ref).streams.items()):
            whole = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
            found.update(f"{name} {whole.dtype.kind}{whole.itemsize} {len(whole)}\n".encode())
            found.update(whole.data)
    return found.hexdigest()


def data_digests(stream: Batches) -> list[str]:
    """Of the tokens of each source of training data."""
    return [source["digest"] for source in stream.cursor()["sources"]]


def line_of(
    trainer: Trainer, tensors: bool, record: Mapping[str, Any] | None = None, batch: Batch | None = None
) -> Line:
    """The line of the step that was just done, without its chain; a collective, the same on every rank.

    tensors: whether they are digested. Without ``record`` and ``batch`` it is a state that no step has led to.
    """
    cursor, counters = trainer.stream.cursor(), trainer.counters
    progress = {key: counters[key] for key in ("tokens", "skipped", "skipped_in_a_row")}
    progress["updates"] = trainer.optimizer.updates
    progress["sources"] = [[source["samples"], source["tokens"]] for source in cursor["sources"]]
    return {
        "format": trajectory.FORMAT,
        "kind": "step",
        "step": trainer.step,
        "job": sha(trajectory.settings(trainer.job)),
        "data": data_digests(trainer.stream),
        "batch": batch and batch_digest(trainer.stream, batch),
        "loss": record and record["loss"].hex(),
        "grad_norm": record and record["grad_norm"].hex(),
        **(_sections(trainer) if tensors else dict.fromkeys(SECTIONS)),
        "progress": progress,
    }


def _sections(trainer: Trainer) -> Line:
    """The digest trees of all tensors that a checkpoint holds."""
    state, found = trainer.state(), {}
    for section, prefix in SECTIONS.items():
        own = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
        found[section] = tree(own)._asdict()
    return found


class Recorder:
    """Appends to ``trajectory.jsonl`` of a run; made and called by all ranks alike, written by the first."""

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        """Go on after the trainer's step, or begin with it. ``UserError`` where the file is not this run's."""
        self._trainer, self._path, self._chain = trainer, folder / trajectory.NAME, ""
        now = line_of(trainer, tensors=True)
        trainer.world.run_where(trainer.world.is_main, lambda: self._begin(now))

    def step(self, record: Mapping[str, Any], batch: Batch) -> None:
        """After a step."""
        trainer = self._trainer
        due = trainer.step % trainer.job.audit.every == 0 or trainer.step == trainer.job.train.steps
        line = line_of(trainer, due, record, batch)
        if trainer.world.is_main:
            self._append(line)

    def _begin(self, now: Line) -> None:
        path, step = self._path, now["step"]
        held, end = ("", ""), 0
        if step and path.exists():
            held, end = self._kept(now)
        with writing(path):
            if end:
                with path.open("r+b") as file:
                    file.truncate(end)
            else:
                self._chain = ""
                if step and path.exists():  # it ends elsewhere: what lies between was not recorded
                    path.replace(path.with_name(f"trajectory-before-{step:08d}.jsonl"))
                with in_one_piece(path) as aside:
                    aside.touch()
        if held != (now["job"], __version__):
            job = {"kind": "job", "settings": trajectory.settings(self._trainer.job), "version": __version__}
            self._append({key: now[key] for key in ("format", "step", "job")} | job)
        if not end:
            self._append(now)

    def _kept(self, now: Line) -> tuple[tuple[str, str], int]:
        """Of the lines up to this step, the job and version that hold and where they end; 0 where none is of this
        step."""
        held, end, last = ("", ""), 0, None
        try:
            for line, stop in trajectory.lines(self._path):
                if line["step"] > now["step"]:
                    break
                held = (line["job"], line["version"] if line["kind"] == "job" else held[1])
                end, self._chain = stop, line["chain"]
                last = line if line["step"] == now["step"] and line["kind"] == "step" else last
            if last is None:
                return ("", ""), 0
            if where := trajectory.compare(last, now, state=True):
                raise Contradiction(now["step"], where, "the checkpoint is not the state that it tells of")
        except (Contradiction, Unverifiable) as error:
            where = f", step {error.step}, {error.field}" if isinstance(error, Contradiction) else ""
            raise UserError(
                f"{self._path}{where}: {error}; move the file away to begin another one, or go on without"
                " (--audit.enabled false)"
            ) from None
        return held, end

    def _append(self, line: Line) -> None:
        line = linked(self._chain, line)
        with writing(self._path), self._path.open("ab") as file:
            file.write(canonical(line) + b"\n")
        self._chain = line["chain"]
