"""A trace covers the steps it was asked for, and nothing is written or loaded without being asked."""

import json
from pathlib import Path

import torch

from equigrad.observe.profile import StepProfiler


def run(profiler: StepProfiler, steps: range) -> None:
    for step in steps:
        with profiler.step(step):
            torch.ones(8, 8) @ torch.ones(8, 8)
    profiler.close()


def names(path: Path) -> set[str]:
    return {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}


def test_the_trace_holds_the_steps_asked_for(tmp_path: Path) -> None:
    run(StepProfiler((2, 3), tmp_path, rank=1), range(1, 6))
    (path,) = (tmp_path / "profile").iterdir()
    assert path.name == "rank1-steps-2-3.json"
    assert {"step 2", "step 3", "aten::mm"} <= names(path)
    assert not {"step 1", "step 4"} & names(path)


def test_a_run_that_resumes_or_ends_inside_keeps_what_it_traced(tmp_path: Path) -> None:
    run(StepProfiler((2, 9), tmp_path), range(4, 7))
    assert {"step 4", "step 6"} <= names(tmp_path / "profile" / "rank0-steps-4-6.json")


def test_off_means_nothing_is_written(tmp_path: Path) -> None:
    run(StepProfiler(None, tmp_path), range(1, 4))
    run(StepProfiler((7, 8), tmp_path), range(1, 4))
    assert list(tmp_path.iterdir()) == []
