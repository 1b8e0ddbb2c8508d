"""What is asked of a rollout engine and what it gives back, whichever engine it is. Token ids only, no text.

Worked example, a group of two, the second cut off by its limit:

    Request     id "7/0"  prompt (1, 5, 9)  most 3  version 4  seed 70  group "7"  stop_ids {2}
    Completion  id "7/0"  ids (8, 2)     log_probs (-0.5, -1.25)        versions (4, 4)     finish "stop"
    Request     id "7/1"  as above, seed 71
    Completion  id "7/1"  ids (8, 3, 3)  log_probs (-0.5, -2.0, -0.75)  versions (4, 4, 4)  finish "length"

A token's log-probability is one of two, see ``Tokens``: the first is the one to train on.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from equigrad.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

Finish: TypeAlias = Literal["stop", "length"]


@dataclass(frozen=True)
class Tokens:
    """Generated tokens, and as many values of each per-token stream. Numbers are float32 values."""

    ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    """Of the whole vocabulary, at the sampling temperature, whatever ``top_p`` and ``top_k`` left out; of greedy tokens
    at temperature 1. It is the negative of the training model's cross-entropy at that temperature."""
    kept_log_probs: tuple[float, ...] = ()
    """Among the tokens that ``top_p`` and ``top_k`` kept: that with which the token was drawn."""
    entropies: tuple[float, ...] = ()
    """Of the distribution of ``log_probs``, in nats."""
    versions: tuple[int, ...] = ()
    """Of the weights that each token was drawn with."""

    def __post_init__(self) -> None:
        lengths = {stream.name: len(getattr(self, stream.name)) for stream in fields(self)}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"streams of unequal length: {lengths}")

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Request:
    """One completion that is wanted."""

    id: str
    """Unique among the requests of a call."""
    prompt: tuple[int, ...]
    """At least one token."""
    most: int
    """Tokens of the completion at most, those of ``begun`` among them."""
    version: int
    """Of the weights that are to be used, and no others."""
    seed: int = 0
    """With the place of a token in the completion it decides what is drawn. To be different for requests of a group."""
    temperature: float = 1.0
    """0: always the most likely token."""
    top_p: float = 1.0
    """In (0, 1]: the smallest set of most likely tokens that has this share of the probability, after ``top_k``."""
    top_k: int = 0
    """So many most likely tokens; 0: all."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end the completion, of which they are the last."""
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    """The same of several tokens, all of them in the completion."""
    stop_texts: tuple[str, ...] = ()
    """Text that ends it with the token in which it is complete, however it is made of tokens."""
    group: str | None = None
    """Requests of one group have one prompt, which is computed once; None: it is in no group."""
    begun: Tokens = field(default=Tokens())
    """What is there already and to be continued: its tokens stay as they are, whatever weights drew them."""

    @property
    def ids(self) -> tuple[int, ...]:
        """All tokens that are there."""
        return self.prompt + self.begun.ids

    def stops(self, ids: Sequence[int]) -> bool:
        """Whether a completion ends with the last of ``ids``."""
        return bool(ids) and (
            ids[-1] in self.stop_ids
            or any(len(ids) >= len(stop) and tuple(ids[-len(stop) :]) == stop for stop in self.stop_sequences)
        )


@dataclass(frozen=True)
class Completion:
    """What became of a request.

    id:     the request's
    tokens: of the completion, without the prompt, with those that the request began with
    finish: "stop": it ended of itself; "length": at the request's limit; None: the call was stopped before, and
            ``continued`` is what goes on
    """

    id: str
    tokens: Tokens
    finish: Finish | None

    @property
    def truncated(self) -> bool:
        """Whether it was cut off by its limit."""
        return self.finish == "length"

    def continued(self, request: Request, version: int) -> Request:
        """``request`` from here on, with the weights of a version."""
        if self.finish is not None:
            raise ValueError(f"request {self.id} is finished: {self.finish}")
        return replace(request, begun=self.tokens, version=version)


def never() -> bool:
    """Do not stop."""
    return False


class Engine(Protocol):
    """An engine serves a request with the weights of the request's version alone, and else raises ``UserError``."""

    @property
    def version(self) -> int | None:
        """Of the weights it has; None before it has any."""
        ...

    def load(self, weights: "Iterable[tuple[str, Tensor]]", version: int) -> None:
        """Take these weights, by the names of the model's tensors, as they come."""
        ...

    def generate(self, requests: Sequence[Request], stopping: Callable[[], bool] = never) -> Iterator[Completion]:
        """One completion of each request, as they end. ``stopping`` is asked between tokens: once it is true, what is
        not finished is given back as it is, with ``finish`` None."""
        ...


def check(requests: Sequence[Request], version: int | None, capacity: int, vocabulary: int) -> None:
    """``UserError`` for requests that an engine cannot serve. ``capacity``: tokens of prompt and completion."""
    seen: set[str] = set()
    prompts: dict[str, Request] = {}
    for request in requests:
        for wrong in _faults(request, version, capacity, vocabulary):
            raise UserError(f"request {request.id}: {wrong}")
        if request.id in seen:
            raise UserError(f"request {request.id}: two requests have this id; each needs its own")
        seen.add(request.id)
        if request.group is not None:
            first = prompts.setdefault(request.group, request)
            if first.prompt != request.prompt:
                raise UserError(
                    f"request {request.id}: its prompt is not that of request {first.id}, though both are of group"
                    f" {request.group}"
                )


def _faults(request: Request, version: int | None, capacity: int, vocabulary: int) -> Iterator[str]:
    if request.version != version:
        kind = "none yet" if version is None else f"version {version}"
        age = "" if version is None else (" (they are newer)" if version > request.version else " (they are older)")
        yield f"it wants the weights of version {request.version}; the engine has {kind}{age}"
    if not request.prompt:
        yield "its prompt is empty; give at least the begin-of-text token"
    if unknown := [token for token in request.ids if not 0 <= token < vocabulary]:
        yield f"token {unknown[0]} is not in the vocabulary of {vocabulary}"
    if request.most < 1:
        yield f"most = {request.most}; a completion has at least one token"
    if len(request.prompt) + request.most > capacity:
        yield (
            f"its prompt of {len(request.prompt)} tokens and {request.most} new ones do not fit: the engine has room"
            f" for {capacity} together"
        )
    if len(request.begun) >= request.most or request.stops(request.begun.ids):
        yield f"it is finished: it begins with {len(request.begun)} tokens, of at most {request.most}"
    if not 0 <= request.temperature < float("inf"):
        yield f"temperature = {request.temperature}; it must be a finite number from 0 on"
    if not 0 < request.top_p <= 1 or request.top_k < 0:
        yield f"top_p = {request.top_p}, top_k = {request.top_k}; they must be in (0, 1], and from 0 on"
    if not all(request.stop_sequences) or not all(request.stop_texts):
        yield "a stop sequence is empty"
