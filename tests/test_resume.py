"""Runs as users meet them: interrupted, killed, resumed, on other layouts. Real processes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from equigrad.checkpoint.folder import latest
from equigrad.checkpoint.manifest import read_manifest, verify
from equigrad.checkpoint.state import read_tensors
from equigrad.config import Job
from equigrad.parallel import launch
from equigrad.parallel.launch import Death
from tests.jobs import command, environment, start_command, steps_of, summary, tiny_job, train, write_job
from tests.workers import Workers

SPLIT = {"optim__schedule_steps": 20, "checkpoint__every": 5, "checkpoint__keep_last": 4, "batch__tokens": 200}


def run(job: Any, folder: Path, *words: str) -> Path:
    """Train ``job`` in ``folder``; fails with the command's own words."""
    done = command("train", write_job(job, folder.with_suffix(".toml")), "--run", folder, *words)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def twenty(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """``twenty(n)``: a run of twenty steps on n shards that nobody disturbed."""

    @cache
    def undisturbed(shards: int) -> Path:
        return run(
            tiny_job(**SPLIT, train__steps=20, layout__dp_shard=shards), tmp_path_factory.mktemp("whole") / "run"
        )

    return undisturbed


@pytest.mark.parametrize("shards", [1, 2])
def test_ten_and_ten_steps_end_in_the_bits_of_twenty(
    twenty: Callable[[int], Path], tmp_path: Path, shards: int
) -> None:
    parts = run(tiny_job(**SPLIT, train__steps=10, layout__dp_shard=shards), tmp_path / "parts")
    done = command("train", "--run", parts, "--resume", "--train.steps", "20")
    assert done.returncode == 0, done.stderr
    assert steps_of(twenty(shards)) == steps_of(parts)
    assert summary(twenty(shards))["held_out_loss"] == summary(parts)["held_out_loss"]
    assert summary(twenty(shards))["tokens"] == summary(parts)["tokens"]
    same_end(twenty(shards), parts)


def same_end(whole: Path, parts: Path) -> None:
    """All state is the same, the optimizer's moments too: the last checkpoints' files are equal byte for byte."""
    assert summary(whole)["parameter_digest"] == summary(parts)["parameter_digest"]
    same_files(whole, parts, 20)


def same_files(whole: Path, parts: Path, step: int) -> None:
    last = f"checkpoints/step-{step:08d}"
    ranks = sorted((whole / last).glob("*.safetensors"))
    assert ranks
    for file in ranks:
        assert file.read_bytes() == (parts / last / file.name).read_bytes()


EXPERTS = {
    "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "router_aux_loss_coef": 0.1, "router_bias_update_rate": 0.01,
}  # fmt: skip
SPARSE: dict[str, Any] = {"model__experts": EXPERTS}
ADAPTED = SPARSE | {"lora": {"rank": 4, "targets": ["q_proj", r".*\.experts\..*"]}}


def train_on(workers: Callable[[int], Workers], job: Job, folder: Path, resume: bool = False) -> list[dict[str, Any]]:
    """The records of the steps of a job on its ranks."""
    ranks = job.layout.world_size
    done = workers(ranks).run(train, job, folder, resume) if ranks > 1 else [train(job, folder, resume)]
    return done[0][0]


def recorded(steps: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    keys = ("step", "loss", "balance_loss", "grad_norm", "expert_load", "dropped_tokens", "tokens", "total_tokens")
    return [tuple(step[key] for key in keys if key in step) for step in steps]


def routing(run_folder: Path, step: int) -> dict[str, Any]:
    """What a checkpoint knows of the experts' loads: the counts of its step, and the biases."""
    found = dict(read_tensors(run_folder / f"checkpoints/step-{step:08d}", ""))
    return {n: t.tolist() for n, t in found.items() if n.startswith("routing.") or n.endswith("correction_bias")}


def cursor(run_folder: Path, step: int) -> Any:
    return read_manifest(run_folder / f"checkpoints/step-{step:08d}").meta["cursor"]


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ({"dp_replicate": 2}, {}),
        ({"tp": 2}, {}),
        ({"pp": 2}, {}),
        ({}, SPARSE),
        ({"dp_shard": 2, "ep": 2}, SPARSE),
        ({"dp_shard": 2, "ep": 2}, ADAPTED),
    ],
    ids=str,
)
def test_a_layout_goes_on_to_the_bit(
    workers: Callable[[int], Workers], tmp_path: Path, layout: dict[str, int], model: dict[str, Any]
) -> None:
    changes: dict[str, Any] = SPLIT | {"layout": layout} | model
    whole = train_on(workers, tiny_job(**changes, train__steps=6), tmp_path / "whole")
    parts = train_on(workers, tiny_job(**changes, train__steps=3), tmp_path / "parts")
    parts += train_on(workers, tiny_job(**changes, train__steps=6), tmp_path / "parts", True)
    assert recorded(whole) == recorded(parts)
    same_files(tmp_path / "whole", tmp_path / "parts", 6)
    assert routing(tmp_path / "whole", 6) == routing(tmp_path / "parts", 6)
    assert len(routing(tmp_path / "whole", 6)) == 3 * ("model__experts" in model)


