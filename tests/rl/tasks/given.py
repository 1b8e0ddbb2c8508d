"""Problems and conversations for tests, and a task file with every way to misbehave. Loads no torch."""

import json
from pathlib import Path
from typing import Any

from equigrad.config.rl import Rl
from equigrad.rl.tasks.protocol import Conversation, Place, Problem, Question, Split, Task, Verdict, judge
from equigrad.rl.tasks.registry import own_task

BUILT_IN = ("arithmetic", "calculator", "countdown", "format", "sequences")


def rl(task: Any, **changes: Any) -> Rl:
    """A section with a task or several."""
    return Rl.model_validate({"task": task} | changes)


def place(index: int, split: Split = "train", level: int = 0, seed: int = 0, every: int = 10) -> Place:
    return Place("test", split, seed, index, level, every)


def problem(question: Question) -> Problem:
    return Problem("test/0", "test", "train", 0, 0, question.prompt, question.facts)


def talk(question: Question, *completions: str) -> Conversation:
    """A conversation in which the environment says nothing."""
    conversation = Conversation(problem(question))
    for completion in completions:
        conversation = conversation.said("model", completion)
    return conversation


def verdict(task: Task, question: Question, *completions: str) -> Verdict:
    return judge(task, talk(question, *completions))


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def task(name: str, wording: str = "short") -> Task:
    """A built-in task with its default options."""
    config = rl(name, wording=wording)
    found = own_task(config.task[0], config)
    assert found is not None
    return found


def questions(name: str, wording: str = "short", count: int = 40) -> list[tuple[Task, Question]]:
    """A built-in task, and questions of every level and both splits."""
    made = task(name, wording)
    places = (place(n, "held_out" if n % 3 == 0 else "train", n % made.levels) for n in range(count))
    return [(made, made.question(at)) for at in places]


def listing() -> str:
    """Questions of all built-in tasks, as text."""
    return json.dumps([[name, *question] for name in BUILT_IN for _, question in questions(name, count=8)])


WILD = '''
import ctypes, os, signal, subprocess, sys, time
from equigrad.rl.tasks import Draw, Question, Task, Verdict


class Evil:
    def __repr__(self):
        raise ValueError("no repr")


class Wild(Task):
    """The completion says what the verifier does; well-behaved, it rewards with the number that it is told."""

    def __init__(self, base=0.0):
        self.base = base
        self.leak = []

    def draw(self, draw: Draw, level: int) -> Question:
        return Question(f"number {draw.below(10**9)}", {"tag": draw.below(100)})

    def reply(self, conversation):
        what, _, more = conversation.completion.partition(" ")
        if what == "ask":
            return f"heard {more}"
        if what == "crash":
            os._exit(3)
        if what == "bad":
            return 7

    def verify(self, conversation):
        what, _, more = conversation.completion.partition(" ")
        if what == "hang":
            time.sleep(1000)
        if what == "spin":  # in C, with the interpreter's lock held and signals blocked
            ctypes.PyDLL(None).sleep(1000)
        if what == "raise":
            raise ValueError("no good")
        if what == "exit":
            sys.exit("enough")
        if what == "quit":
            os._exit(3)
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "segfault":
            ctypes.string_at(0)
        if what == "close":
            os.closerange(3, 1000)
        if what == "garbage":
            return {"none": ["of", "these"]}
        if what == "nan":
            return float("nan")
        if what == "evil":
            return Evil()
        if what == "huge":
            return 10**400
        if what == "long":
            return 1.0, "x" * 50_000_000
        if what == "memory":
            return float(len(bytearray(1 << 40)))
        if what == "leak":
            self.leak.append(b"x" * (150 << 20))
            return float(os.getpid())
        if what == "print":
            print("{}" * 1000)
            os.write(1, b"[1]\\n")
        if what == "talk":  # over the very socket, if it can be guessed
            for descriptor in range(3, 4096):
                try:
                    os.write(descriptor, b"[1]\\n")
                except OSError:
                    pass
        if what == "children":
            child = subprocess.Popen(["sleep", "1000"])
            return Verdict(1.0, str(child.pid))
        if what == "where":
            return Verdict(1.0, str(os.getpid()))
        if what == "sleep":
            time.sleep(float(more))
            return 1.0
        return self.base + float(more or 0), what
'''
