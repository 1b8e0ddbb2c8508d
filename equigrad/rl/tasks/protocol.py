"""The records that tasks, rollouts and training share, and the class that every task derives from. All are JSON data.

A ``Task`` is an endless list of problems with a verifier. Problem and conversation go to the task as arguments, and it
keeps nothing between calls: any process can continue a conversation that another one began, or judge it again.

Worked example, a model with a calculator:

    Problem       prompt "37*48+5 = ?"
    Turn          model        "<calc>37*48+5</calc>"
    Turn          environment  "<result>1781</result>"     (not trained on)
    Turn          model        "1781"
    Verdict       reward 1.0, reason "1781 is right", parts {"format": 1.0, "correct": 1.0}
"""

import json
import math
import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, Literal, NamedTuple, TypeAlias

from equigrad.errors import UserError
from equigrad.rl.tasks.draws import Draw, is_held_out

Split: TypeAlias = Literal["train", "held_out"]
Prompt: TypeAlias = str | list[dict[str, str]]
"""Text that the model continues, or the messages of a chat, ``{"role": "user", "content": "Hi"}``."""

MOST_TEXT = 2000
"""Characters of a reason that are kept."""
MOST_PARTS = 64
MOST_DRAWS = 10_000
"""Problems looked at for one that belongs to a split. Where one in ten does, more are needed once in 10^457 times."""


@dataclass(frozen=True)
class Problem:
    """Something to solve. ``registry.Tasks.problem`` makes it from seed, split, index and level, without any other."""

    id: str
    """Unique among the problems of all seeds, splits and levels of a job."""
    task: str
    """The task's name in the configuration."""
    split: Split
    index: int
    """Its place in the split."""
    level: int
    """Difficulty, from 0."""
    prompt: Prompt
    facts: Mapping[str, Any]
    """What the verifier must know and the model may not: JSON data."""


class Turn(NamedTuple):
    """What one side said. Only what the model wrote is trained on."""

    author: Literal["model", "environment"]
    text: str