@pytest.mark.parametrize(
    ("before", "after", "model"),
    [
        ({"dp_shard": 2}, {}, {}),
        ({}, {"dp_shard": 2}, {}),
        ({"tp": 2}, {"cp": 2}, {}),
        ({"pp": 2}, {"tp": 2}, {}),
        ({"dp_shard": 2, "ep": 2}, {}, SPARSE),
        ({}, {"dp_shard": 2, "ep": 2}, SPARSE),
        ({"dp_shard": 2, "ep": 2}, {"tp": 2}, ADAPTED),
    ],
    ids=str,
)
def test_on_another_layout_a_run_loses_and_repeats_no_sample(
    workers: Callable[[int], Workers],
    tmp_path: Path,
    before: dict[str, int],
    after: dict[str, int],
    model: dict[str, Any],
) -> None:
    changes: dict[str, Any] = SPLIT | {"model__initializer_range": 0.05, "optim__eps": 1e-5} | model
    whole = train_on(workers, tiny_job(**changes, train__steps=8), tmp_path / "whole")
    parts = train_on(workers, tiny_job(**changes, train__steps=5, layout=before), tmp_path / "parts")
    parts += train_on(workers, tiny_job(**changes, train__steps=8, layout=after), tmp_path / "parts", True)
    for a, b in zip(recorded(whole), recorded(parts), strict=True):
        assert a == pytest.approx(b, rel=1e-4)
    assert [step["tokens"] for step in whole] == [step["tokens"] for step in parts]
    assert cursor(tmp_path / "whole", 8) == cursor(tmp_path / "parts", 8)
    assert routing(tmp_path / "whole", 8) == routing(tmp_path / "parts", 8)


@pytest.mark.parametrize("ranks", [1, 2])
def test_kill_in_mid_save_and_resume_gives_the_same_bits(
    twenty: Callable[[int], Path], tmp_path: Path, ranks: int
) -> None:
    """First all processes die at once, then one rank, whose launcher ends the others."""
    job = tiny_job(**SPLIT | {"checkpoint__every": 1}, train__steps=20, layout__dp_shard=ranks)
    killed = tmp_path / "killed"
    toml = write_job(job, tmp_path / "job.toml")
    for attempt in range(2):
        before = len(steps_of(killed)) if killed.exists() else 0
        process = start_command("train", toml, "--run", killed, *(["--resume"] if attempt else []))
        wait_for_steps(process, killed, before + 2 + attempt)
        workers = children(process.pid) or [process.pid]
        freeze_in_mid_save(process, workers, killed)
        for pid in workers[-1:] if attempt else {process.pid, *workers}:
            os.kill(pid, signal.SIGKILL)
        for pid in workers:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        process.communicate(timeout=60)
        assert process.returncode != 0
    done = command("train", toml, "--run", killed, "--resume")
    assert done.returncode == 0, done.stderr
    assert steps_of(killed) == steps_of(twenty(ranks))
    same_end(twenty(ranks), killed)
    left = [p.name for p in (killed / "checkpoints").iterdir() if not p.name.startswith("step-")]
    assert left == []


def freeze_in_mid_save(process: subprocess.Popen, workers: list[int], folder: Path) -> None:
    """Stop the workers at a moment when a checkpoint is only half there: frozen, they cannot end the save unseen."""
    while process.poll() is None:
        if saving(folder):
            for pid in workers:
                os.kill(pid, signal.SIGSTOP)
            if saving(folder):
                return
            for pid in workers:
                os.kill(pid, signal.SIGCONT)
    raise AssertionError(f"the run ended before a save was seen: {process.communicate()}")


