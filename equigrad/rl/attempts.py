"""Attempts at problems: conversations, and the tokens they are made of.

Knows no engine: whoever answers requests is given. All attempts of a step take their turns together.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from equigrad.config.rl import Rl
from equigrad.data.samples import Sample
from equigrad.data.tokenizers import Tokenizer
from equigrad.errors import UserError
from equigrad.numerics.random import key
from equigrad.rl.engine.protocol import Completion, Request
from equigrad.rl.rollouts import Rollout, Segment
from equigrad.rl.tasks.protocol import Conversation, Problem, Verdict
from equigrad.rl.tasks.registry import Tasks

Ask: TypeAlias = Callable[[Sequence[Request]], Mapping[str, Completion]]
"""Requests -> their completions by id."""


@dataclass
class Text:
    """The tokens of a segment, as it grows; of each whether the model sampled it, and with what."""

    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def given(self, ids: Sequence[int]) -> None:
        """Tokens that the model did not choose follow."""
        self.ids += ids
        for stream, nothing in (
            (self.sampled, False),
            (self.log_probs, 0.0),
            (self.entropies, 0.0),
            (self.versions, 0),
        ):
            stream += [nothing] * len(ids)

    def said(self, completion: Completion) -> None:
        """What the model sampled follows."""
        tokens = completion.tokens
        self.ids += tokens.ids
        self.sampled += [True] * len(tokens)
        self.log_probs += tokens.log_probs
        self.entropies += tokens.entropies
        self.versions += tokens.versions

    def segment(self) -> Segment:
        """As rollouts have it."""
        return Segment(
            np.array(self.ids, np.int64),
            np.array(self.sampled[1:], bool),
            np.array(self.log_probs[1:], np.float32),
            np.array(self.versions[1:], np.int64),
        )


@dataclass
class Attempt:
    """One conversation about a problem, and what it was worth.

    number:    among the attempts at this problem
    texts:     its segments: one, unless a chat template has rewritten what was said before
    truncated: whether its last turn was cut off
    last:      tokens of its last turn
    """

    problem: Problem
    number: int
    conversation: Conversation
    texts: list[Text]
    truncated: bool = False
    last: int = 0
    verdict: Verdict | None = None
    reward: float = 0.0

    @property
    def id(self) -> str:
        return f"{self.problem.id}#{self.number}"

    @property
    def sampled(self) -> int:
        """Tokens that the model sampled."""
        return sum(sum(text.sampled) for text in self.texts)

    def rollout(self) -> Rollout:
        """As training has it."""
        segments = tuple(text.segment() for text in self.texts if any(text.sampled))
        return Rollout(self.id, self.problem.id, segments, self.reward, self.truncated)


class Attempts:
    """Makes attempts at problems, with the tasks and the tokenizer of a job. ``capacity``: tokens of a conversation at
    most."""

    def __init__(self, config: Rl, tasks: Tasks, tokenizer: Tokenizer, capacity: int, seed: int) -> None:
        self._config, self.tasks, self._tokenizer = config, tasks, tokenizer
        self._capacity, self._seed = capacity, seed
        turn_ends = tokenizer.turn_ends() if config.chat else set[int]()
        self._end = min(turn_ends, default=tokenizer.eos_id)
        self._stop_ids = frozenset({tokenizer.eos_id} | turn_ends)

    def make(
        self, problems: Sequence[Problem], each: int, version: int, ask: Ask, greedy: bool = False
    ) -> list[Attempt]:
        """``each`` attempts at every problem with weights of a version, and their verdicts. ``greedy``: of the most
        likely tokens, for evaluation."""
        made = [
            Attempt(problem, number, Conversation(problem), [self._opening(problem)])
            for problem in problems
            for number in range(each)
        ]
        turn, open_ = 0, made
        while open_:
            requests = [self._request(attempt, turn, version, greedy) for attempt in open_]
            completions = ask(requests)
            replies = [self._take(attempt, completions[attempt.id]) for attempt in open_]
            for attempt, reply in zip(open_, replies, strict=True):
                attempt.conversation = reply.result()
            open_ = [attempt for attempt in open_ if self._goes_on(attempt)]
            turn += 1
        for attempt, verdict in [(attempt, self.tasks.verify(attempt.conversation)) for attempt in made]:
            attempt.verdict = verdict.result()
            attempt.reward = attempt.verdict.reward - self._overlong(attempt)
        return made

    def solved(self, problem: Problem) -> list[Sample]:
        """A conversation in which the model says what solves the problem, to be imitated. ``UserError`` where the task
        does not tell."""
        attempt = Attempt(problem, 0, Conversation(problem), [self._opening(problem)])
        turns = self.tasks.solution(problem)
        if not turns:
            raise UserError(f"rl.warmup: the task {problem.task} does not tell how problem {problem.id} is solved")
        for number, said in enumerate(turns):
            if number and not self._goes_on(attempt):
                raise UserError(f"rl.warmup: problem {problem.id} ends before its solution does")
            text = attempt.texts[-1]
            (ids,) = self._tokenizer.encode_batch([said])
            stopped = any(map(said.endswith, self.tasks.stops[problem.task]))
            text.given([*ids.tolist(), *([] if stopped else [self._end])])
            text.sampled[-len(ids) - (not stopped) :] = [True] * (len(ids) + (not stopped))
            attempt.conversation = self.tasks.reply(attempt.conversation, said).result()
        self._check(problem, len(attempt.texts[-1].ids) - 1)
        return [_imitated(text) for text in attempt.texts if any(text.sampled)]

    def _opening(self, problem: Problem) -> Text:
        """What is asked, as tokens."""
        text, tokenizer = Text(), self._tokenizer
        if isinstance(problem.prompt, str):
            (ids,) = tokenizer.encode_batch([problem.prompt])
            text.given([tokenizer.bos_id, *ids.tolist()])
        else:
            (ids,) = tokenizer.encode_batch([tokenizer.chat_prompt(problem.prompt)], special=True)
            text.given(ids.tolist())
        self._check(problem, len(text.ids))
        return text

    def _check(self, problem: Problem, tokens: int) -> None:
        if tokens >= self._capacity:
            raise UserError(
                f"problem {problem.id} takes {tokens} tokens before it is answered, and a conversation has at most"
                f" data.context = {self._capacity}"
            )

    def _request(self, attempt: Attempt, turn: int, version: int, greedy: bool) -> Request:
        config, text = self._config, attempt.texts[-1]
        return Request(
            attempt.id,
            tuple(text.ids),
            min(config.longest, self._capacity - len(text.ids)),
            version,
            key(self._seed, f"{attempt.id}/{turn}") >> 1,  # servers take numbers below 2^63
            0.0 if greedy else config.temperature,
            1.0 if greedy else config.top_p,
            0 if greedy else config.top_k,
            self._stop_ids,
            stop_texts=self.tasks.stops[attempt.problem.task],
            group=None if turn else attempt.problem.id,
        )

    def _take(self, attempt: Attempt, completion: Completion) -> "Future[Conversation]":
        """Take up a turn of the model: the conversation with it and what the environment says."""
        attempt.texts[-1].said(completion)
        attempt.truncated, attempt.last = completion.truncated, len(completion.tokens)
        text = self._tokenizer.decode(completion.tokens.ids)
        for stop in self.tasks.stops[attempt.problem.task]:
            before, found, _ = text.partition(stop)
            text = before + found
        if not attempt.truncated:
            return self.tasks.reply(attempt.conversation, text)
        cut: Future[Conversation] = Future()
        cut.set_result(replace(attempt.conversation.said("model", text), ended=True))
        return cut

    def _goes_on(self, attempt: Attempt) -> bool:
        """Whether the model has another turn; then what it is asked is there."""
        conversation = attempt.conversation
        if conversation.ended or conversation.turns[-1].author == "model":
            return False
        text, fresh = attempt.texts[-1], None
        if isinstance(conversation.problem.prompt, str):
            (ids,) = self._tokenizer.encode_batch([conversation.turns[-1].text])
            heard = ids.tolist()
        else:
            heard, fresh = self._heard(conversation, text)
        if len(heard) + (0 if fresh else len(text.ids)) >= self._capacity:
            attempt.truncated = True
            return False
        if fresh:
            attempt.texts.append(Text())
        attempt.texts[-1].given(heard)
        return True

    def _heard(self, conversation: Conversation, text: Text) -> tuple[list[int], bool]:
        """What the chat template writes after the model's turn, and whether it has rewritten what was before: then it
        is all of the chat so far."""
        messages = [dict(message) for message in conversation.problem.prompt if isinstance(message, dict)]
        roles = {"model": "assistant", "environment": "user"}
        messages += [{"role": roles[turn.author], "content": turn.text} for turn in conversation.turns]
        whole, before = self._tokenizer.chat_prompt(messages), self._tokenizer.chat_prompt(messages[:-2])
        through = before + messages[-2]["content"]
        kept = whole.startswith(through)
        (encoded,) = self._tokenizer.encode_batch([whole[len(through) :] if kept else whole], special=True)
        ids = encoded.tolist()
        if kept and ids[:1] == text.ids[-1:] and text.sampled[-1]:  # the model has ended its turn itself
            ids = ids[1:]
        return ids, not kept

    def _overlong(self, attempt: Attempt) -> float:
        """What is taken off the reward."""
        if not self._config.overlong:
            return 0.0
        beyond = attempt.last - (self._config.longest - self._config.overlong)
        return min(max(beyond / self._config.overlong, 0.0), 1.0)


def _imitated(text: Text) -> Sample:
    ids = np.array(text.ids, np.int64)
    return Sample({"ids": ids[:-1], "labels": ids[1:], "loss": np.array(text.sampled[1:], bool)})
