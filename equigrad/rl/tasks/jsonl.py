"""Prompts with answers from a JSONL file: ``{"prompt": "...", "answer": 7}``. Every record once, then once more.

A record's prompt decides its split, so equal prompts are never in both.
"""

from fractions import Fraction
from typing import Any

import numpy as np

from equigrad.config.tasks import Jsonl
from equigrad.data.shuffle import Permutation
from equigrad.data.sources import json_records
from equigrad.errors import UserError
from equigrad.rl.tasks.answers import answer_text, judge_number, parse_number, shown
from equigrad.rl.tasks.draws import Draw
from equigrad.rl.tasks.protocol import (
    Conversation,
    Place,
    Problem,
    Question,
    Split,
    Task,
    Verdict,
    check_question,
    key_of,
)


class JsonlTask(Task):
    """Facts: ``answers``, any of which will do. An answer that is a number is compared by value, other text exactly."""

    def __init__(self, path: str, config: Jsonl) -> None:
        self._path, self._config = path, config
        self._questions = [self._read(where, record) for where, record in json_records(path)]
        self._parts: dict[tuple[Split, int], list[Question]] = {}

    def _read(self, where: str, record: dict[str, Any]) -> Question:
        for key in (self._config.prompt, self._config.answer):
            if key not in record:
                names = ", ".join(map(repr, record)) or "none"
                raise UserError(f"{where}: no key {key!r}; the keys are {names}; [rl.jsonl] says which to read")
        prompt, given = record[self._config.prompt], record[self._config.answer]
        answers = given if isinstance(given, list) else [given]
        if not answers or not all(isinstance(a, str | int | float) and not isinstance(a, bool) for a in answers):
            raise UserError(f"{where}: {self._config.answer!r} must be text, a number, or a list of them")
        try:
            return check_question(Question(prompt, {"answers": answers}))
        except ValueError as error:
            raise UserError(f"{where}: {error}") from None

    def question(self, at: Place) -> Question:
        """The records of the split, in another order in each epoch."""
        part = (at.split, at.held_out_every)
        if part not in self._parts:
            self._parts[part] = [question for question in self._questions if at.holds(key_of(question))]
        members = self._parts[part]
        if not members:
            raise UserError(
                f"{self._path}: none of its {len(self._questions)} records belongs to the split {at.split!r};"
                f" rl.held_out_every = {at.held_out_every} holds out about one in so many"
            )
        epoch, place = divmod(at.index, len(members))
        order = Permutation(len(members), at.seed, epoch)
        return members[int(order(np.array([place]))[0])]

    def draw(self, draw: Draw, level: int) -> Question:
        """Any record."""
        return draw.choice(self._questions)

    def verify(self, conversation: Conversation) -> Verdict:
        answers = conversation.problem.facts["answers"]
        verdicts = [_judged(conversation.completion, answer) for answer in answers]
        return max(verdicts, key=lambda verdict: verdict.reward)

    def solution(self, question: Question | Problem) -> tuple[str, ...]:
        return (str(question.facts["answers"][0]),)


def _judged(completion: str, answer: str | int | float) -> Verdict:
    number = parse_number(answer.strip()) if isinstance(answer, str) else Fraction(str(answer))
    if number is not None:
        return judge_number(completion, number)
    text = answer_text(completion)
    right = text == str(answer).strip()
    reason = f"{shown(text)} is right" if right else f"{shown(text)} is wrong, it is {shown(str(answer).strip())}"
    return Verdict(float(right), reason, parts={"correct": float(right)})
