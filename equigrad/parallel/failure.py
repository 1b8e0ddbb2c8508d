"""A rank that fails ends all others within seconds, and they say why.

The rank writes the cause into the store in which the ranks have met; a thread of every other rank looks there twice a
second, for its main thread may sit in a collective that will never end. For processes that torchrun, SLURM or a person
started: equigrad's own launcher watches its workers itself.
"""

import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass

from torch.distributed import Store

_CAUSE, _HEARD = "cause", "heard"
_LOOK_SECONDS = 0.5
# How long the others live on, so that the rank that failed ends first: torchrun calls the first one the root cause.
_OUTLIVING_SECONDS = 1.5
# How long the rank that keeps the store, and the one that failed, wait for the others to hear of it.
_HEARING_SECONDS = 4.0


@dataclass(frozen=True)
class Cause:
    """Why the run ends.

    rank:   which rank failed
    text:   what it would print: a traceback, or a message to the user
    users:  whether the user can mend it
    shared: whether all ranks raise the same, so that rank 0 tells it for all
    """

    rank: int
    text: str
    users: bool
    shared: bool = False

    @property
    def code(self) -> int:
        """The exit code of every rank."""
        return 2 if self.users else 1

    def shown_on(self, rank: int) -> str:
        """What a rank prints of it: rank 0 everything, for its log is the one that people read."""
        if rank not in (0, self.rank):
            return "" if self.shared else f"equigrad: rank {rank} ends, for rank {self.rank} failed: {self._last_line}"
        if self.users:
            where = "" if self.shared or rank == self.rank else f"rank {self.rank}: "
            return f"equigrad: error: {where}{self.text}"
        return f"equigrad: rank {self.rank} failed:\n{self.text.rstrip()}"

    @property
    def _last_line(self) -> str:
        return self.text.strip().rpartition("\n")[2]


class Watch:
    """One rank's eye on the others. ``store``: of its own, for its thread uses it while the main thread waits."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._lock, self._left, self._closing = threading.Lock(), threading.Event(), False
        threading.Thread(target=self._look, name="watch", daemon=True).start()

    def tell(self, cause: Cause) -> None:
        """Tell the others, unless another rank was faster, and wait until they have heard or seconds are over."""
        with self._lock:  # not while the thread ends the process for another cause
            self._left.set()
        try:
            told = self._store.compare_set(_CAUSE, "", json.dumps(asdict(cause)))
            if json.loads(told)["rank"] != self._rank:
                self._store.add(_HEARD, 1)
            self._hearing()
        except RuntimeError:
            pass  # the store is gone, and with it rank 0 or torchrun: nobody is left to be told

    def closing(self) -> None:
        """From here on it is no fault if the store goes: ranks end, and rank 0 may be the first."""
        self._closing = True

    def stop(self) -> None:
        """Look no more."""
        self._left.set()

    def _look(self) -> None:
        while not self._left.wait(_LOOK_SECONDS):
            try:
                if not self._store.check([_CAUSE]):
                    continue
                cause = Cause(**json.loads(self._store.get(_CAUSE)))
                self._store.add(_HEARD, 1)
            except RuntimeError:
                if not self._closing:
                    os.kill(os.getpid(), signal.SIGTERM)  # whoever kept it, rank 0 or torchrun, is gone: save and end
                return
            with self._lock:
                if not self._left.is_set():
                    self._end(cause)

    def _end(self, cause: Cause) -> None:
        if shown := cause.shown_on(self._rank):
            print(shown, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        if self._rank == 0:  # which may keep the store
            self._hearing()
        time.sleep(_OUTLIVING_SECONDS)
        os._exit(cause.code)

    def _hearing(self) -> None:
        until = time.monotonic() + _HEARING_SECONDS
        while self._store.add(_HEARD, 0) < self._size - 1 and time.monotonic() < until:
            time.sleep(0.05)


_watch: Watch | None = None


def watch(store: Store, rank: int, size: int) -> None:
    """Begin to look for failures of other ranks, in a store that this thread alone will use."""
    global _watch
    _watch = Watch(store, rank, size)


def watching() -> Watch | None:
    """This process's watch, if it has begun."""
    return _watch
