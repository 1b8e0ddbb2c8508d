"""Tiny jobs for tests, and ways to run them: in this process, on a pool of ranks, or as the real command."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from equigrad.config import Job
from equigrad.config.load import make_job
from equigrad.data.stream import Stream
from equigrad.data.tokenizers import byte_tokenizer
from equigrad.parallel.stop import StopRequest
from equigrad.parallel.world import World
from equigrad.trainer import Observer, Trainer


def tiny_job(**changes: Any) -> Job:
    """A two-block byte model on Moby Dick; changes are dotted keys with ``__`` for the dot."""
    tree: dict[str, Any] = {
        "name": "tiny",
        "seed": 3,
        "train": {"steps": 4},
        "data": {"held_out_every": 40, "context": 48, "tokenizer": {"kind": "bytes"}},
        "batch": {"tokens": 500, "row_tokens": 96},
        "model": {
            "vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2,
        },
        "optim": {"lr": 1e-2, "warmup_steps": 2},
        "observe": {"sample_tokens": 8},
    }  # fmt: skip
    for key, value in changes.items():
        *path, leaf = key.split("__")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[leaf] = value
    return make_job(tree, "test")


def pool_world(job: Job) -> World:
    """This process's view inside a pool of ranks (or alone)."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    layout, cpu = job.layout, torch.device("cpu")
    if layout.world_size == 1:
        return World(layout, 0, 1, 0, cpu, None)
    mesh = init_device_mesh("cpu", (layout.dp_replicate, layout.dp_shard), mesh_dim_names=("dp_replicate", "dp_shard"))
    return World(layout, dist.get_rank(), dist.get_world_size(), dist.get_rank(), cpu, mesh)


class Records(Observer):
    """Keeps what the loop reports."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def step(self, record: dict[str, Any], batch: Any) -> None:
        self.steps.append(record)


def make_trainer(job: Job, folder: Path, world: World | None = None) -> Trainer:
    """A trainer with initial weights."""
    world = world or pool_world(job)
    trainer = Trainer(job, folder, world, Stream(job.data, job.batch, job.seed, byte_tokenizer()))
    trainer.model.initialize(job.seed)
    return trainer


def whole_parameters(trainer: Trainer) -> dict[str, torch.Tensor]:
    """All parameters, gathered."""
    named = trainer.model.named_parameters()
    return {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for n, p in named}


def train(job: Job, folder: Path) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """Run a job on the ranks of this pool; the records of its steps and its final parameters."""
    trainer, records = make_trainer(job, folder), Records()
    trainer.run(records, StopRequest())
    return records.steps, whole_parameters(trainer)


def command(*words: str | Path, env: dict[str, str] | None = None, timeout: float = 240) -> subprocess.CompletedProcess:
    """``equigrad WORDS`` as a real process, one thread."""
    return subprocess.run(
        [sys.executable, "-m", "equigrad", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment(env),
    )


def start_command(*words: str | Path, env: dict[str, str] | None = None) -> subprocess.Popen:
    """The same, left running."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-m", "equigrad", *map(str, words)], env=environment(env), **pipes)


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """This environment, less what would make a process believe it is a rank."""
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {k: v for k, v in os.environ.items() if k not in ranks}
    return kept | {"OMP_NUM_THREADS": "1"} | (extra or {})


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Writing fails at byte ``size`` of a file, half way through, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def write_job(job: Job, path: Path) -> Path:
    """The job as a file."""
    from equigrad.config import dump_toml

    path.write_text(dump_toml(job))
    return path


def summary(run: Path) -> dict[str, Any]:
    """What a finished run says of itself."""
    return json.loads((run / "summary.json").read_text())


def steps_of(run: Path, keys: Sequence[str] = ("step", "loss", "grad_norm", "tokens")) -> list[tuple[Any, ...]]:
    """The recorded steps of a run."""
    from equigrad.observe.metrics import read_metrics

    return [tuple(r[k] for k in keys) for r in read_metrics(run / "metrics.jsonl") if r["kind"] == "step"]
