"""How the ranks of a run sample together: the main rank keeps the conversations, and all of them hear what it asks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from equigrad.errors import UserError
from equigrad.evaluation import Stopped
from equigrad.parallel.ranks import PeerError, SharedUserError, gather
from equigrad.parallel.stop import StopRequest
from equigrad.parallel.world import World
from equigrad.rl.attempts import Ask
from equigrad.rl.engine.protocol import Completion, Request

T = TypeVar("T")


class Sampler(ABC):
    """All ranks call it alike."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._everywhere = False  # whether the others have heard of an error as well

    @abstractmethod
    def update(self, version: int) -> None:
        """Sample with the present weights from now on. A collective."""

    @abstractmethod
    def _served(self, requests: Sequence[Request], stop: StopRequest) -> dict[str, Completion]:
        """The completions, at least on the main rank. Errors are on all ranks, and so is ``Stopped``."""

    def run(self, work: Callable[[Ask], T], stop: StopRequest) -> T:
        """What ``work`` gives, on all ranks. It is done on the main rank, and all of them serve what it asks. Raises
        ``Stopped`` on all ranks where one was asked to stop, and an error of the work everywhere too."""

        def ask(requests: Sequence[Request]) -> Mapping[str, Completion]:
            if self._world.size > 1:
                gather(("asked", requests), self._world.patient)
            return self._serve(requests, stop)

        if self._world.size == 1:
            return work(ask)
        if not self._world.is_main:
            return self._attend(stop)
        self._everywhere = False
        try:
            result = work(ask)
        except Exception as error:
            if not self._everywhere:
                gather(("failed", (isinstance(error, UserError), str(error))), self._world.patient)
            raise
        gather(("done", result), self._world.patient)
        return result

    def _attend(self, stop: StopRequest) -> Any:
        """The part of the other ranks."""
        while True:
            nothing: tuple[str, Any] = "", None
            what, value = gather(nothing, self._world.patient)[0]
            if what == "done":
                return value
            if what == "failed":
                users, text = value
                raise SharedUserError(text) if users else PeerError(f"rank 0: {text}")
            self._serve(value, stop)

    def _serve(self, requests: Sequence[Request], stop: StopRequest) -> dict[str, Completion]:
        self._everywhere = True
        completions = self._served(requests, stop)
        if any(completion.finish is None for completion in completions.values()):
            raise Stopped
        self._everywhere = False
        return completions