def saving(folder: Path) -> bool:
    return any((folder / "checkpoints").glob(".step-*"))


def test_a_run_is_resumed_on_another_layout(twenty: Callable[[int], Path], tmp_path: Path) -> None:
    parts = run(tiny_job(**SPLIT, train__steps=5, layout__dp_shard=2), tmp_path / "parts")
    done = command("train", "--run", parts, "--resume", "--train.steps", "10", "--layout.dp_shard", "1")
    assert done.returncode == 0, done.stderr
    for a, b in zip(steps_of(twenty(1))[:10], steps_of(parts), strict=True):
        assert (a[0], a[3]) == (b[0], b[3])
        assert a[1:3] == pytest.approx(b[1:3], rel=1e-4)
    assert cursor(twenty(1), 10) == cursor(parts, 10)


@pytest.mark.parametrize(("ranks", "number"), [(1, signal.SIGINT), (1, signal.SIGTERM), (2, signal.SIGTERM)])
def test_a_signal_saves_and_ends_cleanly(tmp_path: Path, ranks: int, number: signal.Signals) -> None:
    job = tiny_job(train__steps=100000, layout__dp_shard=ranks, batch__tokens=100)
    folder = tmp_path / "run"
    process = start_command("train", write_job(job, tmp_path / "job.toml"), "--run", folder)
    wait_for_steps(process, folder, 3)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "--resume continues the run" in out
    assert "Traceback" not in err
    (checkpoint,) = (folder / "checkpoints").iterdir()
    assert int(checkpoint.name.removeprefix("step-")) == steps_of(folder)[-1][0]
    words = ["--train.steps", str(steps_of(folder)[-1][0] + 1), "--layout.dp_shard", "1"]
    again = command("train", "--run", folder, "--resume", *words)
    assert again.returncode == 0, again.stderr


def test_training_goes_on_under_nohup_when_the_terminal_is_closed(tmp_path: Path) -> None:
    """Which tells every process of its group."""
    job = tiny_job(train__steps=100000, layout__dp_shard=2, batch__tokens=100)
    words, folder = ("train", write_job(job, tmp_path / "job.toml")), tmp_path / "run"
    process = start_command(*words, "--run", folder, under=["nohup"], start_new_session=True)
    wait_for_steps(process, folder, 3)
    os.killpg(process.pid, signal.SIGHUP)
    wait_for_steps(process, folder, len(steps_of(folder)) + 20)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err


def wait_for_steps(process: subprocess.Popen, folder: Path, steps: int) -> None:
    """Return once the run has recorded so many steps."""
    deadline = time.monotonic() + 60
    while not ((folder / "metrics.jsonl").exists() and len(steps_of(folder)) >= steps):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    """Worker processes of a launcher."""
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout
    return [int(p) for p in found.split()]


def worker(process: subprocess.Popen, rank: int) -> int:
    """The process of one rank."""
    mark = f"LOCAL_RANK={rank}\0".encode()
    return next(pid for pid in children(process.pid) if mark in Path(f"/proc/{pid}/environ").read_bytes())


def test_a_killed_worker_ends_the_run_within_seconds_and_is_named(tmp_path: Path) -> None:
    job = tiny_job(train__steps=100000, layout__dp_shard=2, batch__tokens=100)
    folder = tmp_path / "run"
    process = start_command("train", write_job(job, tmp_path / "job.toml"), "--run", folder)
    wait_for_steps(process, folder, 3)
    os.kill(worker(process, 1), signal.SIGKILL)
    began = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 15
    assert process.returncode == 1
    assert "rank 1 was killed by SIGKILL" in err
    assert "Traceback" not in err
    assert not children(process.pid)


