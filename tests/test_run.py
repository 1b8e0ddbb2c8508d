"""Run folders: locks and accidents."""

import errno
from pathlib import Path

import pytest

from equigrad.commands.session import prepare
from equigrad.errors import UserError
from equigrad.run import Run
from tests.jobs import pool_world, tiny_job


def test_a_file_system_without_locks_can_be_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(file: object, flags: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    Run(tmp_path / "run").lock().close()
    assert "cannot be locked (Function not implemented)" in capsys.readouterr().err


def test_a_run_that_appeared_while_torch_was_loading_is_not_cleared(tmp_path: Path) -> None:
    run, job = Run(tmp_path / "run"), tiny_job()
    run.check_free()
    run.write_job(job)
    (run.folder / "checkpoints/step-00000001").mkdir(parents=True)
    with pytest.raises(UserError, match="already holds a run"):
        prepare(job, run, pool_world(job), resume=False)
    assert (run.folder / "checkpoints/step-00000001").is_dir()
