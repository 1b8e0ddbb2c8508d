"""The tasks of the reasoning-gym package, by name: ``reasoning-gym:chain_sum``. It scores answers itself."""

import importlib
from collections.abc import Mapping
from typing import Any

from equigrad.errors import UserError
from equigrad.rl.tasks.answers import answer_text
from equigrad.rl.tasks.draws import Draw
from equigrad.rl.tasks.protocol import Conversation, Problem, Question, Task, Verdict

SIZE = 20_000
"""Problems of a dataset, among which all splits and seeds draw, unless the option ``size`` says otherwise. More are
refused by ``word_ladder``, and ``acre``, which makes them all at once, takes 5 s for these (version 0.1.25)."""


class GymTask(Task):
    """Facts: ``item``, the problem's number in the dataset, by which its entry is made again to score an answer; and
    ``answer``, where there is a single one in words."""

    def __init__(self, name: str, options: Mapping[str, Any], long: bool) -> None:
        try:
            gym = importlib.import_module("reasoning_gym")
        except ImportError as error:
            if error.name != "reasoning_gym":
                raise
            raise UserError("reasoning-gym is not installed; it comes with: pip install 'equigrad[gym]'") from None
        known = importlib.import_module("reasoning_gym.factory").DATASETS
        if name not in known:
            raise UserError(f"reasoning-gym has no dataset {name!r}; it has {', '.join(sorted(known))}")
        self._dataset = gym.create_dataset(name, **{"seed": 0, "size": SIZE, **options})
        self._long = long

    def draw(self, draw: Draw, level: int) -> Question:
        item = draw.below(len(self._dataset))
        entry = self._dataset[item]
        prompt = entry["question"].rstrip() + "\n"
        if self._long:
            prompt += "Write the answer between <answer> and </answer>.\n"
        return Question(prompt, {"item": item, "answer": entry["answer"]}, entry["question"])

    def verify(self, conversation: Conversation) -> Verdict:
        facts = conversation.problem.facts
        text = answer_text(conversation.completion)
        score = self._dataset.score_answer(text, self._dataset[facts["item"]])
        return Verdict(score, f"scored {score:g}; the answer is {facts['answer']!r}")

    def solution(self, question: Question | Problem) -> tuple[str, ...]:
        answer = question.facts["answer"]
        return () if answer is None else (answer,)