def test_who_was_killed_is_told_from_who_was_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 1 was killed, rank 0 lost it and said so, rank 2 did not answer and was ended by the launcher."""
    lost = {"rank": 0, "time": 1000.2, "text": "Connection closed by peer", "user_error": False, "lost_peers": True}
    (tmp_path / "report-0.json").write_text(json.dumps(lost))
    assert launch._explain(tmp_path, {0: Death(1, 1000), 1: Death(-9, 1000), 2: Death(-9, 1005)}) == 1
    told = capsys.readouterr().err
    assert "rank 1 was killed by SIGKILL" in told
    assert "ranks [2] did not answer" in told
    assert "rank 0" not in told


def test_an_error_is_told_also_where_a_stop_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 1 failed after the request; what ended rank 0 then looked to it like a second one."""
    (tmp_path / launch._STOP).touch()
    assert launch._explain(tmp_path, {0: Death(130, 1000), 1: Death(130, 1000)}) == 130
    assert capsys.readouterr().err == "equigrad: interrupted\n"
    failed = {"rank": 1, "time": 1000.2, "text": "out of memory", "user_error": False, "lost_peers": False}
    (tmp_path / "report-1.json").write_text(json.dumps(failed))
    assert launch._explain(tmp_path, {0: Death(130, 1000), 1: Death(1, 1000)}) == 1
    assert "rank 1 failed:\nout of memory" in capsys.readouterr().err


