"""A rollout engine inside the training process: continuous batching over one cache, on the model's own op set.

Sequences share nothing but the row they are computed in. So what a request gets depends on its prompt, its seed and the
weights, and on no neighbour, slot or order of arrival: in exact numerics to the bit, and there its log-probabilities
are those of the training forward; in native numerics up to the rounding of products of other shapes, which may turn a
draw once in a while. A model whose rotary frequencies depend on the length of the text (``dynamic``) is an exception:
decoding does not rotate earlier keys again.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equigrad.errors import UserError
from equigrad.models.generate import LogitModel, agreed, cache_bytes, cache_for, last_of
from equigrad.models.sampling import Rule, draw
from equigrad.numerics.cache import DecodingCache
from equigrad.parallel.collectives import ALONE, Axis
from equigrad.rl.engine.protocol import Completion, Finish, Request, Tokens, check, never


@dataclass(frozen=True)
class Limits:
    """How much an engine holds. Its cache has room for ``slots`` + 1 sequences of ``capacity`` tokens, and stays there
    from one call to the next.

    slots:          sequences that are decoded together
    capacity:       tokens of a prompt and its completion
    prefill_tokens: of prompts that are computed in one row, if it is not a single prompt
    cache_bytes:    that the cache may take on a rank; None: as many as that needs
    """

    slots: int
    capacity: int
    prefill_tokens: int = 8192
    cache_bytes: int | None = None

    def __post_init__(self) -> None:
        if min(self.slots, self.capacity, self.prefill_tokens) < 1:
            raise UserError(f"an engine needs at least one slot and one token of each kind, not {self}")


class EmbeddedEngine:
    """See ``Engine``. Where a model is on several ranks, all of them have an engine and call it alike, with the same
    requests; ranks that share the context all do the same."""

    def __init__(
        self,
        model: LogitModel,
        limits: Limits,
        weights: Mapping[str, Tensor],
        version: int | None = None,
        tensor: Axis = ALONE,
        experts: Axis = ALONE,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        """
        weights: the model's own tensors on this rank, by name; ``load`` copies into them
        version: of what they hold; None: nothing yet, and no request is served before ``load``
        tensor:  over which the model's features are divided; ``experts``: over which its experts are
        decode:  the text of tokens; without it requests with ``stop_texts`` are refused
        """
        most = model.config.max_position_embeddings
        if limits.capacity > most:
            raise UserError(f"an engine's capacity of {limits.capacity} tokens is more than the model's {most}")
        # One more slot, for the prompt of a group of which there is not yet room for all.
        needed, slots = cache_bytes(model, limits.slots + 1, limits.capacity, tensor), limits.slots + 1
        if limits.cache_bytes is not None and needed > limits.cache_bytes:
            raise UserError(
                f"an engine of {limits.slots} slots of {limits.capacity} tokens needs a cache of {needed} bytes, and"
                f" may have {limits.cache_bytes}: enough for {max(0, limits.cache_bytes * slots // needed - 1)} slots"
            )
        self._model, self._limits, self._weights, self._version = model, limits, weights, version
        self._axes, self._decode = (tensor, experts), decode
        self._busy = False
        self._cache: DecodingCache | None = None

    @property
    def version(self) -> int | None:
        """Of the weights; None while they are of none."""
        return self._version

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy weights into the model as they come: all of its tensors on this rank. Raises ``UserError`` while a call
        of ``generate`` is not at its end, and where they do not fit; then the engine serves nothing."""
        if self._busy:
            raise UserError(f"weights of version {version} came while those of version {self._version} are in use")
        self._version = None
        missing = set(self._weights)
        for name, tensor in weights:
            if name not in missing:
                raise UserError(f"weights of version {version}: {name} is not in the model, or came twice")
            missing.remove(name)
            own = self._weights[name]
            if own.shape != tensor.shape:
                raise UserError(
                    f"weights of version {version}: {name} has shape {tuple(tensor.shape)}, the model's has"
                    f" {tuple(own.shape)}"
                )
            own.copy_(tensor)
        if missing:
            raise UserError(
                f"weights of version {version}: {min(missing)} did not come, and so did {len(missing) - 1} more"
            )
        self._version = version

    def check(self, requests: Sequence[Request]) -> None:
        """``UserError`` for requests that it cannot serve, at the present version of the weights."""
        check(requests, self._version, self._limits.capacity, self._model.config.vocabulary)
        if self._decode is None and (texts := [r for r in requests if r.stop_texts]):
            raise UserError(f"request {texts[0].id}: it ends with text, but the engine was given no tokenizer")

    @torch.no_grad()
    def generate(
        self,
        requests: Sequence[Request],
        stopping: Callable[[], bool] = never,
        arriving: Callable[[], Sequence[Request]] = tuple,
    ) -> Iterator[Completion]:
        """See ``Engine``. Nothing happens before the first completion is asked for; then all requests are checked, and
        after that computed. One call at a time: until it is at its end, or closed, others are refused, and so are
        weights. ``arriving`` is asked between tokens: further requests, which were checked, join."""
        if self._busy:
            raise UserError("an engine serves one call at a time, and the one before is not at its end")
        self.check(requests)
        self._busy = True
        try:
            cache = self._cache or cache_for(self._model, self._limits.slots + 1, self._limits.capacity, *self._axes)
            self._cache = None
            batch = _Batch(self._model, self._limits, cache, self._axes[1], self._decode)
            batch.join(requests)
            while batch.unfinished and not stopping():
                batch.join(arriving())
                yield from batch.admit()
                yield from batch.step()
            yield from batch.partial()
            cache.drop(range(len(cache.lengths)))
            self._cache = cache  # of a call that broke off nobody knows what it holds
        finally:
            self._busy = False


