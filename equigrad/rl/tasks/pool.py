"""Processes that run what cannot be trusted to end: verifiers and environments that users or other packages wrote.

Each of a few threads owns one process and hands it one request at a time, so a request is answered exactly once
whatever becomes of the process: in time, or with a fault when it hangs, dies, or sends what is no answer. Then it is
killed, with all processes of its session, and the next request gets a new one. Nothing is ever tried again.

Processes are new interpreters, never forks: the parent has threads, and perhaps a GPU.
"""

import itertools
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import equigrad

LOAD_SECONDS = 120.0
"""For a process to start, and a task to be imported and made: more than any import takes."""
LARGEST_REPLY = 16 << 20
"""Bytes."""

_ROOT = str(Path(equigrad.__file__).parents[1])


class Outcome(NamedTuple):
    """What became of a request: a value, or what went wrong."""

    value: Any
    fault: str | None = None


class _Request(NamedTuple):
    number: int
    spec: dict[str, Any]
    line: bytes
    future: "Future[Outcome]"


class _Lost(Exception):
    """A process is of no more use. The message says why; without one, by how it ended."""


class Pool:
    """``workers`` processes, started when first needed. Close it, or use it as a context manager.

    timeout_s: for one call
    memory_mb: address space of a process in MiB; 0: no limit
    """

    def __init__(self, workers: int, timeout_s: float, memory_mb: int) -> None:
        self._timeout, self._memory = timeout_s, memory_mb
        self._numbers = itertools.count(1)
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._processes: dict[int, _Process] = {}
        self._closed = False
        self._lock = threading.Lock()  # of the two above, and of what is decided by them
        self._threads = [threading.Thread(target=self._serve, args=(n,), daemon=True) for n in range(workers)]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, spec: dict[str, Any], call: str, argument: Any = None) -> "Future[Outcome]":
        """Ask for a call (``worker.perform``) of the task of a specification."""
        future: Future[Outcome] = Future()
        number = next(self._numbers)
        line = _line(number, spec, call, argument, self._timeout)
        with self._lock:
            if self._closed:
                raise ValueError("the pool is closed")
            self._requests.put(_Request(number, spec, line, future))
        return future

    def pids(self) -> list[int]:
        """The processes that there are now."""
        with self._lock:
            return [process.pid for process in self._processes.values()]

    def close(self) -> None:
        """End all processes at once; requests that are not answered get a fault. Returns when nothing is left."""
        with self._lock:
            self._closed = True
            for process in self._processes.values():
                process.kill()
        for _ in self._threads:
            self._requests.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self, thread: int) -> None:
        while (request := self._requests.get()) is not None:
            if not request.future.set_running_or_notify_cancel():
                continue
            try:
                outcome = self._answer(thread, request)
            except Exception as error:  # a fault of this file: whoever waits gets its traceback, the others go on
                self._end(thread)
                request.future.set_exception(error)
            else:
                request.future.set_result(outcome)
        self._end(thread)

    def _answer(self, thread: int, request: _Request) -> Outcome:
        try:
            process = self._process(thread)
            outcome = process.load(request.spec)
            if outcome.fault is None:
                outcome = process.ask(request.number, request.line, self._timeout)
            if process.tired:
                self._end(thread)
            return outcome
        except _Lost as lost:
            code = self._end(thread)
            return Outcome(None, "the pool was closed" if self._closed else str(lost) or _death(code))

    def _process(self, thread: int) -> "_Process":
        """A thread's process; a new one where it has died since the last request."""
        process = self._processes.get(thread)
        if process is not None and not process.idle:
            self._end(thread)
            process = None
        with self._lock:
            if self._closed:
                raise _Lost
            if process is None:
                process = self._processes[thread] = _Process(self._memory)
        return process

    def _end(self, thread: int) -> int | None:
        """End a thread's process, if it has one; its exit code."""
        with self._lock:
            process = self._processes.pop(thread, None)
        return None if process is None else process.end()


class _Process:
    """One process. Used by one thread; ``kill`` is for any, as long as nobody has called ``end``."""

    def __init__(self, memory_mb: int) -> None:
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "equigrad.rl.tasks.worker", str(theirs.fileno()), str(memory_mb)]
        path = os.pathsep.join(filter(None, [_ROOT, os.environ.get("PYTHONPATH")]))
        environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONPATH": path}
        with theirs:
            try:
                # What tasks print goes where errors go. A session of its own: what they start ends with them, and
                # an interrupt at the terminal is the parent's alone.
                self._child = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=2, env=environment, pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                self._socket.close()
                raise _Lost(f"no process could be started: {error}") from None
        self.pid = self._child.pid
        self.tired = False
        """Whether it asks to be replaced."""
        self._loaded: list[dict[str, Any]] = []

    @property
    def idle(self) -> bool:
        """Whether it waits for a request: there is nothing to read, neither its end nor what nobody has asked for."""
        self._socket.setblocking(False)
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def load(self, spec: dict[str, Any]) -> Outcome:
        """Make the task of a specification, unless that is done. Raises ``_Lost``."""
        if spec in self._loaded:
            return Outcome(None)
        outcome = self.ask(0, _line(0, spec, "load", None, LOAD_SECONDS), LOAD_SECONDS)
        if outcome.fault is None:
            self._loaded.append(spec)
        return outcome

    def ask(self, number: int, line: bytes, limit: float) -> Outcome:
        """The reply to a request, within ``limit`` seconds. Raises ``_Lost``."""
        deadline = time.monotonic() + limit
        try:
            self._socket.settimeout(limit)
            self._socket.sendall(line)
            reply = json.loads(self._receive(deadline))
            if reply["id"] != number:
                raise ValueError
            self.tired = bool(reply.get("tired"))
            return Outcome(reply.get("value"), reply.get("fault"))
        except TimeoutError:
            raise _Lost(f"no answer within {limit:g} s; the process was killed") from None
        except OSError:
            raise _Lost from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise _Lost("the process sent what is no answer, and was killed") from None

    def _receive(self, deadline: float) -> bytes:
        line = bytearray()
        while not line.endswith(b"\n"):
            self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
            block = self._socket.recv(1 << 16)
            line += block
            if not block:
                raise ConnectionError
            if len(line) > LARGEST_REPLY:
                raise ValueError
        return bytes(line)

    def kill(self) -> None:
        """End it, and what it has started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def end(self) -> int:
        """Kill it and wait until it is gone. Its exit code: if it died by itself before, of that."""
        self.kill()
        self._socket.close()
        return self._child.wait()


def _line(number: int, spec: dict[str, Any], call: str, argument: Any, limit: float) -> bytes:
    request = {"id": number, "spec": spec, "call": call, "argument": argument, "limit": limit}
    return json.dumps(request).encode() + b"\n"


def _death(code: int | None) -> str:
    if code is None or code >= 0:
        return f"the process ended with exit code {code}"
    try:
        return f"the process was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"the process was ended by signal {-code}"
