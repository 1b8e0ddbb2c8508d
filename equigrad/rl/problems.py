"""Which problems a run is trained on next, and the samples that were made of their rollouts: what a ``data.Stream`` is
to a trainer, in reinforcement learning."""

from collections.abc import Sequence
from typing import Any

from equigrad.config import Job
from equigrad.data.samples import Sample, SampleRef
from equigrad.data.stream import Batch, HeldOut
from equigrad.data.tokenizers import Tokenizer
from equigrad.errors import UserError
from equigrad.parallel.ranks import gather
from equigrad.parallel.world import World
from equigrad.rl.attempts import Attempts
from equigrad.rl.samples import Samples
from equigrad.rl.tasks.curriculum import State
from equigrad.rl.tasks.registry import Tasks


class ProblemStream:
    """
    curriculum: how hard problems are at present
    next:       the first problem that is not used yet
    """

    digests: Sequence[tuple[str, str]] = ()

    def __init__(self, job: Job, tokenizer: Tokenizer, world: World) -> None:
        """A collective. Raises ``UserError``, on all ranks, where a task cannot be made."""
        assert job.rl is not None
        config, seed = job.rl, job.seed
        self.tokenizer = tokenizer
        self._tasks: Tasks | None = world.run_where(world.is_main, lambda: Tasks(config, seed))
        self._attempts = self._tasks and Attempts(config, self._tasks, tokenizer, job.data.context, seed)
        self.curriculum: State = gather(self._tasks and self._tasks.begin())[0] or {}
        self.step, self.next = 0, config.warmup.problems if config.warmup.steps or config.warmup.keep else 0
        # What decides which problem has which number; a cursor is good only where all of it is the same.
        self._order = {"seed": seed, "warmup": self.next} | config.model_dump(
            include={"task", "wording", "chat", "held_out_every", "jsonl", *(choice.name for choice in config.task)}
        )
        self._made: Samples | None = None

    @property
    def attempts(self) -> Attempts:
        """Who makes attempts; on the main rank, which alone asks the tasks."""
        assert self._attempts is not None
        return self._attempts

    def take(self, made: Samples, step: int, following: int, curriculum: State) -> Batch:
        """The samples of a step; problems go on with ``following``."""
        self._made, self.step, self.next, self.curriculum = made, step, following, curriculum
        return made.batch(step)

    def read(self, ref: SampleRef) -> Sample:
        """A sample of the present step."""
        assert self._made is not None
        return self._made.read(ref)

    def next_batch(self) -> Batch:
        raise TypeError("problems become samples by a policy: the trainer makes them")

    def held_out(self, max_tokens: int | None = None) -> HeldOut:
        """No text is."""
        return HeldOut((), 0, 0, 0)

    def cursor(self) -> dict[str, Any]:
        """Where the stream stands, as JSON values."""
        state = {name: dict(standing) for name, standing in self.curriculum.items()}
        return {"step": self.step, "order": self._order, "sources": [], "problem": self.next, "curriculum": state}

    def seek(self, cursor: dict[str, Any]) -> None:
        """Stand where ``cursor`` was taken. Raises ``UserError`` where problems are not the same as then."""
        wrong = [
            f"{name} was {cursor['order'].get(name)} and is {now}"
            for name, now in self._order.items()
            if cursor["order"].get(name) != now
        ]
        if wrong:
            raise UserError(
                f"the problems are not those the run was trained on, so it cannot go on: {'; '.join(wrong)}"
            )
        self.step, self.next, self.curriculum = cursor["step"], cursor["problem"], cursor["curriculum"]

    def close(self) -> None:
        """End the processes of the tasks."""
        if self._tasks is not None:
            self._tasks.close()
