"""The progress of a run on the terminal: one live line, or now and then a plain one where nobody watches.

Knows records only; the time it tells is its own. Only rank 0 shows progress.
"""

import math
import os
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Self, TextIO

from equigrad.observe.metrics import Record
from equigrad.observe.text import compact, duration, loss_text, memory

if TYPE_CHECKING:
    from rich.text import Text

PeakSource = Literal["measured", "datasheet"]


def open_progress(
    total: int, step: int = 0, title: str = "", peak: PeakSource = "datasheet", stream: TextIO | None = None
) -> "Progress":
    """The progress of a run of ``total`` steps, of which ``step`` are done already (a resumed run).

    ``title`` says what the run is and is printed once, above. ``peak`` tells what ``mfu`` is a share of: against a
    measured peak it is not called MFU. ``stream`` is standard output by default.
    """
    stream = stream or sys.stdout
    live = stream.isatty() and os.environ.get("TERM") != "dumb"
    return (LiveProgress if live else PlainProgress)(total, step, title, peak, stream)


class Progress(ABC):
    """A sink that shows where the run is. Close it (or use it as a context), or the cursor stays hidden."""

    def __init__(
        self,
        total: int,
        step: int,
        title: str,
        peak: PeakSource,
        stream: TextIO,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._step, self._stream, self._clock = total, step, stream, clock
        self._share_label = "MFU" if peak == "datasheet" else "of peak"
        self._latest: dict[str, Any] = {}
        self._held_out: tuple[str, int] | None = None  # and the step after which it was measured
        self._evaluating = False
        # When recent steps were done. It spans several evaluations and saves, so their time is part of the estimate.
        self._done = deque([(step, clock())], maxlen=200)
        self._open(title)

    @abstractmethod
    def _open(self, title: str) -> None: ...

    @abstractmethod
    def _show(self) -> None:
        """After a step."""

    @abstractmethod
    def _show_held_out(self) -> None:
        """Before and after an evaluation."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def log(self, record: Record) -> None:
        if record["kind"] == "step":
            self._latest |= record
            self._step = record["step"]
            self._done.append((self._step, self._clock()))
            self._show()
        else:
            self._held_out, self._evaluating = (_held_out(record), record["step"]), False
            self._done[-1] = (self._step, self._clock())  # the time to the end is counted down from here
            self._show_held_out()

    def evaluating(self) -> None:
        """The run does not go on until the held-out loss is known."""
        self._evaluating = True
        self._show_held_out()

    def _share(self) -> float:
        return self._step / self._total if self._total else 1.0

    def _time(self) -> str | None:
        """Estimated time to the end, counted down between records."""
        if self._evaluating:
            return "evaluating"
        if self._step >= self._total or len(self._done) < 2:
            return None
        # The first step pays for compilation and cold caches: go by it only as long as there is no other.
        (since, start), (step, end) = self._done[min(1, len(self._done) - 2)], self._done[-1]
        pace = (end - start) / max(step - since, 1)
        return f"eta {duration(max((self._total - step) * pace - (self._clock() - end), 0.0))}"

    def _figures(self) -> dict[str, str]:
        """What there is to tell, by name, in the order in which it is shown."""
        latest = self._latest
        known: list[tuple[str, Any, Callable[[Any], str]]] = [
            ("step", self._step, lambda v: f"{v}/{self._total}"),
            ("loss", latest.get("loss"), lambda v: f"loss {loss_text(v)}"),
            ("reward", latest.get("reward"), lambda v: f"reward {loss_text(v)}"),
            ("held-out", self._held_out, self._held_out_text),
            ("speed", latest.get("tokens_per_second"), lambda v: f"{compact(v)} tok/s"),
            ("share", latest.get("mfu"), lambda v: f"{v:.0%} {self._share_label}"),
            ("memory", latest.get("memory_mb"), memory),
            ("skipped", latest.get("skipped") or None, lambda v: f"{v} skipped"),
            ("time", self._time(), str),
        ]
        return {name: text(value) for name, value, text in known if value is not None}

    def _held_out_text(self, measured: tuple[str, int]) -> str:
        text, step = measured
        return f"held-out {text}" + f" at {compact(step)}" * (step != self._step)


def _held_out(record: Record) -> str:
    """What an evaluation gives: a loss, or rewards."""
    if "held_out_reward" in record:
        return f"reward {loss_text(record['held_out_reward'])}, {record['held_out_solved']:.1%} solved"
    return loss_text(record["held_out_loss"])


class PlainProgress(Progress):
    """Few lines, each complete in itself, for a file, a pipe or a batch system.

    At the start and at the end, and in between after 30 s or 10 % of the steps, whichever is sooner. What an evaluation
    gives has a line of its own.
    """

    SECONDS = 30.0

    def _open(self, title: str) -> None:
        if title:
            print(title, file=self._stream)
        self._print()

    def _show(self) -> None:
        if self._tenth() > self._shown[0] or self._clock() - self._shown[1] >= self.SECONDS:
            self._print()

    def _show_held_out(self) -> None:
        if self._evaluating:
            if self._step >= self._total:  # on the way, lines of steps tell soon enough that it goes on
                print("evaluating on all that is held out", file=self._stream, flush=True)
        elif self._held_out is not None:
            text, step = self._held_out
            print(f"held-out {text} after step {step}", file=self._stream, flush=True)

    def close(self) -> None:
        if self._step != self._shown[2]:
            self._print()

    def _tenth(self) -> int:
        return 10 * self._step // max(self._total, 1)

    def _print(self) -> None:
        self._shown = self._tenth(), self._clock(), self._step
        figures = [text for name, text in self._figures().items() if name != "held-out"]
        print("step", "  ".join(figures), file=self._stream, flush=True)


class LiveProgress(Progress):
    """One line redrawn in place, on a terminal; what does not fit is left out.

    A thread of rich draws it, so that the time left counts down between steps.
    """

    PRIORITY = ("step", "reward", "loss", "time", "held-out", "skipped", "bar", "speed", "share", "memory")
    """What a narrow terminal shows first."""
    BAR = range(6, 31)
    """Width of the bar: at least the first, and beyond it what the figures leave."""

    def _open(self, title: str) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=self._stream, highlight=False)
        if title:
            self._console.print(title, markup=False)
        self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=4)
        self._live.start()

    def _show(self) -> None:
        """The next refresh shows it."""

    def _show_held_out(self) -> None:
        """The next refresh shows it."""

    def close(self) -> None:
        self._live.stop()

    def _render(self) -> "Text":
        from rich.text import Text

        figures, room, gap = self._figures(), self._console.width - 1, "  "
        widths = {name: len(text) for name, text in figures.items()} | {"bar": self.BAR.start}
        shown = set()
        for name in self.PRIORITY:
            if name in widths and room >= widths[name]:
                shown.add(name)
                room -= widths[name] + len(gap)
        parts = [Text(text, self._style(name)) for name, text in figures.items() if name in shown]
        if "bar" in shown:
            parts.insert(1, self._bar(min(self.BAR.start + room + len(gap), self.BAR.stop - 1)))
        return Text(gap, no_wrap=True, overflow="crop", end="").join(parts)

    def _bar(self, width: int) -> "Text":
        from rich.text import Text

        full, empty = ("━", "─") if self._console.encoding.startswith("utf") else ("#", "-")
        done = min(int(width * self._share()), width)
        return Text.assemble((full * done, "green"), (empty * (width - done), "bright_black"))

    def _style(self, name: str) -> str:
        if name == "loss" and not math.isfinite(self._latest["loss"]):
            return "bold red"
        return {"loss": "bold", "skipped": "yellow", "time": "cyan"}.get(name, "")
