"""metrics.jsonl survives kills and resumes without losing or repeating a step; the other sinks get what it gets."""

import builtins
import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from equigrad.config import Job
from equigrad.errors import UserError
from equigrad.observe.metrics import MetricsLog, Sinks, TensorBoardSink, open_sinks, read_metrics


def log_steps(path: Path, steps: range, resume_step: int | None = None) -> None:
    log = MetricsLog(path, resume_step)
    for step in steps:
        log.log({"kind": "step", "step": step, "loss": step / 7})
    log.close()


def steps_of(path: Path) -> list[int]:
    return [record["step"] for record in read_metrics(path)]


def test_records_come_back_as_they_were_logged(tmp_path: Path) -> None:
    record = {"kind": "step", "step": 3, "loss": 0.1 + 0.2, "lr": 5e-324, "tokens": 2**60, "memory_mb": None}
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.log(record)
    assert read_metrics(tmp_path / "metrics.jsonl") == [record]  # before `close`: every line is written at once
    log.close()


def test_values_that_are_not_finite_stay_valid_json_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.log({"kind": "step", "step": 1, "loss": math.nan, "grad_norm": math.inf, "lr": -math.inf, "tokens": 5})
    log.close()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    plain = json.loads(path.read_text(), parse_constant=refuse)
    assert plain["loss"] is None
    assert plain["non_finite"] == {"loss": "nan", "grad_norm": "inf", "lr": "-inf"}
    (record,) = read_metrics(path)
    assert math.isnan(record["loss"])
    assert (record["grad_norm"], record["lr"], record["tokens"]) == (math.inf, -math.inf, 5)
    assert "non_finite" not in record
    log_steps(path, range(2, 3), resume_step=1)  # rewritten on resume, and still the same
    assert math.isnan(read_metrics(path)[0]["loss"])


def test_resume_cuts_off_what_will_be_logged_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log_steps(path, range(1, 8))
    log_steps(path, range(5, 10), resume_step=4)
    assert steps_of(path) == list(range(1, 10))
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_new_run_starts_its_file_over_and_a_resumed_one_may_have_none(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log_steps(path, range(5, 7), resume_step=4)
    assert steps_of(path) == [5, 6]
    log_steps(path, range(1, 3))
    assert steps_of(path) == [1, 2]


@pytest.mark.parametrize("tail", [b'{"kind": "st', b'{"kind": "step", "name": "\xf0\x9f', b"\x00\x00", b"7", b"[]"])
def test_a_broken_last_line_is_passed_over_and_gone_after_resume(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    log_steps(path, range(1, 4))
    with path.open("ab") as file:
        file.write(tail)
    assert steps_of(path) == [1, 2, 3]
    log_steps(path, range(4, 6), resume_step=3)
    assert steps_of(path) == [1, 2, 3, 4, 5]
    assert all(json.loads(line) for line in path.read_bytes().splitlines())


def test_a_broken_line_elsewhere_is_an_error_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "step", "step": 1}\n{"kind"\n{"kind": "step", "step": 3}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2"):
        read_metrics(path)


def test_a_kill_loses_no_logged_record(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    program = f"""
import os, pathlib
from equigrad.observe.metrics import MetricsLog
log = MetricsLog(pathlib.Path({str(path)!r}))
for step in range(1, 101):
    log.log({{"kind": "step", "step": step}})
os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == -9
    assert steps_of(path) == list(range(1, 101))


def test_tensorboard_shows_every_number_and_no_step_twice(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps, resume_step in ((range(1, 6), None), (range(4, 8), 3)):
        sink = TensorBoardSink(tmp_path, resume_step)
        for step in steps:
            sink.log({"kind": "step", "step": step, "loss": float(step), "note": "not a number", "mfu": None})
        sink.log({"kind": "eval", "step": 5, "held_out_loss": math.nan})
        sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"step/loss", "eval/held_out_loss"}
    assert [(e.step, e.value) for e in events.Scalars("step/loss")] == [(s, float(s)) for s in range(1, 8)]
    assert math.isnan(events.Scalars("eval/held_out_loss")[-1].value)


class FakeWandb(ModuleType):
    """Notes what a W&B module is asked for."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.inits: list[dict[str, Any]] = []
        self.logged: list[tuple[dict[str, float], int]] = []
        self.finished = 0

    def init(self, **arguments: Any) -> "FakeWandb":
        self.inits.append(arguments)
        return self

    def log(self, data: dict[str, float], step: int) -> None:
        self.logged.append((data, step))

    def finish(self) -> None:
        self.finished += 1


def test_wandb_gets_job_and_records_and_a_resumed_job_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    job = Job.model_validate({"name": "trial", "observe": {"wandb_project": "equal"}, "optim": {"lr": 0.5}})
    for resume_step in (None, 3, None):
        with open_sinks(job, tmp_path, resume_step) as sinks:
            sinks.log({"kind": "step", "step": 4, "loss": 2.5, "mfu": None})
    first, resumed, other = wandb.inits
    assert (first["project"], first["name"], first["config"]["optim"]["lr"]) == ("equal", "trial", 0.5)
    assert json.dumps(first["config"])
    assert first["id"] == resumed["id"] != other["id"]
    assert wandb.logged[0] == ({"step/loss": 2.5}, 4)
    assert wandb.finished == 3


@pytest.mark.parametrize(("name", "extra"), [("tensorboard", "tensorboard"), ("wandb", "wandb")])
def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, extra: str
) -> None:
    real = builtins.__import__

    def without(module: str, *args: Any, **kwargs: Any) -> Any:
        if name in module:
            raise ImportError(module)
        return real(module, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    observe = {"tensorboard": True} if name == "tensorboard" else {"wandb_project": "p"}
    with pytest.raises(UserError, match=rf"pip install 'equigrad\[{extra}\]'"):
        open_sinks(Job.model_validate({"observe": observe}), tmp_path)


def test_every_sink_is_closed_also_where_one_fails() -> None:
    closed = []

    class Fails:
        def log(self, record: object) -> None: ...

        def close(self) -> None:
            closed.append(self)
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        Sinks([Fails(), Fails()]).close()
    assert len(closed) == 2


def test_the_room_loads_nothing_heavy() -> None:
    program = """
import sys
import equigrad.observe.metrics, equigrad.observe.progress, equigrad.observe.profile, equigrad.observe.report
print([m for m in ("torch", "rich", "tensorboard", "wandb", "jinja2", "numpy", "equigrad.trainer") if m in sys.modules])
"""
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip() == "[]"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_told_when_the_log_is_closed_as_well(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.close()
    log._file = open("/dev/full", "a", buffering=1)  # noqa: SIM115
    with pytest.raises(OSError, match="No space"):
        log.log({"kind": "step", "step": 1})
    with pytest.raises(UserError, match=r"cannot write .*metrics\.jsonl: No space"):
        log.close()
