"""Kernels for GPUs, as far as a CPU can tell: their bits in Triton's interpreter, and the instructions they become.
Each in a process of its own, for whether Triton interprets is decided once, when it is imported."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.jobs import environment

HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is made for Linux only"),
    pytest.mark.timeout(900),
]


def passes(file: str, env: dict[str, str]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(HERE / file)]
    done = subprocess.run(command, env=environment(env), cwd=HERE.parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_they_give_the_bits_of_the_functions_that_they_stand_for() -> None:
    passes("interpreted_kernels.py", {"TRITON_INTERPRET": "1"})


def test_they_become_instructions_that_round_as_they_are_written(tmp_path: Path) -> None:
    passes("compiled_kernels.py", {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)})
