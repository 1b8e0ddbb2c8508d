"""What holds for every built-in task: places alone decide on problems, splits are apart, right is right."""

import json
import subprocess
import sys
import time

import pytest

from equigrad.errors import UserError
from equigrad.rl.tasks.protocol import Conversation, Question, Task, check_question, judge, key_of
from tests.jobs import environment
from tests.rl.tasks.given import BUILT_IN, listing, place, problem, questions, talk, task, verdict

WORDINGS = ("short", "long")


def played(task: Task, question: Question, completions: tuple[str, ...]) -> Conversation:
    """With the environment's replies."""
    conversation = Conversation(problem(question))
    for number, completion in enumerate(completions, 1):
        conversation = conversation.said("model", completion)
        reply = task.reply(conversation)
        assert (reply is None) == (number == len(completions))
        if reply is not None:
            conversation = conversation.said("environment", reply)
    return conversation


def test_another_process_makes_the_same_problems() -> None:
    code = "from tests.rl.tasks.given import listing; print(listing())"
    env = environment({"PYTHONHASHSEED": "5"})
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stdout == f"{listing()}\n", done.stderr


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_problem_does_not_depend_on_those_made_before(name: str) -> None:
    made = task(name)
    forwards = [made.question(place(n)) for n in range(10)]
    assert [made.question(place(n)) for n in reversed(range(10))] == forwards[::-1]
    assert len({key_of(question) for question in forwards}) > 5
    assert made.question(place(3, seed=1)) != forwards[3]


@pytest.mark.parametrize("name", BUILT_IN)
def test_nothing_trained_on_is_held_out_at_any_level_or_seed(name: str) -> None:
    made = task(name)
    train = {key_of(made.question(place(n, "train", n % made.levels, seed=n % 3))) for n in range(300)}
    held_out = {key_of(made.question(place(n, "held_out", n % made.levels, seed=n % 3))) for n in range(100)}
    assert len(train) > 30
    assert len(held_out) > 3
    assert not train & held_out


@pytest.mark.parametrize("wording", WORDINGS)
@pytest.mark.parametrize("name", BUILT_IN)
def test_the_reference_solution_gets_the_full_reward(name: str, wording: str) -> None:
    for made, question in questions(name, wording):
        found = judge(made, played(made, question, made.solution(question)))
        assert (found.reward, found.failed) == (1.0, False), (question, found)


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_marked_solution_gets_it_too_whatever_stands_around_it(name: str) -> None:
    for made, question in questions(name):
        marked = f"Well, 7 or = 8, <answer>1</answer>; no: <answer>{made.solution(question)[-1]}</answer> I think."
        assert verdict(made, question, marked).reward == 1.0


@pytest.mark.parametrize("name", sorted({*BUILT_IN} - {"format"}))  # where more words are no harm
def test_anything_but_the_solution_gets_less_and_a_reason(name: str) -> None:
    for made, question in questions(name):
        right = made.solution(question)[-1]
        for wrong in (
            f"{right}1",
            f"1 {right}",
            f"{right} {right}",
            right[:-1],
            f"={right} ?",
            "x y",
            "<answer></answer>",
        ):
            if wrong == right or (name == "countdown" and wrong == right[:-1]):  # "12*4" without its end can be right
                continue
            found = verdict(made, question, wrong)
            assert found.reward < 1, (question, wrong, found)
            assert found.reason
            assert not found.failed


@pytest.mark.parametrize("name", BUILT_IN)
def test_an_empty_completion_gets_nothing(name: str) -> None:
    for made, question in questions(name):
        assert verdict(made, question, "").reward == 0
        assert judge(made, talk(question)).reward == 0  # the model has not said anything


@pytest.mark.parametrize("name", ["arithmetic", "countdown"])  # in others the prompt holds what the answer is made of
def test_the_answer_stands_in_no_prompt(name: str) -> None:
    for made, question in questions(name, "long"):
        assert f" {made.solution(question)[-1]} " not in f" {question.prompt} "


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_question_is_json_data_and_says_how_to_answer_where_it_is_long(name: str) -> None:
    for wording in WORDINGS:
        for _, question in questions(name, wording, 8):
            assert json.loads(json.dumps(check_question(question))) == list(question)
            assert ("<answer>" in str(question.prompt)) == (wording == "long")


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize(
    "piece", ["9", "a", " ", "(", "-", "<answer>", "</answer>", "<calc>", "</calc>", "1+", "\U0001f600", "\ud800"]
)
def test_verifiers_that_have_no_time_limit_need_none(name: str, piece: str) -> None:
    made, question = questions(name, count=1)[0]
    start = time.perf_counter()
    conversation = talk(question, piece * (10**6 // len(piece)))
    made.reply(conversation)
    found = judge(made, conversation)
    assert time.perf_counter() - start < 1
    assert not found.failed
    assert found.reward < 1
    assert len(found.reason) < 500


def test_a_task_with_too_few_questions_for_a_split_says_so() -> None:
    class One(Task):
        def draw(self, draw: object, level: int) -> Question:
            return Question("1+1=", {})

        def verify(self, conversation: Conversation) -> float:
            return 0.0

    splits = ("train", "held_out")
    failed = []
    for split in splits:
        try:
            One().question(place(0, split))
        except UserError as error:
            failed.append(str(error))
    assert len(failed) == 1
    assert "too few different ones for rl.held_out_every = 10" in failed[0]
