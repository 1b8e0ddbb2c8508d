"""The calculator answers calls, exactly and only where they end a turn."""

import pytest

from equigrad.config.tasks import Calculator
from equigrad.rl.tasks.calculator import CalculatorTask, calculate
from equigrad.rl.tasks.protocol import Conversation, Question
from tests.rl.tasks.given import problem

TASK = CalculatorTask(Calculator(most_calls=2), long=False)
ASKED = Conversation(problem(Question("37*48+5 = ?\n", {"expression": "37*48+5", "answer": 1781})))


@pytest.mark.parametrize(
    ("said", "result"),
    [
        ("<calc>12*7</calc>", "84"),
        ("First <calc>12*7</calc>", "84"),
        ("<calc>1+1</calc><calc>12*7</calc>", "84"),
        ("<calc>0.1+0.2</calc>", "0.3"),
        ("<calc>1/3</calc>", "1/3"),
        ("<calc>1/0</calc>", "error: division by zero"),
        ("<calc>9**9**9**9</calc>", "error: '*' is not expected where it stands"),
        ("<calc>__import__('os').abort()</calc>", "error: '_' is neither digit, + - * / nor parenthesis"),
        ("12*7</calc>", "error: <calc> is missing"),
        ("<calc></calc>", "error: it is empty"),
    ],
)
def test_a_call_is_answered_exactly_or_with_what_is_wrong_with_it(said: str, result: str) -> None:
    assert calculate(said) == result
    assert TASK.reply(ASKED.said("model", said)) == f"<result>{result}</result>"


@pytest.mark.parametrize("said", ["1781", "<calc>12*7</calc> = 84", "<calc>12*7", "<result>84</result>", ""])
def test_a_turn_that_does_not_end_with_a_call_is_the_last(said: str) -> None:
    assert TASK.reply(ASKED.said("model", said)) is None


def test_calls_have_an_end() -> None:
    conversation = ASKED
    for answers in (True, True, False):
        conversation = conversation.said("model", "<calc>1+1</calc>")
        reply = TASK.reply(conversation)
        assert (reply is not None) == answers
        if reply is not None:
            conversation = conversation.said("environment", reply)


def test_the_answer_is_in_the_last_turn_of_the_model_and_calls_are_counted() -> None:
    conversation = ASKED.said("model", "1781 <calc>37*48</calc>").said("environment", "<result>1776</result>")
    assert TASK.verify(conversation).reward == 0
    found = TASK.verify(conversation.said("model", "1776+5=1781"))
    assert found.reward == 1
    assert found.parts == {"format": 1, "correct": 1, "calls": 1}
