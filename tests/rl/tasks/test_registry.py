"""All tasks of a job behind one door, whether they run here or in processes."""

import json
from pathlib import Path
from typing import Any

import pytest

from equigrad.errors import UserError
from equigrad.rl.tasks.protocol import Conversation, Problem, Verdict
from equigrad.rl.tasks.registry import Tasks
from tests.rl.tasks.given import BUILT_IN, WILD, rl, write

PAGE = Path(__file__).parents[3] / "docs" / "rl-tasks.md"


@pytest.fixture(scope="module")
def wild(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"{write(tmp_path_factory.mktemp('task') / 'wild.py', WILD)}:Wild"


def play(tasks: Tasks, problem: Problem, completions: tuple[str, ...]) -> Conversation:
    conversation = Conversation(problem)
    for completion in completions:
        assert not conversation.ended
        conversation = tasks.reply(conversation, completion).result(30)
    return conversation


def test_a_mixture_of_all_tasks_is_solved_by_the_reference_solutions(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"prompt": f"say {n}", "answer": n}) + "\n" for n in range(60))
    names = [*BUILT_IN, str(write(tmp_path / "say.jsonl", lines))]
    with Tasks(rl(list(names)), seed=4) as tasks:
        state = tasks.begin()
        problems = [tasks.problem(n, state, split) for n in range(60) for split in ("train", "held_out")]  # type: ignore[arg-type]
        assert {problem.task for problem in problems} == set(names)
        assert len({problem.id for problem in problems}) == len(problems)
        for problem in problems:
            conversation = play(tasks, problem, tasks.solution(problem))
            assert conversation.ended
            assert tasks.verify(conversation).result().reward == 1
    assert json.loads(json.dumps(state)) == state
    assert problems[0] == Problem(**json.loads(json.dumps(vars(problems[0]))))


def test_problems_depend_on_the_seed_and_the_index_and_training_problems_on_the_state() -> None:
    config = rl("arithmetic", curriculum={"window": 2, "review": 0.0})
    with Tasks(config, seed=0) as tasks, Tasks(config, seed=1) as others:
        state = tasks.begin()
        first = [tasks.problem(n, state) for n in range(30)]
        assert [tasks.problem(n, state) for n in range(30)] == first
        assert [others.problem(n, state).prompt for n in range(30)] != [problem.prompt for problem in first]
        results = [(problem, Verdict(1.0)) for problem in first[:2]]
        later = tasks.advance(state, results)
        assert later["arithmetic"]["level"] == 1
        assert {tasks.problem(n, later).level for n in range(30)} == {1}
        assert [tasks.problem(n, later, "held_out") for n in range(9)] == [
            tasks.problem(n, state, "held_out") for n in range(9)
        ]


def test_in_a_chat_the_prompt_is_what_the_user_says() -> None:
    with Tasks(rl("countdown", chat=True), seed=0) as chat, Tasks(rl("countdown"), seed=0) as plain:
        text = plain.problem(0, plain.begin()).prompt
        assert isinstance(text, str)
        assert chat.problem(0, chat.begin()).prompt == [{"role": "user", "content": text.strip()}]


def test_a_turn_that_is_one_too_many_is_the_last() -> None:
    with Tasks(rl("calculator", max_turns=2), seed=0) as tasks:
        assert tasks.stops == {"calculator": ("</calc>",)}
        problem = tasks.problem(0, tasks.begin())
        conversation = play(tasks, problem, ("<calc>1+1</calc>", "<calc>1+2</calc>"))
        assert [turn.author for turn in conversation.turns] == ["model", "environment", "model"]
        assert conversation.ended


