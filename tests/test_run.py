"""Run folders: locks and accidents."""

import errno
from pathlib import Path

import pytest

from equigrad.run import Run


def test_a_file_system_without_locks_can_be_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(file: object, flags: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    Run(tmp_path / "run").lock().close()
    assert "cannot be locked (Function not implemented)" in capsys.readouterr().err
