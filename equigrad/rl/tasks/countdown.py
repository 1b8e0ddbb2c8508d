"""Make a target out of given numbers with ``+ - * /``, each used at most once. Checked in exact rational arithmetic."""

from collections import Counter

from equigrad.config.tasks import Countdown
from equigrad.errors import UserError
from equigrad.rl.tasks.answers import answer_text, shown
from equigrad.rl.tasks.draws import Draw
from equigrad.rl.tasks.expression import ExpressionError, evaluate
from equigrad.rl.tasks.protocol import Conversation, Problem, Question, Task, Verdict

_TRIES = 10_000


class CountdownTask(Task):
    """Facts: ``numbers``, ``target`` and one ``solution``. Parts: ``format`` (an expression of the given numbers),
    ``correct``. The answer is an expression, perhaps followed by ``=`` and the target."""

    def __init__(self, config: Countdown, long: bool) -> None:
        self._config, self._long = config, long
        self.levels = len(config.numbers)

    def draw(self, draw: Draw, level: int) -> Question:
        numbers, target, solution = self._solvable(draw, self._config.numbers[level])
        given = " ".join(map(str, numbers))
        prompt = f"{given} -> {target}\n"
        if self._long:
            prompt = (
                f"Make {target} out of the numbers {given}: use + - * / and parentheses, and each number at most once."
                " Write the expression between <answer> and </answer>.\n"
            )
        facts = {"numbers": numbers, "target": target, "solution": solution}
        return Question(prompt, facts, f"{sorted(numbers)} {target}")

    def _solvable(self, draw: Draw, count: int) -> tuple[list[int], int, str]:
        """Numbers, a target that is none of them, and how to make it."""
        for _ in range(_TRIES):
            numbers = [draw.between(1, self._config.largest) for _ in range(count)]
            target, solution = _combined(draw, numbers)
            if target <= self._config.target and target not in numbers:
                return numbers, target, solution
        raise UserError(
            f"rl.countdown: {_TRIES} times no {count} numbers up to {self._config.largest} made a target up to"
            f" {self._config.target}; rl.countdown.target must be larger"
        )

    def verify(self, conversation: Conversation) -> Verdict:
        facts = conversation.problem.facts
        answer, equals, right_side = answer_text(conversation.completion).partition("=")
        fault = None if not equals or right_side.strip() == str(facts["target"]) else "after = stands not the target"
        try:
            found = evaluate(answer)
            left = Counter(map(str, facts["numbers"]))
            left.subtract(found.numbers)
            missing = sorted(number for number, count in left.items() if count < 0)
            if missing:
                fault = f"{', '.join(missing)} is used more often than it is given"
            elif found.signed:
                fault = "a sign before a number is none of + - * / between two"
        except ExpressionError as error:
            fault = str(error)
        if fault is not None:
            return Verdict(0.0, f"{shown(answer.strip())}: {fault}", parts={"format": 0.0, "correct": 0.0})
        right = found.value == facts["target"]
        reason = f"{shown(answer.strip())} is {found.value}, as asked" if right else (
            f"{shown(answer.strip())} is {found.value}, not {facts['target']}"
        )  # fmt: skip
        return Verdict(float(right), reason, parts={"format": 1.0, "correct": float(right)})

    def solution(self, question: Question | Problem) -> tuple[str, ...]:
        return (str(question.facts["solution"]),)


def _combined(draw: Draw, numbers: list[int]) -> tuple[int, str]:
    """A positive whole number made of all the numbers, by positive whole numbers, and how."""
    parts = [(number, str(number)) for number in numbers]
    while len(parts) > 1:
        (a, left), (b, right), *parts = draw.shuffled(parts)
        made = [(a + b, "+"), (a * b, "*")]
        made += [(a - b, "-")] if a > b else []
        made += [(a // b, "/")] if b > 1 and a % b == 0 else []
        value, symbol = draw.choice(made)
        parts.append((value, f"({left}{symbol}{right})"))
    return parts[0][0], parts[0][1][1:-1]
