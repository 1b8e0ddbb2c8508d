"""Profiler traces of a few steps, on request. Knows step numbers and nothing of what happens in a step."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from equigrad.files import in_one_piece

if TYPE_CHECKING:
    from torch.profiler import profile


class StepProfiler:
    """Traces the steps ``first`` to ``last`` into ``<run folder>/profile/rank<r>-steps-<first>-<last>.json``.

    The file is a Chrome trace: open it in https://ui.perfetto.dev or chrome://tracing. Without ``steps`` it does
    nothing. Call ``close`` at the end of the run, so that a run that ends before ``last`` keeps what was traced.
    """

    def __init__(self, steps: tuple[int, int] | None, folder: Path, rank: int = 0) -> None:
        self._first, self._last = steps or (1, 0)
        self._folder, self._rank = folder / "profile", rank
        self._trace: profile | None = None
        self._traced: list[int] = []

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """The context of one step. A resumed run may enter the range in its middle."""
        if not self._first <= number <= self._last:
            yield
            return
        import torch.profiler as profiler

        if self._trace is None:
            self._trace = profiler.profile(record_shapes=True)  # of every kind of activity there is: CPU, CUDA, ...
            self._trace.start()
        self._traced.append(number)
        with profiler.record_function(f"step {number}"):
            yield
        if number == self._last:
            self.close()

    def close(self) -> None:
        """Write the trace, if there is one."""
        if self._trace is None:
            return
        trace, self._trace = self._trace, None
        trace.stop()
        path = self._folder / f"rank{self._rank}-steps-{self._traced[0]}-{self._traced[-1]}.json"
        with in_one_piece(path) as aside:
            trace.export_chrome_trace(str(aside))
