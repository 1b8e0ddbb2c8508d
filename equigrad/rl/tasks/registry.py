"""The tasks of a job: problems by place, what environments say, and verdicts.

Built-in tasks and JSONL files are run in this process: they are this package's own code, do an amount of work that is
linear in the completion, and run nothing that a model or a user wrote. Everything else goes to ``pool``.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from equigrad.config.rl import Rl
from equigrad.config.tasks import BUILT_IN, GYM, JSONL, TaskChoice
from equigrad.errors import UserError
from equigrad.rl.tasks import curriculum
from equigrad.rl.tasks.arithmetic import ArithmeticTask
from equigrad.rl.tasks.calculator import CalculatorTask
from equigrad.rl.tasks.countdown import CountdownTask
from equigrad.rl.tasks.curriculum import State
from equigrad.rl.tasks.draws import Draw
from equigrad.rl.tasks.format import FormatTask
from equigrad.rl.tasks.jsonl import JsonlTask
from equigrad.rl.tasks.mixture import Mixture
from equigrad.rl.tasks.pool import Outcome, Pool
from equigrad.rl.tasks.protocol import Conversation, Place, Problem, Question, Split, Task, Verdict, failure
from equigrad.rl.tasks.sequences import SequencesTask
from equigrad.rl.tasks.worker import perform

T = TypeVar("T")

_TASKS: dict[str, Callable[[Any, bool], Task]] = {
    "arithmetic": ArithmeticTask,
    "calculator": CalculatorTask,
    "countdown": CountdownTask,
    "format": FormatTask,
    "sequences": SequencesTask,
}


def own_task(choice: TaskChoice, config: Rl) -> Task | None:
    """The task that a name stands for, where its code is this package's; else None."""
    if choice.name in BUILT_IN:
        return _TASKS[choice.name](getattr(config, choice.name), config.wording == "long")
    return JsonlTask(choice.name, config.jsonl) if choice.name.endswith(JSONL) else None


def specification(choice: TaskChoice, config: Rl) -> dict[str, Any]:
    """What ``worker.make_task`` makes a task from."""
    kind = "gym" if choice.name.startswith(GYM) else "python"
    name, long = choice.name.removeprefix(GYM), config.wording == "long"
    return {"kind": kind, "name": name, "options": choice.options, "long": long}


class Tasks:
    """All tasks of a job. Close it, or use it as a context manager: it may have processes.

    A problem is a function of configuration, seed, split, index and level, so any process may make any of them; the
    next index is all that a cursor needs. Raises ``UserError`` for tasks that cannot be made.
    """

    def __init__(self, config: Rl, seed: int) -> None:
        self._config, self._seed = config, seed
        self.names = [choice.name for choice in config.task]
        self._own = {choice.name: own_task(choice, config) for choice in config.task}
        self._specs = {c.name: specification(c, config) for c in config.task if self._own[c.name] is None}
        self._mixture = Mixture([choice.weight for choice in config.task], seed)
        workers = (config.verify_workers, config.verify_timeout_s, config.verify_memory_mb)
        self._pool = Pool(*workers) if self._specs else None
        try:
            facts = {name: self._value(name, "facts", None) for name in self.names}
        except BaseException:
            self.close()
            raise
        self.levels = {name: max(found["levels"], 1) for name, found in facts.items()}
        """How many levels each task has."""
        self.stops = {name: tuple(found["stops"]) for name, found in facts.items()}
        """Of each task, what ends a turn of the model beside the end of its text."""

    def __enter__(self) -> "Tasks":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes at once. What they had to answer becomes a fault."""
        if self._pool is not None:
            self._pool.close()

    def begin(self) -> State:
        """The curriculum's state before the first step."""
        return curriculum.begin(self.levels, self._config.curriculum)

    def advance(self, state: State, results: Iterable[tuple[Problem, Verdict]]) -> State:
        """The curriculum's state after a step, from all its results in any order."""
        return curriculum.advance(state, results, self.levels, self._config.curriculum)

    def problem(self, index: int, state: State, split: Split = "train") -> Problem:
        """The problem at a place of a split; ``state`` is the curriculum's, and decides on the level of training
        problems. Raises ``UserError`` where the task gives none."""
        number, place = self._mixture.at(index)
        name = self.names[number]
        draw = Draw("level", name, split, self._seed, place)
        level = curriculum.level_of(draw, split, state[name], self.levels[name], self._config.curriculum)
        at = Place(name, split, self._seed, place, level, self._config.held_out_every)
        question = Question(*self._value(name, "question", vars(at)))
        prompt = question.prompt
        if self._config.chat and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt.strip()}]
        return Problem(
            f"{name}/{split}/{self._seed}/{place}/{level}", name, split, index, level, prompt, question.facts
        )

    def reply(self, conversation: Conversation, completion: str) -> "Future[Conversation]":
        """The conversation with one more turn of the model, and what the environment says to it. It has ended where
        that is nothing, where the model had all its turns, or by a fault."""
        said = conversation.said("model", completion)
        if sum(turn.author == "model" for turn in said.turns) >= self._config.max_turns:
            return _done(replace(said, ended=True))

        def heard(outcome: Outcome) -> Conversation:
            if outcome.fault is not None or outcome.value is None:
                return replace(said, ended=True, fault=outcome.fault and f"the environment failed: {outcome.fault}")
            return said.said("environment", outcome.value)

        return self._call(said.problem.task, "reply", said.to_json(), heard)

    def verify(self, conversation: Conversation) -> "Future[Verdict]":
        """What a conversation is worth. Whatever happens to the verifier, there is a verdict."""
        if conversation.fault is not None:
            return _done(failure(conversation.fault))

        def judged(outcome: Outcome) -> Verdict:
            return Verdict(**outcome.value) if outcome.fault is None else failure(f"verifier: {outcome.fault}")

        return self._call(conversation.problem.task, "verify", conversation.to_json(), judged)

    def solution(self, problem: Problem) -> tuple[str, ...]:
        """What a model that knows the answer says, turn by turn; () where the task does not tell."""
        return tuple(self._value(problem.task, "solution", vars(problem)))

    def _value(self, name: str, call: str, argument: Any) -> Any:
        """What a task must be able to give."""
        outcome = self._call(name, call, argument, lambda outcome: outcome).result()
        if outcome.fault is not None:
            raise UserError(f"task {name}: {outcome.fault}")
        return outcome.value

    def _call(self, name: str, call: str, argument: Any, then: Callable[[Outcome], T]) -> "Future[T]":
        own = self._own[name]
        if own is not None:
            return _done(then(Outcome(perform(own, call, argument))))
        assert self._pool is not None
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # it cannot be taken back

        def finish(asked: "Future[Outcome]") -> None:
            try:
                future.set_result(then(asked.result()))
            except Exception as error:
                future.set_exception(error)

        self._pool.submit(self._specs[name], call, argument).add_done_callback(finish)
        return future


def _done(value: T) -> "Future[T]":
    future: Future[T] = Future()
    future.set_result(value)
    return future
