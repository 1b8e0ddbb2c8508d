"""What a verifier process does: it makes tasks from their specification and answers one call after another.

Started by ``pool`` as ``python -m equigrad.rl.tasks.worker``. Requests and replies are JSON, one a line, over a socket
that only these two know, so that a task may print what it likes. Kept free of heavy imports: it starts often.
"""

import json
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from equigrad.errors import UserError
from equigrad.rl.tasks.protocol import Conversation, Place, Problem, Task, check_question, described, judge

MIB = 1 << 20


def make_task(spec: dict[str, Any]) -> Task:
    """The task of a specification: its ``kind`` (``python``, ``gym``), ``name``, ``options`` and ``long``."""
    if spec["kind"] == "gym":
        from equigrad.rl.tasks.gym import GymTask

        return GymTask(spec["name"], spec["options"], spec["long"])
    from equigrad.rl.tasks.user import load_task

    return load_task(spec["name"], spec["options"])


def perform(task: Task, call: str, argument: Any) -> Any:
    """One call of a task, its argument and result as JSON data.

    facts:    what is fixed about the task
    question: of a ``Place``, a ``Question``
    reply:    of a ``Conversation``, text or None
    verify:   of a ``Conversation``, a ``Verdict``; never raises
    solution: of a ``Problem``, a list of texts
    """
    if call == "facts":
        return {"levels": _checked(task.levels, int), "stops": [_checked(stop, str) for stop in task.stops]}
    if call == "question":
        return list(check_question(task.question(Place(**argument))))
    if call == "solution":
        return [_checked(text, str) for text in task.solution(Problem(**argument))]
    conversation = Conversation.from_json(argument)
    if call == "reply":
        return _checked(task.reply(conversation), str | None)
    return vars(judge(task, conversation))


def _checked(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"the task gave {type(value).__name__} where {getattr(kind, '__name__', kind)} is asked for")
    return value


class Worker:
    """Keeps the tasks that it has made. Asks to be replaced once calls have taken half of the memory that was left when
    tasks were made: better now than to fail somebody else's request."""

    def __init__(self, memory_mb: int) -> None:
        self._tasks: dict[str, Task] = {}
        self._memory = self._enough = memory_mb * MIB
        if self._memory:
            resource.setrlimit(resource.RLIMIT_AS, (self._memory, self._memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is a verdict here, nothing to keep

    def answer(self, request: dict[str, Any]) -> bytes:
        """The reply to a request, a line of JSON."""
        key = json.dumps(request["spec"])
        # Should it hang when the parent is gone, the system ends it: a handler in Python would wait for the hang's end.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, request["limit"] + 1)
        reply: dict[str, Any] = {"id": request["id"]}
        try:
            if request["call"] == "load":
                self._tasks[key] = make_task(request["spec"])
                self._enough = (_size() + self._memory) // 2
            else:
                reply["value"] = perform(self._tasks[key], request["call"], request["argument"])
            line = json.dumps(reply | {"tired": self._memory > 0 and self._enough < _size()}, allow_nan=False)
        except UserError as error:
            line = json.dumps(reply | {"value": None, "fault": str(error)})
        except (Exception, SystemExit) as error:
            line = json.dumps(reply | {"value": None, "fault": described(error)})
        signal.setitimer(signal.ITIMER_REAL, 0)
        return line.encode() + b"\n"


def _size() -> int:
    """Bytes of address space in use, which is what the limit is on; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def main(descriptor: int, memory_mb: int) -> None:
    """Serve until the other end closes."""
    with socket.socket(fileno=descriptor) as connection:
        connection.set_inheritable(False)
        worker = Worker(memory_mb)
        for line in connection.makefile("rb"):
            connection.sendall(worker.answer(json.loads(line)))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
