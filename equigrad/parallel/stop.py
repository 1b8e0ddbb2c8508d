"""How a process is asked to stop: a signal that the training loop reads as a flag, so that it saves before it ends."""

import os
import signal
import sys
import time
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Turns SIGTERM and SIGINT into a flag that the loop reads between steps. A second signal, later, ends at once."""

    def __init__(self) -> None:
        self.asked = False
        self._since = 0.0
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopRequest":
        for number in STOP_SIGNALS:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def wait(self) -> None:
        """Until it is asked."""
        while not self.asked:
            time.sleep(0.2)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # A terminal's Ctrl-C reaches a worker twice, directly and through the launcher; only a late repeat is meant.
        if self.asked and time.monotonic() - self._since > 2.0:
            raise KeyboardInterrupt
        if not self.asked and os.environ.get("RANK", "0") == "0":
            print("\nstopping after this step ...", file=sys.stderr, flush=True)
        self.asked, self._since = True, self._since or time.monotonic()
