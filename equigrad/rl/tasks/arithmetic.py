"""Two whole numbers, one operation: ``12+7=``. Levels raise the bound of the numbers."""

from equigrad.config.tasks import Arithmetic
from equigrad.rl.tasks.answers import judge_number
from equigrad.rl.tasks.draws import Draw
from equigrad.rl.tasks.protocol import Conversation, Problem, Question, Task, Verdict

SYMBOLS = {"add": "+", "subtract": "-", "multiply": "*"}


class ArithmeticTask(Task):
    """Facts: ``answer``, a whole number. A pair of operands is in one split, whatever their order and operation."""

    def __init__(self, config: Arithmetic, long: bool) -> None:
        self._config, self._long = config, long
        self.levels = len(config.below)

    def draw(self, draw: Draw, level: int) -> Question:
        a, b = draw.below(self._config.below[level]), draw.below(self._config.below[level])
        operation = draw.choice(self._config.operations)
        answer = {"add": a + b, "subtract": a - b, "multiply": a * b}[operation]
        text = f"{a}{SYMBOLS[operation]}{b}"
        prompt = f"What is {text}? Write the number between <answer> and </answer>.\n" if self._long else f"{text}="
        return Question(prompt, {"answer": answer}, f"{min(a, b)} {max(a, b)}")

    def verify(self, conversation: Conversation) -> Verdict:
        return judge_number(conversation.completion, conversation.problem.facts["answer"])

    def solution(self, question: Question | Problem) -> tuple[str, ...]:
        return (str(question.facts["answer"]),)