def test_workers_save_and_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    job = tiny_job(train__steps=100000, layout__dp_shard=2, batch__tokens=100)
    folder = tmp_path / "run"
    process = start_command("train", write_job(job, tmp_path / "job.toml"), "--run", folder)
    wait_for_steps(process, folder, 3)
    workers = children(process.pid)
    assert len(workers) == 2
    process.kill()
    process.wait()
    deadline = time.monotonic() + 30
    while (left := [pid for pid in workers if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"step-{steps_of(folder)[-1][0]:08d}"]
    verify(latest(folder / "checkpoints"))


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and whose parent has not yet taken note does not."""
    found = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout
    return bool(found.strip()) and not found.startswith("Z")


def test_a_worker_that_raises_shows_its_own_traceback_once(tmp_path: Path) -> None:
    """A fault planted on rank 1 only: rank 0 would wait in a collective for it."""
    planted = tmp_path / "sitecustomize.py"
    planted.write_text(
        "import os\n"
        "if os.environ.get('RANK') == '1':\n"
        "    import equigrad.trainer as t\n"
        "    whole = t.Trainer.gradients\n"
        "    def broken(self, *a):\n"
        "        if self.step == 2: raise ZeroDivisionError('planted fault')\n"
        "        return whole(self, *a)\n"
        "    t.Trainer.gradients = broken\n"
    )
    job = tiny_job(train__steps=100000, layout__dp_shard=2)
    began = time.monotonic()
    done = command(
        "train", write_job(job, tmp_path / "job.toml"), "--run", tmp_path / "run", env={"PYTHONPATH": str(tmp_path)}
    )
    assert time.monotonic() - began < 60
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.count("ZeroDivisionError: planted fault") == 1
    assert "rank 1 failed" in done.stderr


def test_an_existing_run_is_not_overwritten_and_a_missing_one_starts(tmp_path: Path) -> None:
    job = tiny_job(train__steps=1)
    folder = run(job, tmp_path / "run", "--resume")  # nothing to resume yet: it starts
    before = (folder / "metrics.jsonl").read_bytes()
    again = command("train", tmp_path / "run.toml", "--run", folder)
    assert again.returncode == 2
    assert "--resume continues it" in again.stderr
    assert (folder / "metrics.jsonl").read_bytes() == before
    finished = command("train", "--run", folder, "--resume")
    assert finished.returncode == 0, finished.stderr
    assert (folder / "metrics.jsonl").read_text().count('"kind": "step"') == 1


def test_what_gives_the_state_its_meaning_cannot_change_on_resume(tmp_path: Path) -> None:
    folder = run(tiny_job(train__steps=1), tmp_path / "run")
    for words in (["--model.hidden_size", "64"], ["--data.context", "32"], ["--seed", "9"]):
        done = command("train", "--run", folder, "--resume", *words)
        assert done.returncode == 2
        assert words[0][2:] in done.stderr


def test_torchrun_starts_the_same_run(twenty: Callable[[int], Path], tmp_path: Path) -> None:
    toml = write_job(tiny_job(**SPLIT, layout__dp_shard=2, train__steps=20), tmp_path / "job.toml")
    words = ["--standalone", "--nproc-per-node=2", "-m", "equigrad", "--", "train", toml, "--run", tmp_path / "run"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *map(str, words)],
        capture_output=True, text=True, env=environment(), timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    same_end(twenty(2), tmp_path / "run")


def test_the_same_command_with_resume_continues_what_it_started(tmp_path: Path) -> None:
    """A job file that leaves to the run what the run resolves: the vocabulary, the shape of given weights."""
    base = tmp_path / "base.toml"
    base.write_text(
        "[train]\nsteps = 2\n[data]\ncontext = 32\ntokenizer = {kind = 'bpe', vocab_size = 300}\n[batch]\ntokens = 64\n"
        "[model]\nhidden_size = 16\nintermediate_size = 16\nnum_hidden_layers = 1\nnum_attention_heads = 2\n"
        "[observe]\nsample_tokens = 0\n"
    )
    warm = tmp_path / "warm.toml"
    warm.write_text(
        f"model.weights = '{tmp_path / 'base'}'\n[train]\nsteps = 2\n[data]\ncontext = 32\n[batch]\ntokens = 64\n"
        "[observe]\nsample_tokens = 0\n"
    )
    for job in (base, warm):
        for steps in ("2", "3"):
            words = ["train", job, "--run", job.with_suffix(""), "--resume", "--train.steps", steps]
            done = command(*words)
            assert done.returncode == 0, done.stderr
        assert [s[0] for s in steps_of(job.with_suffix(""))] == [1, 2, 3]


def test_a_run_that_goes_on_is_not_finished(tmp_path: Path) -> None:
    folder = run(tiny_job(train__steps=2), tmp_path / "run")
    process = start_command("train", "--run", folder, "--resume", "--train.steps", "100000")
    wait_for_steps(process, folder, 5)
    second = command("train", "--run", folder, "--resume")
    assert second.returncode == 2
    assert "in use by another process" in second.stderr
    process.kill()
    process.communicate()
    assert not (folder / "summary.json").exists()


def test_ranks_with_different_words_do_not_train_together(tmp_path: Path) -> None:
    toml = write_job(tiny_job(layout__dp_replicate=2, train__steps=2), tmp_path / "job.toml")
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = []
    for rank in range(2):
        env = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2",
               "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
        words = ["train", toml, "--run", tmp_path / "run", "--optim.lr", f"0.{rank + 1}"]
        processes.append(start_command(*words, env=env))
    told = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [2, 2]
    assert "job: rank 1 differs from rank 0 (optim.lr 0.2 on rank 1, 0.1 on rank 0)" in told[0]
    assert "Traceback" not in "".join(told)


@pytest.mark.parametrize("delay", [1.0, 3.0])
def test_a_signal_during_start_up_is_not_lost(tmp_path: Path, delay: float) -> None:
    job = tiny_job(train__steps=100000, layout__dp_shard=2, batch__tokens=100)
    process = start_command("train", write_job(job, tmp_path / "job.toml"), "--run", tmp_path / "run")
    time.sleep(delay)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode in (0, -signal.SIGTERM), (out, err)
    assert "Traceback" not in err


def test_a_rank_that_hangs_is_not_waited_for_longer_than_the_timeout(tmp_path: Path) -> None:
    job = tiny_job(train__steps=100000, layout={"dp_shard": 2, "timeout_s": 7.0})
    process = start_command("train", write_job(job, tmp_path / "job.toml"), "--run", tmp_path / "run")
    wait_for_steps(process, tmp_path / "run", 3)
    workers = children(process.pid)
    os.kill(worker(process, 1), signal.SIGSTOP)
    began = time.monotonic()
    _, err = process.communicate(timeout=120)
    assert time.monotonic() - began < 30
    assert process.returncode == 1
    assert "rank 0 failed" in err
    assert "ranks [1] did not answer and were ended" in err
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


def test_a_crash_while_a_checkpoint_is_replaced_does_not_stop_the_resume(tmp_path: Path) -> None:
    folder = run(tiny_job(train__steps=2), tmp_path / "run")
    (folder / "checkpoints/step-00000002").rename(folder / "checkpoints/step-00000002.old")
    done = command("train", "--run", folder, "--resume", "--train.steps", "3")
    assert done.returncode == 0, done.stderr
    assert [s[0] for s in steps_of(folder)] == [1, 2, 3]