class _Sequence:
    """A request that is being served. Its tokens grow."""

    def __init__(self, request: Request, decode: Callable[[Sequence[int]], str] | None) -> None:
        self.request, self._decode = request, decode
        # A text of so many bytes is made of no more tokens, but for such without text.
        self._reach = max((len(text.encode()) for text in request.stop_texts), default=0)
        self.rule = Rule.seeded(request.seed, "rollout", request.temperature, request.top_p, request.top_k)
        begun = request.begun
        self.ids, self._versions = list(begun.ids), list(begun.versions)
        self._numbers = [list(stream) for stream in (begun.log_probs, begun.kept_log_probs, begun.entropies)]

    def take(self, token: int, numbers: Iterable[float]) -> None:
        """One more token, and its two log-probabilities and entropy."""
        self.ids.append(token)
        self._versions.append(self.request.version)
        for stream, number in zip(self._numbers, numbers, strict=True):
            stream.append(number)

    @property
    def finish(self) -> Finish | None:
        if self.request.stops(self.ids) or self._says_stop():
            return "stop"
        return "length" if len(self.ids) >= self.request.most else None

    def _says_stop(self) -> bool:
        if not self._reach or self._decode is None:
            return False
        end = self._decode(self.ids[-self._reach :])
        return any(text in end for text in self.request.stop_texts)

    def completion(self) -> Completion:
        log_probs, kept, entropies = map(tuple, self._numbers)
        tokens = Tokens(tuple(self.ids), log_probs, kept, entropies, tuple(self._versions))
        return Completion(self.request.id, tokens, self.finish)


