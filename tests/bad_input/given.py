"""What tests of bad input give to commands, and what they expect back."""

from collections.abc import Callable
from pathlib import Path

from tests.jobs import tiny_job, write_job

Bad = Callable[..., str]
"""``bad(*words)`` runs a command that must fail on its input; returns the message."""

TEXT = "".join(f"This is line {n} of a text, whose square is {n * n}.\n" for n in range(200))


def message(code: int, printed: str) -> str:
    """The one message of a command that ended with ``code``; fails unless it is what a user should see."""
    assert code == 2, printed
    assert "Traceback" not in printed
    assert printed.startswith("equigrad: error: ")
    assert printed.count("equigrad: error: ") == 1
    return printed.removeprefix("equigrad: error: ").strip()


def job(**changes: object) -> str:
    """A tiny job on the good text, with changes, as a file in the current folder."""
    values = {"data__sources": "good.txt", "data__held_out_every": 0, "train__steps": 2, "observe__sample_tokens": 0}
    return str(write_job(tiny_job(**values | changes), Path("job.toml")))


def job_from(weights: Path, **model: object) -> str:
    """A job that starts from given weights and says nothing of their shape but ``model``."""
    lines = [f"{key} = {value}" for key, value in model.items()]
    text = ["data.sources = 'good.txt'", "[model]", f"weights = '{weights}'", *lines]
    Path("weights.toml").write_text("\n".join(text))
    return "weights.toml"


def checkpoint(run: Path) -> Path:
    return run / "checkpoints" / "step-00000002"


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
