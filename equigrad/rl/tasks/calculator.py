"""An expression, and a calculator to ask: the model writes ``<calc>12*7</calc>`` and reads ``<result>84</result>``."""

from equigrad.config.tasks import Calculator
from equigrad.rl.tasks.answers import judge_number
from equigrad.rl.tasks.draws import Draw
from equigrad.rl.tasks.expression import ExpressionError, decimal_text, evaluate
from equigrad.rl.tasks.protocol import Conversation, Problem, Question, Task, Verdict

CALL, CALL_END = "<calc>", "</calc>"


class CalculatorTask(Task):
    """Facts: ``expression`` and its value ``answer``, a whole number. Parts: those of a number, and ``calls``.

    A call is answered where it ends the model's turn; the turn without one is the answer.
    """

    stops = (CALL_END,)

    def __init__(self, config: Calculator, long: bool) -> None:
        self._config, self._long = config, long
        self.levels = len(config.operands)

    def draw(self, draw: Draw, level: int) -> Question:
        text = str(draw.between(1, self._config.below - 1))
        for _ in range(self._config.operands[level] - 1):
            text += draw.choice("+-*") + str(draw.between(1, self._config.below - 1))
        prompt = f"{text} = ?\n"
        if self._long:
            prompt = (
                f"What is {text}? Ask the calculator: it answers what you write between {CALL} and {CALL_END}."
                " Write the result between <answer> and </answer>.\n"
            )
        return Question(prompt, {"expression": text, "answer": int(evaluate(text).value)}, text)

    def reply(self, conversation: Conversation) -> str | None:
        said = conversation.completion.rstrip()
        calls = sum(turn.author == "environment" for turn in conversation.turns)
        if not said.endswith(CALL_END) or calls == self._config.most_calls:
            return None
        return f"<result>{calculate(said)}</result>"

    def verify(self, conversation: Conversation) -> Verdict:
        verdict = judge_number(conversation.completion, conversation.problem.facts["answer"])
        calls = sum(turn.author == "environment" for turn in conversation.turns)
        return Verdict(verdict.reward, verdict.reason, parts={**verdict.parts, "calls": float(calls)})

    def solution(self, question: Question | Problem) -> tuple[str, ...]:
        return f"{CALL}{question.facts['expression']}{CALL_END}", str(question.facts["answer"])


def calculate(said: str) -> str:
    """What the calculator says to a text that ends with a call."""
    start = said.rfind(CALL)
    if start < 0:
        return f"error: {CALL} is missing"
    try:
        return decimal_text(evaluate(said[start + len(CALL) : -len(CALL_END)]).value)
    except ExpressionError as error:
        return f"error: {error}"