def test_a_users_task_runs_in_processes_and_its_faults_are_verdicts(wild: str) -> None:
    config = rl({"name": wild, "options": {"base": 0.5}}, verify_timeout_s=1.5)
    with Tasks(config, seed=0) as tasks:
        problem = tasks.problem(0, tasks.begin())
        assert problem == tasks.problem(0, tasks.begin())
        assert str(problem.prompt).startswith("number ")

        def verdict(*completions: str) -> Verdict:
            return tasks.verify(play(tasks, problem, completions)).result(30)

        assert verdict("ok 1") == Verdict(1.5, "ok")
        assert play(tasks, problem, ("ask this", "ok 1")).turns[1].text == "heard this"
        for completion, reason in {
            "crash": "the environment failed: the process ended with exit code 3",
            "bad": "the environment failed: TypeError: the task gave int where str | None is asked for",
            "kill": "verifier: the process was ended by SIGKILL",
            "hang": "verifier: no answer within 1.5 s",
            "raise": "the verifier raised ValueError: no good",
        }.items():
            found = verdict(completion)
            assert found.failed, completion
            assert found.reward == 0
            assert reason in found.reason
        assert tasks.solution(problem) == ()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("Wild(Task)", "Wild"), "is no task: Wild; a task is a class that derives from"),
        (("self.base = base", "raise RuntimeError('not today')"), "RuntimeError: not today ("),
        (("import ctypes", "import no_such_module, ctypes"), "No module named 'no_such_module'"),
        (("import ctypes", "import ctypes,"), "SyntaxError"),
    ],
    ids=["class", "constructor", "import", "syntax"],
)
def test_a_users_task_that_cannot_be_made_is_the_users_to_mend(
    tmp_path: Path, change: tuple[str, str], complaint: str
) -> None:
    file = write(tmp_path / "mine.py", WILD.replace(*change))
    with pytest.raises(UserError) as caught:
        Tasks(rl(f"{file}:Wild"), seed=0)
    assert f"task {file}:Wild: " in str(caught.value)
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("raise KeyError('gone')", "KeyError: 'gone' ("),
        ("return 'just a prompt'", "a question is made of a prompt and facts"),
        ("return Question('?', {'set': {1}})", "not all JSON data"),
        ("return Question('always the same', {})", "too few different ones"),
        ("os._exit(9)", "exit code 9"),
    ],
)
def test_a_task_that_gives_no_question_is_an_error_and_not_a_crash(tmp_path: Path, body: str, complaint: str) -> None:
    text = (
        "import os\nfrom equigrad.rl.tasks import Question, Task\n\nclass Mine(Task):\n"
        f"    def draw(self, draw, level):\n        {body}\n    def verify(self, conversation):\n        return 0\n"
    )
    file = write(tmp_path / "mine.py", text)
    with Tasks(rl(f"{file}:Mine"), seed=0) as tasks, pytest.raises(UserError) as caught:
        [tasks.problem(0, tasks.begin(), split) for split in ("train", "held_out")]
    assert complaint in str(caught.value)


def test_a_task_may_import_what_lies_beside_it(tmp_path: Path) -> None:
    write(tmp_path / "beside.py", "PROMPT = 'from beside'\n")
    text = (
        "import beside\nfrom equigrad.rl.tasks import Question, Task\n\nclass Mine(Task):\n    levels = 3\n"
        "    def draw(self, draw, level):\n"
        "        return Question(f'{beside.PROMPT} {draw.below(1000)}', {'level': level})\n"
        "    def verify(self, conversation):\n        return conversation.problem.facts['level']\n"
    )
    with Tasks(rl(f"{write(tmp_path / 'mine.py', text)}:Mine"), seed=0) as tasks:
        assert list(tasks.levels.values()) == [3]
        problem = tasks.problem(0, tasks.begin())
        assert str(problem.prompt).startswith("from beside ")
        assert tasks.verify(Conversation(problem).said("model", "")).result(30).reward == 0


def test_a_verdict_does_not_need_a_conversation_that_ended_by_itself() -> None:
    """A rollout may be cut off by its length."""
    with Tasks(rl("calculator"), seed=0) as tasks:
        problem = tasks.problem(0, tasks.begin())
        found: Any = tasks.verify(Conversation(problem).said("model", "<calc>1+")).result()
        assert (found.reward, found.failed) == (0.0, False)


def test_the_task_that_the_documentation_shows_works(tmp_path: Path) -> None:
    code = PAGE.read_text(encoding="utf-8").partition('```python title="my_task.py"\n')[2].partition("```")[0]
    name = f"{write(tmp_path / 'my_task.py', code)}:Palindrome"
    with Tasks(rl({"name": name, "options": {"digits": 3}}), seed=0) as tasks:
        problem = tasks.problem(0, tasks.begin())
        start = int(str(problem.prompt).removeprefix("Next palindrome from ").removesuffix(": "))
        answer = next(n for n in range(start, 2000) if str(n) == str(n)[::-1])
        for said, reward in ((str(answer), 1.0), (str(answer + 1), 0.0)):
            found = tasks.verify(Conversation(problem).said("model", said)).result(30)
            assert found == Verdict(reward, f"it is {answer}", parts={"digits": 1.0})
