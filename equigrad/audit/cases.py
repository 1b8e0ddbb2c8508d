"""One job run in several ways, each in processes of its own, and what they leave behind to be compared.

A case leaves a checkpoint after each of its steps, and one of the state before the first: parameters, moments and
other state as checkpoints hold them, and the gradients of the step before they were clipped, as ``grad.<parameter>``.
So it can be read whatever layout wrote it, and says which rank wrote what.
"""

import hashlib
import io
import json
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from equigrad.config import Job
from equigrad.config.load import make_job, read_toml, set_key
from equigrad.errors import UserError
from equigrad.parallel.launch import launch

FURTHER = ("mtp_loss", "balance_loss")
"""Figures that not every job has."""


@dataclass(frozen=True)
class Case:
    """A job and how it is run.

    name:    as it is shown
    keys:    of the job that it changes, dotted
    folder:  where its checkpoints go
    follows: the folder of another case, whose parameters it takes before each step; None: it has its own
    """

    name: str
    keys: Mapping[str, Any]
    folder: str
    follows: str | None = None

    @staticmethod
    def read(text: str) -> "Case":
        """A case as ``run_case`` hands it to a process. ``UserError`` for anything else."""
        try:
            return TypeAdapter(Case).validate_json(text)
        except ValidationError:
            raise UserError(
                f"--case {text!r} is no case: `equigrad verify` gives it to the processes that it starts; which cases"
                " there are, --layouts, --packings, --microbatches and --threads say"
            ) from None

    @property
    def steps(self) -> Path:
        """The folder of its checkpoints."""
        return Path(self.folder) / "checkpoints"

    def job(self, file: Path) -> Job:
        """The job of a file, changed. ``UserError`` where that is no job."""
        tree = read_toml(file)
        for key, value in self.keys.items():
            set_key(tree, key, value, {})
        return make_job(tree, self.name)


def run_case(case: Case, file: Path, steps: int) -> int:
    """Start the processes of a case, and wait for them. Returns the exit code; ``KeyboardInterrupt`` for a stop."""
    words = ["verify", str(file), "--steps", str(steps), "--case", json.dumps(asdict(case))]
    return launch(case.job(file).layout.world_size, words, stops=False)


def work(case: Case, file: Path, steps: int) -> int:
    """The part of one of those processes."""
    from equigrad.checkpoint.state import Checkpointer
    from equigrad.parallel.stop import StopRequest
    from equigrad.parallel.world import start
    from equigrad.prepare import give_state, prepare, trainer_class
    from equigrad.run import Run

    job = case.job(file)
    world = start(job.layout)
    run = Run(file.parent / "data")  # of all cases: they have one tokenizer
    with redirect_stdout(io.StringIO()):  # what the data is was told once, if at all
        job, _, stream = prepare(job, run, world, resume=True)

    class Watched(trainer_class(job)):  # type: ignore[misc]
        """Keeps the gradients of its last step."""

        def norm(self, gradients: Any) -> float:
            from equigrad.parallel.placement import Placed

            self.kept = {f"grad.{n}": Placed(g.placement, g.tensor.clone()) for n, g in gradients.items()}
            return super().norm(gradients)

    trainer = Watched(job, Path(case.folder), world, stream)
    give_state(trainer, None)
    config = job.checkpoint.model_copy(update={"asynchronous": False, "keep_last": steps + 1})
    saved = Checkpointer(Path(case.folder) / "checkpoints", config)
    saved.save(0, trainer.state(), {})
    stop = StopRequest()
    for step in range(1, steps + 1):
        if case.follows is not None:
            _follow(trainer, Path(case.follows) / "checkpoints", step - 1)
        record, _ = trainer.update(trainer.next_batch(stop), stop)
        figures = {key: float(record[key]).hex() for key in ("loss", "grad_norm", "lr", *FURTHER) if key in record}
        figures["redone"] = float(trainer.redone).hex()
        saved.save(step, trainer.state() | trainer.kept, figures | {"copies": unequal_copies(trainer.state())})
    saved.close()
    trainer.checkpointer.close()
    world.close()
    return 0


def _follow(trainer: Any, checkpoints: Path, step: int) -> None:
    """Take the parameters that another case had after ``step``, rounded to the type of these."""
    from equigrad.checkpoint.boxes import Box
    from equigrad.checkpoint.folder import step_name
    from equigrad.checkpoint.state import read_tensors

    for name, whole in read_tensors(checkpoints / step_name(step)):
        if (own := trainer.parameters.get(name)) is not None:
            own.tensor.copy_(whole[Box(own.placement.offset, own.placement.local_shape).slices])


def unequal_copies(tensors: Mapping[str, Any]) -> dict[str, list[int]]:
    """The tensors of which two ranks hold the same box with different bits, and the ranks that differ from the first;
    a collective."""
    from equigrad.parallel.ranks import gather

    own = {}
    for name, placed in tensors.items():
        at = placed.placement
        data = placed.tensor.detach().cpu().contiguous().numpy().tobytes()
        own[name, at.offset, at.local_shape] = hashlib.sha256(data).hexdigest()
    first: dict[Any, str] = {}
    unequal: dict[str, list[int]] = {}
    for rank, boxes in enumerate(gather(own)):
        for box, found in boxes.items():
            if first.setdefault(box, found) != found:
                unequal.setdefault(box[0], []).append(rank)
    return dict(sorted(unequal.items()))
