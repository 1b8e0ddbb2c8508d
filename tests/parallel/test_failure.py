"""A rank that raises ends all others within seconds, and rank 0 says why: under torchrun, and without a launcher."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.jobs import environment, tiny_job, write_job

PROGRAM = str(Path(__file__).with_name("faulty.py"))
FAULT = "ValueError: a fault was planted here"
# Ranks that wait for the faulty one in a collective, or in a pipeline's receive: forward, then backward.
PLACES = [({"dp_shard": 2}, "1:step"), ({"pp": 2}, "0:row"), ({"pp": 2}, "1:row")]


def _words(folder: Path, layout: dict[str, int]) -> list[str]:
    choices = {f"layout__{name}": degree for name, degree in layout.items()}
    job = tiny_job(train__steps=500, train__eval_every=0, layout__timeout_s=300.0, **choices)
    file = write_job(job, folder / "job.toml")
    return ["train", str(file), "--run", str(folder / "run")]


def _bare(
    words: list[str], fault: str, ranks: int = 2, own: Sequence[Sequence[str]] = ()
) -> list[tuple[int, str, float]]:
    """Exit code, what was printed, and when it ended, of every rank; ``own``: further words of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = []
    for rank in range(ranks):
        env = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks),
               "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "FAULT": fault}  # fmt: skip
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        command = [sys.executable, PROGRAM, *words, *(own[rank] if own else ())]
        processes.append(subprocess.Popen(command, env=environment(env), **pipes))  # type: ignore[call-overload]
    ended: list[tuple[int, str, float]] = []
    try:
        for process in processes:
            _, err = process.communicate(timeout=200)
            ended.append((process.returncode, err, time.monotonic()))
    finally:
        for process in processes:
            process.kill()
    return ended


@pytest.mark.parametrize(("layout", "fault"), PLACES, ids=str)
def test_ranks_without_a_launcher_end_with_the_cause(layout: dict[str, int], fault: str, tmp_path: Path) -> None:
    first, second = _bare(_words(tmp_path, layout), fault)
    assert (first[0], second[0]) == (1, 1), (first, second)
    assert abs(first[2] - second[2]) < 30  # far less than layout.timeout_s, even on a busy machine
    rank = fault[0]
    assert f"equigrad: rank {rank} failed:\nTraceback" in first[1]
    assert first[1].count(FAULT) == 1
    assert f"rank {rank} failed" in second[1]
    assert "lost its peers" not in first[1] + second[1]


TP, DP, FOUR = (["--layout.tp", "2"], ["--layout.dp_shard", "2"], ["--layout.dp_shard", "4"])


@pytest.mark.parametrize("own", [(TP, DP), (TP, FOUR), (FOUR, TP)], ids=str)
def test_ranks_with_different_degrees_say_so_and_end(own: tuple[list[str], list[str]], tmp_path: Path) -> None:
    for code, told, _ in _bare(_words(tmp_path, {}), "", 2, own):
        assert code == 2
        assert "Traceback" not in told
        assert "rank 1 was started with layout dp_replicate 1" in told or "does not fit the 2 processes" in told
    assert not (tmp_path / "run").exists()


def test_ranks_that_lose_one_without_a_word_end_too(tmp_path: Path) -> None:
    first, second, third = _bare(_words(tmp_path, {"dp_shard": 3}), "1:kill", 3)
    assert (first[0], second[0], third[0]) == (1, -signal.SIGKILL, 1), (first, third)
    assert max(first[2], third[2]) - second[2] < 40
    assert "it lost its peers" in first[1]


def test_torchrun_shows_the_cause_on_rank_0(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--log-dir", str(logs), "-r", "3"]
    command = [sys.executable, *run, PROGRAM, "--", *_words(tmp_path, {"dp_shard": 2})]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment({"FAULT": "1:step"}), timeout=250, check=False
    )
    assert done.returncode != 0
    (log,) = logs.glob("*/attempt_0/0/stderr.log")
    assert "equigrad: rank 1 failed:\nTraceback" in log.read_text()
    assert log.read_text().count(FAULT) == 1
