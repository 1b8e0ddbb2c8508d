"""Where the records of a run go: ``metrics.jsonl``, and by choice TensorBoard and Weights & Biases.

A record is a flat dictionary with ``kind`` ("step" or "eval"), ``step`` and numbers. Sinks take what they are given:
they neither compute a metric nor know how one is computed, and they know nothing of ranks. Only rank 0 opens them.
"""

import json
import math
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, Self

from equigrad.config import Job
from equigrad.errors import UserError
from equigrad.files import in_one_piece

Record = Mapping[str, Any]


class Sink(Protocol):
    """Something that records go to. ``close`` ends it; nothing is logged after that."""

    def log(self, record: Record) -> None: ...

    def close(self) -> None: ...


class Sinks:
    """Several sinks as one; a context manager that closes all of them, also where one of them fails to close."""

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self._sinks = list(sinks)

    def log(self, record: Record) -> None:
        for sink in self._sinks:
            sink.log(record)

    def close(self) -> None:
        with ExitStack() as stack:
            for sink in self._sinks:
                stack.callback(sink.close)
        self._sinks = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_sinks(job: Job, folder: Path, resume_step: int | None = None, *more: Sink) -> Sinks:
    """The sinks that ``job.observe`` asks for, writing into the run folder, and ``more`` (a progress line, say).

    ``resume_step`` is the step of the checkpoint that the run continues from; None starts the run's records over.
    """
    sinks: list[Sink] = [MetricsLog(folder / "metrics.jsonl", resume_step)]
    if job.observe.tensorboard:
        sinks.append(TensorBoardSink(folder / "tensorboard", resume_step))
    if job.observe.wandb_project is not None:
        sinks.append(WandbSink(job, folder, resume_step))
    return Sinks([*sinks, *more])


class MetricsLog:
    """JSON lines, one record each, of metrics or of rollouts. A kill leaves at most one broken line, the last.

    JSON has no NaN and no infinity: such a value is written as null, and ``non_finite`` says which it was::

        {"kind": "step", "step": 7, "loss": null, "lr": 0.001, "non_finite": {"loss": "nan"}}
    """

    def __init__(self, path: Path, resume_step: int | None = None) -> None:
        """Go on after ``resume_step``: later records are cut off, as their steps will be logged again.

        None starts the file over.
        """
        kept = [] if resume_step is None else [r for r in read_metrics(path) if r.get("step", 0) <= resume_step]
        with in_one_piece(path) as aside:
            aside.write_text("".join(map(_to_line, kept)), encoding="utf-8")
        self._path = path
        self._file = path.open("a", encoding="utf-8", buffering=1)  # line-buffered: one write per line

    def log(self, record: Record) -> None:
        self._file.write(_to_line(record))

    def close(self) -> None:
        """``UserError`` where a line that could not be written (the disk is full) still cannot be."""
        try:
            self._file.close()
        except OSError as error:
            raise UserError(f"cannot write {self._path}: {error.strerror or error}") from None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a ``metrics.jsonl`` as they were logged, NaN and infinities included; [] if there is no file.

    A broken last line, as a kill leaves it, is passed over. Raises ``UserError`` for any other broken line.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines()
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(_from_line(line))
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            if number < len(lines):
                raise UserError(f"{path}:{number}: not a record of a run: {line[:80]!r}") from None
    return records


def _to_line(record: Record) -> str:
    bad = {k: str(v) for k, v in record.items() if isinstance(v, float) and not math.isfinite(v)}
    extra = {"non_finite": bad} if bad else {}
    return json.dumps({**record, **dict.fromkeys(bad), **extra}, allow_nan=False) + "\n"


def _from_line(line: bytes) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(line)
    if not isinstance(record["step"], int):
        raise TypeError("a record's step is a whole number")
    record |= {key: float(value) for key, value in record.pop("non_finite", {}).items()}
    return record


def _numbers(record: Record) -> Iterator[tuple[str, float]]:
    """Every number of a record, named ``kind/key`` as TensorBoard and W&B group them."""
    for key, value in record.items():
        if key != "step" and isinstance(value, int | float):
            yield f"{record['kind']}/{key}", value


class TensorBoardSink:
    """TensorBoard event files. On resume, events after ``resume_step`` are hidden from view."""

    def __init__(self, folder: Path, resume_step: int | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError(
                "observe.tensorboard = true needs TensorBoard: pip install 'equigrad[tensorboard]', or set it to false"
            ) from None
        self._writer = SummaryWriter(str(folder), purge_step=0 if resume_step is None else resume_step + 1)

    def log(self, record: Record) -> None:
        for name, value in _numbers(record):
            self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A run of a Weights & Biases project, its configuration the job.

    The run's id is kept in ``wandb-id`` in the run folder, so a resumed job goes on in the same W&B run. W&B keeps
    the first value it sees for a step and passes over the steps that are logged again after a resume.
    """

    def __init__(self, job: Job, folder: Path, resume_step: int | None = None) -> None:
        try:
            import wandb
        except ImportError:
            raise UserError(
                "observe.wandb_project needs Weights & Biases: pip install 'equigrad[wandb]', or leave the key out"
            ) from None
        id_file = folder / "wandb-id"
        if resume_step is None or not id_file.exists():
            id_file.write_text(secrets.token_hex(4), encoding="utf-8")
        self._run = wandb.init(
            project=job.observe.wandb_project,
            name=job.name,
            id=id_file.read_text(encoding="utf-8"),
            resume="allow",
            dir=str(folder),
            config=job.model_dump(mode="json"),
        )

    def log(self, record: Record) -> None:
        self._run.log(dict(_numbers(record)), step=record["step"])

    def close(self) -> None:
        self._run.finish()