@dataclass(frozen=True)
class Conversation:
    """A problem and what was said about it so far, the model and the environment in turns."""

    problem: Problem
    turns: tuple[Turn, ...] = ()
    ended: bool = False
    """Whether the model has nothing more to say."""
    fault: str | None = None
    """What went wrong in the environment, if anything; then it has ended, and no verdict on the model is possible."""

    @property
    def completion(self) -> str:
        """What the model said last, "" before it said anything."""
        return next((turn.text for turn in reversed(self.turns) if turn.author == "model"), "")

    def said(self, author: Literal["model", "environment"], text: str) -> "Conversation":
        """The conversation with one more turn."""
        return replace(self, turns=(*self.turns, Turn(author, text)))

    def to_json(self) -> dict[str, Any]:
        """JSON data that ``from_json`` reads back; the facts are shared, not copied."""
        return {**vars(self), "problem": vars(self.problem), "turns": [list(turn) for turn in self.turns]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Conversation":
        """The conversation that ``to_json`` wrote."""
        turns = tuple(Turn(*turn) for turn in data["turns"])
        return cls(Problem(**data["problem"]), turns, data["ended"], data["fault"])


@dataclass(frozen=True)
class Verdict:
    """What a conversation is worth."""

    reward: float
    reason: str = ""
    """Why, in words for a reader of the rollouts."""
    failed: bool = False
    """The verifier raised, hung, died or gave no finite number: nothing is known of the answer, and ``reward`` is 0."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named aspects of the answer, for statistics."""


class Question(NamedTuple):
    """What a task makes up; with its place it becomes a ``Problem``."""

    prompt: Prompt
    facts: Mapping[str, Any]
    key: str | None = None
    """Questions with equal keys are never in different splits; by default the prompt is the key."""


@dataclass(frozen=True)
class Place:
    """Where a question is in a task's endless list."""

    task: str
    split: Split
    seed: int
    index: int
    level: int
    held_out_every: int
    """About one question in so many is held out."""

    def holds(self, key: str) -> bool:
        """Whether what has this key belongs to the split."""
        return is_held_out(key, self.held_out_every) == (self.split == "held_out")


class Task(ABC):
    """Questions and a verifier. Subclasses have ``draw`` and ``verify``, and ``reply`` for conversations."""

    levels: int = 1
    """Number of difficulties; the curriculum moves from 0 to ``levels - 1``."""
    stops: tuple[str, ...] = ()
    """What ends a turn of the model, beside the end of its text; the turn includes it."""

    @abstractmethod
    def draw(self, draw: Draw, level: int) -> Question:
        """A question of this difficulty. Whatever is random in it must come from ``draw``."""

    @abstractmethod
    def verify(self, conversation: Conversation) -> Verdict | float | tuple[float, str]:
        """What the conversation is worth: a verdict, a reward, or a reward and the reason for it."""

    def reply(self, conversation: Conversation) -> str | None:
        """What the environment says to the model's last turn; None where the conversation ends with it."""
        return None

    def solution(self, question: Question | Problem) -> tuple[str, ...]:
        """What a model that knows the answer says, turn by turn; () where no answer is known."""
        return ()

    def question(self, at: Place) -> Question:
        """The question at a place: the first drawn there that belongs to the split."""
        for attempt in range(MOST_DRAWS):
            draw = Draw(at.task, at.split, at.seed, at.index, at.level, attempt)
            question = check_question(self.draw(draw, at.level))
            if at.holds(key_of(question)):
                return question
        raise UserError(
            f"task {at.task}: none of {MOST_DRAWS} questions drawn at level {at.level} belongs to the split"
            f" {at.split!r}; it has too few different ones for rl.held_out_every = {at.held_out_every}"
        )


def key_of(question: Question) -> str:
    """What decides the split of a question."""
    if question.key is not None:
        return question.key
    return question.prompt if isinstance(question.prompt, str) else json.dumps(question.prompt)


def check_question(given: Any) -> Question:
    """The question that a task gave. Raises ``ValueError`` where it is none, or could not be written down as JSON."""
    if not isinstance(given, tuple) or not 2 <= len(given) <= 3:
        raise ValueError(f"a question is made of a prompt and facts, not {_shown(given)}")
    question = Question(*given)
    messages = question.prompt if isinstance(question.prompt, list) else [{"role": "user", "content": question.prompt}]
    if not messages or not all(
        isinstance(m, Mapping) and all(isinstance(m.get(key), str) for key in ("role", "content")) for m in messages
    ):
        raise ValueError(
            f'a prompt is text, or a list of {{"role", "content"}} messages, not {_shown(question.prompt)}'
        )
    if not any(message["content"] for message in messages):
        raise ValueError("the prompt is empty")
    if not isinstance(question.facts, Mapping) or not isinstance(question.key, str | None):
        raise ValueError(
            f"facts are a table and a key is text, not {_shown(question.facts)} and {_shown(question.key)}"
        )
    try:
        json.dumps(question, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the question is not all JSON data: {error}") from None
    return question


def judge(task: Task, conversation: Conversation) -> Verdict:
    """The task's verdict. A verifier that raises, or returns what is none, has failed; that is a verdict too."""
    try:
        return as_verdict(task.verify(conversation))
    except (Exception, SystemExit) as error:
        return failure(f"the verifier raised {described(error)}")


def failure(reason: str) -> Verdict:
    """The verdict where there can be none."""
    return Verdict(0.0, reason[:MOST_TEXT], failed=True)


def as_verdict(given: Any) -> Verdict:
    """The verdict that a verifier's result stands for; a failure where it is neither number, pair nor verdict."""
    if not isinstance(given, Verdict):
        given = Verdict(*given) if isinstance(given, tuple) and len(given) == 2 else Verdict(given)
    reward, parts = _number(given.reward), given.parts
    if reward is None:
        return failure(f"the verifier gave no finite number for a reward: {_shown(given.reward)}")
    if not isinstance(given.reason, str):
        return failure(f"the verifier gave a reason that is no text: {_shown(given.reason)}")
    if not isinstance(parts, Mapping) or len(parts) > MOST_PARTS:
        return failure(f"the verifier gave parts that are no table of at most {MOST_PARTS} numbers: {_shown(parts)}")
    numbers = {name: _number(value) for name, value in parts.items()}
    for name, number in numbers.items():
        if number is None or not isinstance(name, str):
            return failure(f"the verifier gave no finite number for the part {_shown(name)}: {_shown(parts[name])}")
    found = {name: number for name, number in numbers.items() if number is not None}
    return Verdict(0.0 if given.failed else reward, given.reason[:MOST_TEXT], bool(given.failed), found)


def described(error: BaseException) -> str:
    """An error and where it was raised, on one line or few."""
    text = "".join(traceback.format_exception_only(error)).strip()
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else text


def _number(value: Any) -> float | None:
    if not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:
        return f"a {type(value).__name__} whose repr raises {type(error).__name__}"
    return text if len(text) <= 80 else f"{text[:80]}..."
