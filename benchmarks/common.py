"""What every benchmark shares: pinned threads, interleaved timing, medians with their spread, a JSON file."""

import argparse
import gzip
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def arguments(name: str, doc: str, **defaults: Any) -> argparse.Namespace:
    """Common options, and one for each of the defaults."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--json", type=Path, default=RESULTS / f"{name}.json", help="where the result is written")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of both sides")
    for key, value in defaults.items():
        parser.add_argument(f"--{key.replace('_', '-')}", type=type(value), default=value)
    return parser.parse_args()


def pin_threads(threads: int) -> None:
    """Before torch loads: the same number of threads for whatever runs in this process."""
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import torch

    torch.set_num_threads(threads)


def interleaved(sides: Mapping[str, Callable[[], Any]], rounds: int, warm_up: int = 2) -> dict[str, list[float]]:
    """Seconds of each side in each round. Sides take turns, so that a slow moment of the machine hits all of them."""
    for _ in range(warm_up):
        for run in sides.values():
            run()
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, run in sides.items():
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def full_length_samples(folder: Path, context: int) -> Path:
    """Text cut so that each document is exactly one full sample of the byte tokenizer; a file in ``folder``."""
    source = files("equigrad.data").joinpath("corpora/sotu.jsonl.gz").read_bytes()
    text = "".join(json.loads(line)["text"] for line in gzip.decompress(source).splitlines())
    text = text.encode("ascii", "ignore").decode()
    pieces = [text[i : i + context] for i in range(0, 400 * context, context)]
    path = folder / "full.jsonl"
    path.write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces))
    return path


def world_of(job: Any, rank: int) -> Any:
    """This process's view of the job's layout, on the CPU; where there are several, their process group is there."""
    import torch

    from equigrad.parallel.world import World, make_mesh

    size, cpu = job.layout.world_size, torch.device("cpu")
    if size == 1:
        return World(job.layout, 0, 1, 0, cpu, None)
    mesh, axes, experts = make_mesh(job.layout, "cpu")
    return World(job.layout, rank, size, rank, cpu, mesh, axes=axes, expert_mesh=experts)


INNER, LAYERS = {128: 352, 256: 704, 512: 1408}, {128: 4, 256: 8, 512: 6}


def shape_trainer(hidden: int, context: int, tokens: int, threads: int, numerics: dict[str, Any], folder: Path) -> Any:
    """The product's own loop over ``full_length_samples``, each a row of its own; ``hidden``: of 128, 256 and 512."""
    import tempfile

    from equigrad.config.load import make_job
    from equigrad.data.stream import Stream
    from equigrad.data.tokenizers import byte_tokenizer
    from equigrad.parallel.world import start
    from equigrad.trainer import Trainer

    job = make_job(
        {
            "data": {"sources": [str(folder / "full.jsonl")], "context": context, "append_eos": False,
                     "tokenizer": {"kind": "bytes"}, "cache": str(folder / "cache")},
            "batch": {"tokens": tokens, "row_tokens": context},
            "model": {"family": "llama", "vocab_size": 4096, "hidden_size": hidden,
                      "intermediate_size": INNER[hidden], "num_hidden_layers": LAYERS[hidden],
                      "num_attention_heads": hidden // 64},
            "optim": {"lr": 3e-4}, "train": {"steps": 10**6}, "layout": {"threads": threads},
            "numerics": numerics,
        },
        "benchmark",
    )  # fmt: skip
    stream = Stream(job.data, job.batch, 0, byte_tokenizer())
    trainer = Trainer(job, Path(tempfile.mkdtemp(dir=folder)), start(job.layout), stream)
    trainer.initialize(0)
    return trainer


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"median": middle, "q1": low, "q3": high}


def ratio(slow: list[float], fast: list[float]) -> dict[str, float]:
    """How many times faster ``fast`` is, from the paired rounds."""
    return spread([a / b for a, b in zip(slow, fast, strict=True)])


def show(name: str, value: dict[str, float], digits: int = 3) -> None:
    """One line: median and quartiles."""
    print(f"{name:<58} {value['median']:.{digits}f}  ({value['q1']:.{digits}f} to {value['q3']:.{digits}f})")


def write(path: Path, result: dict[str, Any]) -> None:
    """The result together with what it was measured on."""
    import torch

    machine = {"processor": _processor(), "cores": os.cpu_count(), "python": platform.python_version(),
               "torch": torch.__version__}  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine} | result, indent=2) + "\n")
    print(f"written: {path}")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
