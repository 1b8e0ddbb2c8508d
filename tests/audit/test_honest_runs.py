"""An audit accuses nobody of what was allowed to happen, nor of the auditor's own troubles; and what changed on the way
is told."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from equigrad.audit import replay
from equigrad.audit.report import sealed
from equigrad.data.vocabulary import _template
from equigrad.errors import UserError
from equigrad.models.huggingface import read_config
from equigrad.run import Run
from tests.audit.runs import audit, change_manifest, rechained, trajectory, write
from tests.jobs import inside

FIRST = "first difference  "


def change_job(run: Path, section: str, key: str, value: Any) -> None:
    """In ``job.toml``, by hand."""
    job = Run(run).job()
    changed = getattr(job, section).model_copy(update={key: value})
    Run(run).write_job(job.model_copy(update={section: changed}))


def go_on(run: Path, *words: str) -> None:
    inside("train", "--run", run, "--resume", "--train.steps", "8", *words)


@pytest.mark.parametrize("key", ["embedding_lr", "vector_lr"])
@pytest.mark.parametrize(("before", "after"), [(1.0, 0.5), (2.0, 1.0)])
def test_rates_of_roles_may_change_at_a_resume(
    train: Callable[..., Path], key: str, before: float, after: float
) -> None:
    run = train(**{f"optim__{key}": before})
    go_on(run, f"--optim.{key}", str(after))
    for steps in ([], ["--steps", "1..2"], ["--steps", "7..8"]):
        code, told = audit(run, *steps)
        assert code == 0, told
    assert f"other settings    after step 6: optim.{key}" in audit(run)[1]


def test_a_run_that_goes_on_without_a_trajectory_is_not_accused(copy: Path) -> None:
    go_on(copy, "--audit.enabled", "false", "--optim.lr", "0.02")
    for steps in ("0..3", "5..6"):
        code, told = audit(copy, "--steps", steps)
        assert code == 3, told


def test_a_run_that_goes_on_without_one_is_not_accused_before_its_next_checkpoint_either(copy: Path) -> None:
    change_job(copy, "audit", "enabled", False)
    change_job(copy, "optim", "lr", 0.02)
    for steps in ("0..3", "5..6"):
        assert audit(copy, "--steps", steps)[0] == 3


def test_a_run_that_was_killed_before_it_wrote_its_job_is_not_accused(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(Run, "write_job", killed)
        with pytest.raises(RuntimeError, match="killed"):
            go_on(copy, "--optim.lr", "0.02")
    assert trajectory(copy)[-1]["kind"] == "job"
    assert audit(copy)[0] == 0
    go_on(copy, "--optim.lr", "0.02")
    assert audit(copy)[0] == 0


def test_a_run_without_a_step_is_confirmed(train: Callable[..., Path]) -> None:
    assert audit(train(train__steps=0, optim__schedule_steps=None, train__eval_every=0))[0] == 0


@pytest.mark.parametrize("when", ["tree_of_files", "verify", "read_manifest"])
@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.EIO, "I/O error"), PermissionError(errno.EACCES, "no")])
def test_what_the_auditors_machine_cannot_do_proves_nothing(
    copy: Path, monkeypatch: pytest.MonkeyPatch, when: str, error: Exception
) -> None:
    def fails(*_: Any) -> None:
        raise error

    monkeypatch.setattr(replay, when, fails)
    code, told = audit(copy)
    assert code == 3, told


def test_a_base_that_is_removed_before_it_is_loaded_accuses_nobody(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give = replay.give_state

    def removed(trainer: Any, checkpoint: Path | None) -> None:
        if checkpoint is not None:
            shutil.rmtree(checkpoint)
        give(trainer, checkpoint)

    monkeypatch.setattr(replay, "give_state", removed)
    code, told = audit(copy, "--steps", "5..6")
    assert code == 3, told


@pytest.mark.parametrize("when", ["check_settings", "check_checkpoints", "replay"])
def test_a_run_that_is_resumed_meanwhile_is_not_accused_and_not_vouched_for(
    copy: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, when: str
) -> None:
    whole = getattr(replay, when)

    def resumed(*rest: Any) -> Any:
        lines = trajectory(copy)
        lines[-1]["loss"] = "0x1.0p-9"
        write(copy, rechained(lines))
        return whole(*rest)

    monkeypatch.setattr(replay, when, resumed)
    code, told = audit(copy, "--json", tmp_path / "report.json")
    assert (code, "changed while it was audited" in told) == (3, True), told


def test_a_version_that_knew_fewer_settings_made_a_part_of_it(copy: Path) -> None:
    lines = trajectory(copy)
    older = json.loads(json.dumps(lines[0]["settings"]))
    del older["model"]["attn_output_gate"]
    at = next(n for n, line in enumerate(lines) if line["kind"] == "step" and line["step"] == 5)
    begun = lines[0] | {"settings": older, "version": "0.0.1"}
    write(copy, rechained([begun, *lines[1:at], lines[0] | {"step": 4}, *lines[at:]]))
    assert audit(copy)[0] == 3


def test_what_changed_is_in_what_reports_say_together(copy: Path, tmp_path: Path) -> None:
    go_on(copy, "--optim.lr", "0.02")
    for steps in ("0..6", "7..8"):
        assert audit(copy, "--steps", steps, "--json", tmp_path / f"{steps}.json")[0] == 0
    code, told = audit("--merge", tmp_path / "0..6.json", tmp_path / "7..8.json")
    assert (code, "other settings after step 6: optim.lr" in told) == (0, True), told


# What is not allowed to happen


@pytest.mark.parametrize("step", [5, 4.0, None])
def test_a_base_of_another_step_is_found(copy: Path, step: Any) -> None:
    change_manifest(copy, 4, lambda body: body["meta"].update(step=step))
    for steps in ("5..6", "6"):
        code, told = audit(copy, "--steps", steps)
        assert (code, told.splitlines()[1]) == (1, f"{FIRST}step 4, checkpoint")


@pytest.mark.parametrize(("section", "key"), [("model", "rope_theta"), ("model", "rms_norm_eps"), ("data", "context")])
def test_what_no_run_changes_cannot_have_changed(copy: Path, section: str, key: str) -> None:
    """Though each step is what its settings make it."""
    lines = trajectory(copy)
    settings = json.loads(json.dumps(lines[0]["settings"]))
    settings[section][key] = settings[section][key] * 2
    at = next(n for n, line in enumerate(lines) if line["kind"] == "step" and line["step"] == 5)
    write(copy, rechained([*lines[:at], lines[0] | {"step": 4, "settings": settings}, *lines[at:]]))
    code, told = audit(copy)
    assert (code, told.splitlines()[1]) == (1, f"{FIRST}step 4, job: {section}.{key}")


def test_only_audits_that_came_to_their_end_count(copy: Path, tmp_path: Path) -> None:
    audit(copy, "--json", tmp_path / "whole.json")
    body = json.loads((tmp_path / "whole.json").read_text())
    del body["digest"]
    (tmp_path / "part.json").write_text(json.dumps(sealed(body | {"verdict": "unverifiable"})))
    assert audit("--merge", tmp_path / "whole.json")[0] == 0
    assert audit("--merge", tmp_path / "part.json")[0] == 3
    for strange in (
        {"steps": [0, 0]},
        {"steps": [7]},
        {"start": {"step": 5, "from": "checkpoint"}},
        {"start": None},
        {"tensors": 99},
        {"tensors": -5},
        {"step": 3, "field": "loss"},
    ):
        (tmp_path / "strange.json").write_text(json.dumps(sealed(body | strange)))
        assert audit("--merge", tmp_path / "strange.json")[0] == 2


def test_a_pipe_that_a_run_names_keeps_nobody_waiting(tmp_path: Path) -> None:
    for name in ("config.json", "template"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match=r"config\.json is not a file"):
        read_config(tmp_path)
    with pytest.raises(UserError, match="template is not a file"):
        _template(str(tmp_path / "template"))
