"""One audited run for all tests of the room; each test that changes something has a copy."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.audit.runs import audited_job
from tests.jobs import inside, write_job


@pytest.fixture(scope="session")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of six steps in one process, and its job beside it."""
    folder = tmp_path_factory.mktemp("audited")
    inside("train", write_job(audited_job(folder), folder / "job.toml"), "--run", folder / "run")
    return folder / "run"


@pytest.fixture
def copy(audited: Path, tmp_path: Path) -> Path:
    shutil.copytree(audited, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., Path]:
    """A run of the test's own."""

    def run(*words: str, **changes: object) -> Path:
        job = write_job(audited_job(tmp_path, **changes), tmp_path / "job.toml")
        inside("train", job, "--run", tmp_path / "own", *words)
        return tmp_path / "own"

    return run
