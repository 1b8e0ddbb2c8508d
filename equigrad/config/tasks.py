"""What a model is asked in reinforcement learning, and how its answers are judged."""

import difflib
import json
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from equigrad.config.base import Section

BUILT_IN = ("arithmetic", "calculator", "countdown", "format", "sequences")
GYM = "reasoning-gym:"
JSONL = (".jsonl", ".jsonl.gz")

MOST_LEVELS = 64
_Count = Annotated[int, Field(ge=1, le=1000)]
_Bound = Annotated[int, Field(ge=2, le=10**18)]


class TaskChoice(Section):
    """One task. A bare string in ``rl.task`` is short for ``{name = "..."}``."""

    name: str = Field(min_length=1)
    """``arithmetic``, ``calculator``, ``countdown``, ``format`` or ``sequences``; a class in a Python file,
    ``my_task.py:Task``; a ``.jsonl`` file of prompts with answers; or ``reasoning-gym:NAME`` (needs the ``gym`` extra).
    Docs: [Tasks](rl-tasks.md)."""
    weight: float = Field(1.0, gt=0)
    """Share of the problems drawn from this task, relative to the other tasks, to a thousandth."""
    options: dict[str, Any] = {}
    """Arguments of the class in a Python file, or of the dataset in reasoning-gym. Built-in tasks have sections."""

    @model_validator(mode="before")
    @classmethod
    def _from_string(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @field_validator("name")
    @classmethod
    def _is_a_task(cls, name: str) -> str:
        file, colon, attribute = name.rpartition(":")
        if name in BUILT_IN or name.endswith(JSONL):
            return name
        if name.startswith(GYM) and len(name) > len(GYM):
            return name
        if colon and file.endswith(".py") and attribute.isidentifier():
            return name
        if name.endswith(".py"):
            raise ValueError(f'no class is named: "{name}:Task", if the class is called Task')
        close = difflib.get_close_matches(name, BUILT_IN, 1, 0.6)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(BUILT_IN)}, and your own"
        raise ValueError(f"no such task; {hint}")

    @field_validator("options")
    @classmethod
    def _are_plain(cls, options: dict[str, Any]) -> dict[str, Any]:
        try:
            json.dumps(options, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"options are text, numbers, lists and tables of these: {error}") from None
        return options

    @model_validator(mode="after")
    def _options_have_a_taker(self) -> "TaskChoice":
        if self.options and self.name in BUILT_IN:
            raise ValueError(f"options of {self.name} are the keys of the section [rl.{self.name}]")
        if self.options and self.name.endswith(JSONL):
            raise ValueError("options of JSONL files are the keys of the section [rl.jsonl]")
        return self


class Curriculum(Section):
    """How difficulty follows what the model can do. Held-out problems are of all levels alike, always."""

    enabled: bool = True
    """Begin at level ``start`` and move with the rewards; else draw from all levels alike."""
    start: int = Field(0, ge=0, lt=MOST_LEVELS)
    """First level; where a task has fewer, its last."""
    window: int = Field(256, ge=1)
    """Verdicts on problems of a level before it is decided whether to leave it."""
    raise_at: float = Field(0.8, gt=0, le=1)
    """Mean reward from which on the next level follows."""
    lower_at: float = Field(0.0, ge=0, lt=1)
    """Mean reward below which the level before returns; 0: never."""
    review: float = Field(0.2, ge=0, lt=1)
    """Share of problems from levels already passed."""

    @model_validator(mode="after")
    def _thresholds_are_apart(self) -> "Curriculum":
        if self.lower_at >= self.raise_at:
            raise ValueError(f"lower_at {self.lower_at} is not below raise_at {self.raise_at}: levels would swing")
        return self


class Arithmetic(Section):
    """Two whole numbers, one operation."""

    operations: list[Literal["add", "subtract", "multiply"]] = Field(["add", "subtract"], min_length=1)
    """Drawn alike often."""
    below: list[_Bound] = Field([10, 20, 50, 100], min_length=1, max_length=MOST_LEVELS)
    """Both operands are from 0 to less than this, level by level."""


class Calculator(Section):
    """An expression too long to solve at sight, and a calculator to ask."""

    operands: list[Annotated[int, Field(ge=2, le=10)]] = Field([2, 3, 4], min_length=1, max_length=MOST_LEVELS)
    """Numbers in the expression, level by level."""
    below: Annotated[int, Field(ge=2, le=10**9)] = 1000
    """They are from 1 to less than this."""
    most_calls: int = Field(4, ge=1)
    """Calls that the calculator answers in one conversation."""


class Countdown(Section):
    """Make a target out of given numbers, each used at most once."""

    numbers: list[Annotated[int, Field(ge=2, le=10)]] = Field([3, 4], min_length=1, max_length=MOST_LEVELS)
    """How many numbers are given, level by level."""
    largest: Annotated[int, Field(ge=2, le=10**6)] = 50
    """They are from 1 to this."""
    target: Annotated[int, Field(ge=1, le=10**9)] = 100
    """Largest target."""


class Format(Section):
    """Words in a given form."""

    rules: list[Annotated[int, Field(ge=2, le=5)]] = Field([2, 3, 4, 5], min_length=1, max_length=MOST_LEVELS)
    """How many rules hold together, level by level: the first word, the number of words, then case, separator and
    brackets."""
    words: Annotated[int, Field(ge=1, le=100)] = 8
    """Most words."""


class Sequences(Section):
    """Copy, reverse or sort a list."""

    kinds: list[Literal["copy", "reverse", "sort"]] = Field(["copy", "reverse", "sort"], min_length=1)
    """Drawn alike often."""
    lengths: list[_Count] = Field([3, 5, 8, 12], min_length=1, max_length=MOST_LEVELS)
    """Items of a list, level by level."""
    items: Literal["letters", "numbers"] = "letters"
    """``letters``: a to z. ``numbers``: 0 to 99, sorted by value."""


class Jsonl(Section):
    """The keys of records in ``.jsonl`` tasks."""

    prompt: str = Field("prompt", min_length=1)
    """Text, or the messages of a chat."""
    answer: str = Field("answer", min_length=1)
    """Text, a number, or a list of them, of which any will do."""
