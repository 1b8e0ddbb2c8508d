"""Reinforcement learning: what the model is asked, how it answers, and what is made of that."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from equigrad.config.base import Section
from equigrad.config.policy import Policy
from equigrad.config.tasks import (
    Arithmetic,
    Calculator,
    Countdown,
    Curriculum,
    Format,
    Jsonl,
    Sequences,
    TaskChoice,
)


class Warmup(Section):
    """Imitation of solved problems before reinforcement learning: a model that never solves one learns nothing."""

    steps: int = Field(0, ge=0)
    """Steps at the beginning of the run that imitate; of all ``train.steps``, where these are no more."""
    problems: int = Field(256, ge=1)
    """How many solved problems there are: the first ones of the training split, at the curriculum's start. Later steps
    are on others."""
    batch: int = Field(64, ge=1)
    """Solutions of a step."""
    lr: float | None = Field(None, gt=0)
    """Learning rate of those steps, reached after ``optim.warmup_steps`` and then constant; by default ``optim.lr``.
    The schedule of ``optim`` begins after them."""
    keep: float = Field(0.0, ge=0)
    """Coefficient of the cross-entropy of as many solutions beside each later step; 0: none."""


class Servers(Section):
    """Sample on servers: ``equigrad serve``, or others that speak OpenAI's interface and return token ids."""

    urls: list[str] = Field(min_length=1)
    """Such as ``["http://127.0.0.1:8000"]``; requests are shared out."""
    weights: str = Field(min_length=1)
    """Folder that the trainer and all servers see, for the weights of each version."""
    timeout_s: float = Field(600.0, gt=0)
    """Seconds that a server has for one answer."""
    attempts: int = Field(3, ge=1)
    """How often a request is asked, of the next server each time, before the run ends with an error."""
    concurrency: int = Field(256, ge=1)
    """Requests that are open at one time."""

    @field_validator("urls", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("urls")
    @classmethod
    def _are_addresses(cls, value: list[str]) -> list[str]:
        for url in value:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"{url}: an address begins with http:// or https://")
        return value


class Rl(Section):
    """Reinforcement learning from verifiable rewards. With this section a step's samples are what the model answers;
    ``batch.tokens`` and ``batch.samples`` are not used, and of ``data`` only tokenizer and context."""

    task: list[TaskChoice] = Field([TaskChoice(name="arithmetic")], min_length=1, max_length=100)
    """What the model is asked; several tasks mix by weight. A single one needs no brackets."""
    wording: Literal["short", "long"] = "short"
    """``short``: a line that a small model learns to continue. ``long``: an instruction, with how to mark the answer.
    Of the built-in tasks and reasoning-gym."""
    chat: bool = False
    """Ask as the user of a chat; else the prompt is text that the model continues."""
    held_out_every: int = Field(10, ge=2)
    """About one problem in so many is held out, chosen by its contents: whatever the seed, it is never trained on."""
    max_turns: int = Field(8, ge=1)
    """Most turns of the model in a conversation."""
    curriculum: Curriculum = Curriculum()
    prompts: int = Field(32, ge=1)
    """Problems of a step."""
    group_size: int = Field(8, ge=1)
    """Attempts at each of them."""
    longest: int = Field(128, ge=1)
    """Most tokens of one turn of the model. A conversation ends with ``data.context`` tokens."""
    temperature: float = Field(1.0, gt=0)
    """Of sampling, and of the log-probabilities that are trained."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the smallest set of most likely tokens that has this share of the probability."""
    top_k: int = Field(0, ge=0)
    """Sample from so many most likely tokens; 0: from all."""
    redraws: int = Field(0, ge=0)
    """Groups whose rewards are all the same teach nothing: ask for other problems in their stead, so many times at
    most (DAPO, arXiv 2503.14476, section 3.2); 0: keep them."""
    overlong: int = Field(0, ge=0)
    """Over the last so many tokens before ``longest`` the reward falls by up to 1 (DAPO, equation 13)."""
    policy: Policy = Policy()
    warmup: Warmup = Warmup()
    slots: int = Field(256, ge=1)
    """Conversations that are sampled together, on each replica of the model."""
    tp: int = Field(1, ge=1)
    """Tensor-parallel degree of sampling. A world of more ranks has as many replicas as fit in it."""
    servers: Servers | None = None
    """Sample there rather than on the ranks that train."""
    held_out: int = Field(256, ge=1)
    """Held-out problems of an evaluation. The most likely token is taken everywhere."""
    shown: int = Field(2, ge=0)
    """Groups of a step that are written to ``rollouts.jsonl`` for people to read, and for the report; 0: none."""
    shown_every: int = Field(10, ge=1)
    """Steps between those."""
    require_updates: bool = False
    """Compare, at every update of the sampling weights, the digests of all tensors on both sides, and end the run where
    one differs or none has changed."""
    verify_timeout_s: float = Field(10.0, gt=0, le=86400)
    """Seconds that a verifier or environment in a Python file or reasoning-gym has for one answer. Later its process is
    killed, and the verdict recorded as failed."""
    verify_workers: int = Field(2, ge=1, le=1024)
    """Processes that run them, on each machine."""
    verify_memory_mb: int = Field(4096, ge=0)
    """Address space of each of them in MiB, where the system can limit it; 0: no limit."""
    arithmetic: Arithmetic = Arithmetic()
    calculator: Calculator = Calculator()
    countdown: Countdown = Countdown()
    format: Format = Format()
    sequences: Sequences = Sequences()
    jsonl: Jsonl = Jsonl()

    @field_validator("task", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return [value] if isinstance(value, str | dict) else value

    @field_validator("task")
    @classmethod
    def _each_once(cls, value: list[TaskChoice]) -> list[TaskChoice]:
        names = [choice.name for choice in value]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"{', '.join(twice)}: named more than once; give it more weight instead")
        return value

    @model_validator(mode="after")
    def _sizes_agree(self) -> "Rl":
        if self.overlong > self.longest:
            raise ValueError(f"overlong {self.overlong} is more than the longest turn has: longest is {self.longest}")
        if self.warmup.keep and self.temperature != 1:
            raise ValueError(
                f"warmup.keep imitates beside sampling at the temperature {self.temperature}; a step has one"
                " temperature: use 1, or keep = 0"
            )
        return self

    @property
    def most_samples(self) -> int:
        """Of one step."""
        return max(self.prompts * self.group_size + self.warmup.batch * bool(self.warmup.keep), self.warmup.batch)
