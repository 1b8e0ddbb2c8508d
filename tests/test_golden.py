"""A trajectory of exact numerics that was computed once, replayed as other machines would."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.jobs import environment

GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_text())
# What PyTorch's own kernels and MKL are told to use; a machine runs those that it has.
MACHINES = {
    "avx512": {"ATEN_CPU_CAPABILITY": "avx512", "MKL_ENABLE_INSTRUCTIONS": "AVX512"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "baseline": {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
}
HERE = {"AVX512": ("avx512", "avx2", "baseline"), "AVX2": ("avx2", "baseline")}
RUNNABLE = HERE.get(torch.backends.cpu.get_cpu_capability(), ("baseline",))


def replay(folder: Path, env: dict[str, str], *words: str) -> list[dict[str, str]]:
    """The trajectory that a process of its own has."""
    out, root = folder / "out.json", str(Path(__file__).parents[1])
    paths = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    script = str(Path(__file__).with_name("golden.py"))
    done = subprocess.run(
        [sys.executable, script, str(out), *words],
        capture_output=True,
        text=True,
        env=environment({"PYTHONPATH": paths} | env),
    )
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


@pytest.mark.parametrize("threads", ["1", "2"])
@pytest.mark.parametrize("machine", RUNNABLE)
def test_it_is_the_same_under_any_instruction_set(tmp_path: Path, machine: str, threads: str) -> None:
    assert replay(tmp_path, MACHINES[machine] | {"OMP_NUM_THREADS": threads}) == GOLDEN


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is made for Linux only")
def test_it_is_the_same_with_the_kernels_for_gpus(tmp_path: Path) -> None:
    assert replay(tmp_path, {"TRITON_INTERPRET": "1"}, "--triton") == GOLDEN[:2]


@pytest.mark.timeout(900)
def test_it_is_the_same_compiled(tmp_path: Path) -> None:
    assert replay(tmp_path, {}, "--compile") == GOLDEN
