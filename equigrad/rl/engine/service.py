"""One engine for many callers at once. Whoever comes while others are decoded joins them; new weights wait until all
that was asked of the old ones is answered, or given back unfinished."""

import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from torch import Tensor

from equigrad.errors import UserError
from equigrad.rl.engine.embedded import EmbeddedEngine
from equigrad.rl.engine.protocol import Completion, Request

_LOOK_S = 0.05
"""Seconds after which the idle thread looks whether it is to end."""


class Service:
    """A thread that owns an engine. Close it, or use it as a context manager."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine
        self._asked: queue.SimpleQueue[tuple[Request, Future[Completion]]] = queue.SimpleQueue()
        self._open: dict[str, Future[Completion]] = {}
        self._loads: queue.SimpleQueue[tuple[Callable[[], None], Future[None]]] = queue.SimpleQueue()
        self._calls, self._lock = 0, threading.Lock()
        self._hurry, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Service":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def version(self) -> int | None:
        """Of the weights; None while they are of none."""
        return self._engine.version

    @property
    def load(self) -> int:
        """Requests that are not answered yet."""
        return len(self._open) + self._asked.qsize()

    def submit(self, requests: Sequence[Request]) -> "list[Future[Completion]]":
        """Ask for completions. A request that the engine cannot serve has the ``UserError`` as its outcome: also one of
        another version than the weights have when its turn comes."""
        with self._lock:
            self._calls += 1
            call = self._calls
        found = []
        for number, request in enumerate(requests):
            # Callers may use the same names.
            group = request.group and f"{call} {request.group}"
            future: Future[Completion] = Future()
            self._asked.put((replace(request, id=f"{call}.{number} {request.id}", group=group), future))
            found.append(future)
        return found

    def update(self, weights: Iterable[tuple[str, Tensor]], version: int, hurry: bool = False) -> "Future[None]":
        """Take new weights once nothing is asked of the present ones any more. ``hurry``: now; what is unfinished is
        given back as it is, with ``finish`` None."""
        future: Future[None] = Future()
        self._loads.put((lambda: self._engine.load(weights, version), future))
        if hurry:
            self._hurry.set()
        return future

    def close(self) -> None:
        """End the thread. What is not answered has a ``UserError`` as its outcome."""
        self._closing.set()
        self._thread.join()
        self._refuse(UserError("the engine is being shut down"))

    def _run(self) -> None:
        while not self._closing.is_set():
            if not self._loads.empty():
                self._hurry.clear()
                self._take()
                continue
            try:
                first = self._admitted([self._asked.get(timeout=_LOOK_S)])
            except queue.Empty:
                continue
            try:
                for completion in self._engine.generate(first, self._stopping, self._arriving):
                    self._open.pop(completion.id).set_result(replace(completion, id=completion.id.partition(" ")[2]))
            except Exception as error:  # of the engine's own: those who wait must hear of it, and others be served
                self._refuse(error)

    def _take(self) -> None:
        load, future = self._loads.get()
        try:
            load()
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    def _stopping(self) -> bool:
        return self._closing.is_set() or (self._hurry.is_set() and not self._loads.empty())

    def _arriving(self) -> list[Request]:
        """What came since; nothing any more where new weights wait."""
        found = []
        while self._loads.empty():
            try:
                found.append(self._asked.get_nowait())
            except queue.Empty:
                break
        return self._admitted(found)

    def _admitted(self, asked: "Iterable[tuple[Request, Future[Completion]]]") -> list[Request]:
        """Those that the engine can serve; the others are told why not."""
        found = []
        for request, future in asked:
            try:
                self._engine.check([request])
            except UserError as error:
                future.set_exception(UserError(str(error).replace(f"request {request.id}: ", "", 1)))
                continue
            self._open[request.id] = future
            found.append(request)
        return found

    def _refuse(self, error: Exception) -> None:
        waiting, self._open = self._open, {}
        for future in waiting.values():
            future.set_exception(error)
        while self._closing.is_set() and not self._asked.empty():
            self._asked.get()[1].set_exception(error)
