"""Whatever a user gives wrong gets one clear message and exit code 2, and never a traceback.

In this process where that is possible, because it is faster; real processes where ranks, limits or signals take part.
"""

import shutil
from pathlib import Path

import pytest

from equigrad.cli import main
from tests.bad_input.given import TEXT, Bad, message
from tests.jobs import tiny_job, write_job


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test stands in an empty folder with one good text file."""
    monkeypatch.chdir(tmp_path)
    Path("good.txt").write_text(TEXT)


@pytest.fixture
def bad(capfd: pytest.CaptureFixture[str]) -> Bad:
    """Runs a command that must fail on its input; returns the message."""

    def run(*words: str | Path) -> str:
        capfd.readouterr()
        code = main([str(word) for word in words])
        return message(code, capfd.readouterr().err)

    return run


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two steps; tests take copies of it."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "good.txt").write_text(TEXT)
    small = tiny_job(
        data__sources=str(folder / "good.txt"),
        data__held_out_every=0,
        data__held_out_sources=str(folder / "good.txt"),
        train__steps=2,
        observe__sample_tokens=0,
        observe__report=False,
    )
    assert main(["train", str(write_job(small, folder / "job.toml")), "--run", str(folder / "run")]) == 0
    return folder / "run"


@pytest.fixture
def run(trained: Path) -> Path:
    shutil.copytree(trained, "run")
    return Path("run")


@pytest.fixture
def model(run: Path) -> Path:
    """The run's model as a Hugging Face folder."""
    assert main(["export", "run", "model"]) == 0
    return Path("model")
