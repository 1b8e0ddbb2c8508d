"""Tiny jobs for tests, and ways to run them: in this process, on a pool of ranks, or as the real command."""

import io
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from equigrad.checkpoint.boxes import Box
from equigrad.checkpoint.folder import latest
from equigrad.config import Job
from equigrad.config.load import make_job
from equigrad.data.samples import Sample, SampleRef
from equigrad.data.stream import Stream
from equigrad.data.tokenizers import byte_tokenizer
from equigrad.parallel.placement import Placed
from equigrad.parallel.ranks import gather
from equigrad.parallel.stop import StopRequest
from equigrad.parallel.world import World, make_mesh
from equigrad.trainer import Observer, Trainer


def tiny_job(**changes: Any) -> Job:
    """A two-block byte model on Moby Dick; changes are dotted keys with ``__`` for the dot."""
    tree: dict[str, Any] = {
        "name": "tiny",
        "seed": 3,
        "train": {"steps": 4},
        "data": {"held_out_every": 139, "context": 48, "tokenizer": {"kind": "bytes"}},
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


def refs(lengths: Sequence[int]) -> list[SampleRef]:
    """Samples of some lengths, documents of one source, of which every token is in the loss."""
    return [SampleRef(0, document, 0, length, length) for document, length in enumerate(lengths)]


def pool_world(job: Job) -> World:
    """This process's view inside a pool of ranks (or alone)."""
    import torch.distributed as dist

    layout, cpu = job.layout, torch.device("cpu")
    if layout.world_size == 1:
        return World(layout, 0, 1, 0, cpu, None)
    mesh, axes, experts = make_mesh(layout, "cpu")
    rank = dist.get_rank()
    return World(layout, rank, dist.get_world_size(), rank, cpu, mesh, axes=axes, expert_mesh=experts)


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
    trainer.initialize(job.seed)
    return trainer


def whole_parameters(trainer: Trainer) -> dict[str, torch.Tensor]:
    """All parameters, put together from every rank's boxes."""
    return assemble(trainer.parameters)


def assemble(tensors: Mapping[str, Placed]) -> dict[str, torch.Tensor]:
    """The whole tensors of which every rank of the world has boxes, in name order. Copies must be equal."""
    whole: dict[str, torch.Tensor] = {}
    for boxes in gather({n: (p.placement, p.tensor) for n, p in tensors.items()}):
        for name, (at, tensor) in boxes.items():
            empty = torch.full(at.shape, torch.nan if tensor.is_floating_point() else -1, dtype=tensor.dtype)
            target = whole.setdefault(name, empty)[Box(at.offset, at.local_shape).slices]
            untouched = bool((target.isnan() if tensor.is_floating_point() else target == -1).all())
            assert not at.replica or untouched or torch.allclose(target, tensor, 1e-6, 1e-7, equal_nan=True)
            target.copy_(tensor)
    assert not any(tensor.isnan().any() for tensor in whole.values())
    return dict(sorted(whole.items()))


def mean_loss(model: Any, samples: Sequence[Sample]) -> torch.Tensor:
    """What a bare loop over a model of ``transformers`` has for a loss: each sample alone, over all tokens."""
    total = torch.zeros(())
    for sample in samples:
        ids, labels = (torch.from_numpy(stream.astype("int64")) for stream in (sample.ids, sample.labels))
        total = total + F.cross_entropy(model(ids[None]).logits[0], labels, reduction="sum")
    return total / sum(map(len, samples))


def train(job: Job, folder: Path, resume: bool = False) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """Run a job on the ranks of this pool, or go on with it; the records of its steps and its final parameters."""
    trainer, records = make_trainer(job, folder), Records()
    if resume:
        checkpoint = latest(folder / "checkpoints")
        assert checkpoint is not None
        trainer.resume(checkpoint)
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


def inside(*words: str | Path) -> str:
    """``equigrad WORDS`` in this process: what it prints, or an error if it fails."""
    from equigrad.cli import main

    with redirect_stdout(io.StringIO()) as out:
        assert main(list(map(str, words))) == 0
    return out.getvalue()


def start_command(
    *words: str | Path, env: dict[str, str] | None = None, under: Sequence[str] = (), **how: Any
) -> subprocess.Popen:
    """The same, left running. ``under``: a command that runs it."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | how
    return subprocess.Popen([*under, sys.executable, "-m", "equigrad", *map(str, words)], env=environment(env), **pipes)


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
