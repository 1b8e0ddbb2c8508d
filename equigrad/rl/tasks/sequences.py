"""Copy, reverse or sort a list of letters or numbers. Levels raise its length."""

from string import ascii_lowercase

from equigrad.config.tasks import Sequences
from equigrad.rl.tasks.answers import answer_text, shown
from equigrad.rl.tasks.draws import Draw
from equigrad.rl.tasks.protocol import Conversation, Problem, Question, Task, Verdict

_NUMBERS = [str(number) for number in range(100)]
_WORDING = {
    "copy": "Copy this list",
    "reverse": "Write this list in reverse order",
    "sort": "Sort this list, the smallest first",
}


class SequencesTask(Task):
    """Facts: ``answer``, the items as they should be. A list is in one split, whatever is to be done with it. Parts:
    ``correct``, and ``in_place``, the share of items where they should be."""

    def __init__(self, config: Sequences, long: bool) -> None:
        self._config, self._long = config, long
        self.levels = len(config.lengths)
        self._items = ascii_lowercase if config.items == "letters" else _NUMBERS

    def draw(self, draw: Draw, level: int) -> Question:
        items = [draw.choice(self._items) for _ in range(self._config.lengths[level])]
        kind = draw.choice(self._config.kinds)
        text = " ".join(items)
        prompt = f"{kind} {text} =\n"
        if self._long:
            prompt = f"{_WORDING[kind]}, and put it between <answer> and </answer>: {text}\n"
        answer = {"copy": items, "reverse": items[::-1], "sort": sorted(items, key=self._items.index)}[kind]
        return Question(prompt, {"answer": answer}, text)

    def verify(self, conversation: Conversation) -> Verdict:
        expected = conversation.problem.facts["answer"]
        text = answer_text(conversation.completion)
        found = text.split()
        right = found == expected
        in_place = sum(a == b for a, b in zip(found, expected, strict=False)) / max(len(found), len(expected))
        reason = f"{shown(text)} is right" if right else f"{shown(text)} is wrong, it is {shown(' '.join(expected))}"
        return Verdict(float(right), reason, parts={"correct": float(right), "in_place": in_place})

    def solution(self, question: Question | Problem) -> tuple[str, ...]:
        return (" ".join(question.facts["answer"]),)