class _Batch:
    """The requests of a call: some are decoded, in the order of the cache; others wait, in the order of their coming,
    those of a group together."""

    def __init__(
        self,
        model: LogitModel,
        limits: Limits,
        cache: DecodingCache,
        experts: Axis,
        decode: Callable[[Sequence[int]], str] | None,
    ) -> None:
        """``cache``: with one slot more than ``limits`` says, and empty."""
        self._model, self._cache, self._experts, self._decode = model, cache, experts, decode
        self._slots, self._prefill_tokens = limits.slots, limits.prefill_tokens
        self._running: list[_Sequence] = []
        self._halfway, self._logits = list[Request](), torch.empty(0)  # the rest of that group, and its logits [1, V]
        self._waiting = deque[list[Request]]()

    def join(self, requests: Sequence[Request]) -> None:
        """They wait behind the others."""
        groups: dict[str, list[Request]] = {}
        for request in requests:
            # A number is the group of a request that shares no prompt.
            shared = None if request.begun.ids else request.group
            groups.setdefault(f"alone {len(groups)}" if shared is None else f"group {shared}", []).append(request)
        self._waiting += groups.values()

    def _begin(self, request: Request) -> _Sequence:
        return _Sequence(request, self._decode)

    @property
    def unfinished(self) -> bool:
        return bool(self._running or self._halfway or self._waiting)

    def admit(self) -> Iterator[Completion]:
        """Fill the free slots: compute prompts, each once, and draw the first token of each new sequence."""
        began = len(self._running)
        logits = [*self._resumed(), *self._prefilled()]
        return self._draw(torch.cat(logits), began) if logits else iter(())

    def step(self) -> Iterator[Completion]:
        """One more token of each sequence."""
        if not self._running:
            return iter(())
        ids = torch.tensor([sequence.ids[-1] for sequence in self._running], device=self._model.device)
        return self._draw(self._model(ids, self._cache.step()), 0)

    def partial(self) -> Iterator[Completion]:
        """All that is unfinished, as it is."""
        left = [*self._halfway, *(request for group in self._waiting for request in group)]
        for sequence in (*self._running, *map(self._begin, left)):
            yield sequence.completion()

    @property
    def _free(self) -> int:
        return self._slots - len(self._running)

    def _resumed(self) -> Iterator[Tensor]:
        """Logits [n, V] of more sequences of the group that has begun."""
        now, self._halfway = self._halfway[: self._free], self._halfway[self._free :]
        if now:
            self._cache.resume(len(now))
            self._running += map(self._begin, now)
            yield self._logits.expand(len(now), -1)

    def _prefilled(self) -> Iterator[Tensor]:
        """Logits [n, V] of sequences whose prompts are computed now, in one row."""
        groups, free, tokens = list[list[Request]](), self._free, 0
        while free > 0 and self._waiting:
            tokens += len(self._waiting[0][0].ids)
            if groups and tokens > self._prefill_tokens:
                break
            groups.append(self._waiting.popleft())
            free -= len(groups[-1])
        if not groups:
            return
        began = len(self._running)
        row = self._cache.prefill([len(first.ids) for first, *_ in groups])
        ids = torch.tensor([token for first, *_ in groups for token in first.ids], device=self._model.device)
        logits = self._model(ids, row, at=last_of(row))
        self._running += [self._begin(first) for first, *_ in groups]
        yield logits
        for number, (_, *others) in enumerate(groups):
            now = others[: self._free]
            self._cache.fork(began + number, len(now))
            self._running += map(self._begin, now)
            own = logits[number : number + 1]
            yield own.expand(len(now), -1)
            if len(now) < len(others):
                self._cache.put_aside(began + number)
                self._halfway, self._logits = others[len(now) :], own

    def _draw(self, logits: Tensor, first: int) -> Iterator[Completion]:
        """A token for each sequence from number ``first`` on. Those that end with it leave their slots."""
        sequences = self._running[first:]
        rules, positions = [s.rule for s in sequences], [len(s.ids) for s in sequences]
        drawn = draw(logits, self._model.ops, rules, positions)
        # float64 holds them all.
        streams = torch.stack([drawn.ids, drawn.log_probs, drawn.kept_log_probs, drawn.entropies], 1).double()
        for sequence, (token, *numbers) in zip(sequences, agreed(streams, self._experts).tolist(), strict=True):
            if not all(map(math.isfinite, numbers)):
                raise FloatingPointError(
                    f"request {sequence.request.id}: the weights of version {sequence.request.version} give no finite"
                    f" probabilities after {len(sequence.ids)} tokens"
                )
            sequence.take(int(token), numbers)
        ended = [n for n, sequence in enumerate(self._running) if sequence.finish is not None]
        completions = [self._running[n].completion() for n in ended]
        if ended:
            self._running = [self._running[n] for n in self._cache.drop(ended)]
        return iter(completions)
