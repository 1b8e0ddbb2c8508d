"""The progress line tells the truth in any width, and a log file stays short."""

import io
import os
import re

import pytest

from equigrad.observe.progress import LiveProgress, PlainProgress, Progress, open_progress
from tests.observe.runs import eval_record, step_record


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """A clock that stands still until it is moved."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def plain(total: int, clock: Clock, step: int = 0) -> tuple[PlainProgress, io.StringIO]:
    stream = io.StringIO()
    return PlainProgress(total, step, "a run", "datasheet", stream, clock), stream


def run(progress: Progress, clock: Clock, steps: range, total: int, seconds: float = 1.0) -> None:
    for step in steps:
        clock.now += seconds
        progress.log(step_record(step, total))


def test_a_log_gets_title_start_tenths_and_end() -> None:
    clock = Clock()
    progress, stream = plain(1000, clock)
    run(progress, clock, range(1, 1001), 1000, seconds=0.01)
    progress.close()
    lines = stream.getvalue().splitlines()
    assert lines[:2] == ["a run", "step 0/1000"]
    assert [line.split()[1] for line in lines[2:]] == [f"{100 * n}/1000" for n in range(1, 11)]
    assert re.fullmatch(r"step 500/1000  loss 2\.9\d\d  1\d?\.?\dk tok/s  41% MFU  812 MB  eta 5s", lines[6]), lines[6]
    assert lines[-1].endswith("812 MB")  # how long it took is told by the run, once


def test_a_slow_run_gets_a_line_every_half_minute() -> None:
    clock = Clock()
    progress, stream = plain(1000, clock)
    run(progress, clock, range(1, 13), 1000, seconds=10)
    assert [line.split()[1] for line in stream.getvalue().splitlines()[2:]] == [f"{n}/1000" for n in (3, 6, 9, 12)]


def test_an_evaluation_has_a_line_of_its_own_that_names_its_step() -> None:
    clock = Clock()
    progress, stream = plain(10, clock)
    for steps, last in ((range(1, 8), 7), (range(8, 11), 10)):
        run(progress, clock, steps, 10)
        progress.evaluating()
        progress.log(eval_record(last, 10))
    progress.close()
    lines = stream.getvalue().splitlines()[2:]
    assert [line.split()[1] for line in lines if line.startswith("step")] == [f"{n}/10" for n in range(1, 11)]
    assert [line for line in lines if not line.startswith("step")] == [
        "held-out 3.009 after step 7",
        "evaluating on all that is held out",
        "held-out 3.001 after step 10",
    ]
    assert not any("held-out" in line for line in lines if line.startswith("step"))


def test_an_interrupted_run_tells_where_it_stopped() -> None:
    clock = Clock()
    progress, stream = plain(1000, clock)
    run(progress, clock, range(1, 8), 1000)
    progress.close()
    assert stream.getvalue().splitlines()[-1].startswith("step 7/1000")


def test_the_estimate_forgets_the_first_step_and_counts_from_the_resumed_one() -> None:
    clock = Clock()
    progress, _ = plain(100, clock, step=50)
    assert "time" not in progress._figures()
    run(progress, clock, range(51, 52), 100, seconds=60)
    assert progress._figures()["time"] == "eta 49m00s"
    run(progress, clock, range(52, 61), 100, seconds=2)
    assert progress._figures()["time"] == "eta 1m20s"
    clock.now += 30
    assert progress._figures()["time"] == "eta 50s"
    clock.now += 300
    assert progress._figures()["time"] == "eta 0s"


def test_a_run_without_steps_is_no_error() -> None:
    with open_progress(0, stream=io.StringIO()) as progress:
        progress.log(eval_record(0, 1))


@pytest.mark.parametrize("width", [20, 60, 80, 200])
def test_the_live_line_fits_its_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = Terminal()
    progress = open_progress(100, title="[a] run", peak="measured", stream=stream)
    assert isinstance(progress, LiveProgress)
    try:
        for step in range(1, 51):
            progress.log(step_record(step, 100, skipped=2))
        progress.log(eval_record(50, 100))
        line = progress._render().plain
    finally:
        progress.close()
    assert len(line) < width
    assert line.startswith("50/100")
    words = ["loss", "held-out", "tok/s", "2 skipped", "41% of peak", "812 MB", "eta"]
    some = ["loss", "held-out", "tok/s", "2 skipped", "eta"]
    expected = {20: ["loss"], 60: ["loss", "held-out", "2 skipped", "eta"], 80: some, 200: words}[width]
    assert [word for word in words if word in line] == expected
    bar = len("".join(re.findall("[━─#]+", line)))
    assert bar == {20: 0, 60: 0, 80: 11, 200: 30}[width]
    assert "[a] run" in stream.getvalue()
    assert stream.getvalue().endswith("\x1b[?25h")  # the cursor is visible again


def test_the_live_line_tells_of_an_evaluation_and_of_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm-256color")
    with open_progress(20000, stream=Terminal()) as progress:
        assert isinstance(progress, LiveProgress)
        progress.log(step_record(12000, 20000))
        progress.evaluating()
        assert progress._render().plain.endswith("  evaluating")
        progress.log(eval_record(12000, 20000))
        assert "held-out 3.022  " in progress._render().plain
        progress.log(step_record(12345, 20000))
        line = progress._render().plain
    assert "held-out 3.022 at 12k  " in line
    assert re.search("[━─#]{6}", line)


def test_a_loss_that_is_not_finite_stands_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    with open_progress(10, stream=Terminal()) as progress:
        assert isinstance(progress, LiveProgress)
        progress.log(step_record(1, 10, loss=float("nan")))
        assert "loss nan" in progress._render().plain
        assert any(span.style == "bold red" for span in progress._render().spans)


def test_pipes_and_dumb_terminals_get_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(open_progress(1, stream=io.StringIO()), PlainProgress)
    monkeypatch.setitem(os.environ, "TERM", "dumb")
    assert isinstance(open_progress(1, stream=Terminal()), PlainProgress)
