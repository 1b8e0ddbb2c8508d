"""The optimizers on one small model and the same tokens: held-out loss, time and state, and loss against both.

About a million parameters and a million tokens a run, on the built-in books. Every rule gets the same search: three
learning rates on one seed, the grids below fixed beforehand; then two more seeds at the best. Runs are done two at a
time, one thread each, and each result is written as it comes: what was interrupted goes on where it was.

    python benchmarks/optimizers.py                # about two hours on two cores
"""

import hashlib
import itertools
import json
import math
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from common import arguments, pin_threads

OPTIONS = arguments("optimizers", __doc__ or "", tokens=1 << 20, seeds=3, workers=2, only="")
pin_threads(1)

STEP = 2048
"""Tokens of a step."""
RULES: dict[str, tuple[dict[str, Any], float]] = {
    "adamw": ({"name": "adamw"}, 4e-3),
    "lion": ({"preset": "lion", "weight_decay": 0.5}, 6e-4),
    "muon": ({"preset": "moonlight"}, 4e-3),
    "normuon": ({"preset": "normuon"}, 4e-3),
    "lionmuon, P = 2": ({"preset": "lionmuon-p2"}, 1e-2),
    "lionmuon, P = 5": ({"preset": "lionmuon-p5"}, 1e-2),
    "signmuon, P = 2": ({"name": "signmuon", "period": 2}, 1e-2),
    "meqmuon": ({"preset": "meqmuon"}, 4e-3),
}
"""Of each rule its settings, and the middle one of its three learning rates."""
APART = 2.5
"""By which factor the learning rates differ."""


def job(rule: str, lr: float, seed: int, cache: str) -> Any:
    from equigrad.config.load import make_job

    steps = max(10, OPTIONS.tokens // STEP)
    return make_job(
        {
            "seed": seed, "train": {"steps": steps},
            "data": {"sources": ["builtin:moby-dick", "builtin:sotu"], "held_out_every": 12, "context": 256,
                     "tokenizer": {"kind": "bpe", "vocab_size": 2048}, "cache": cache},
            "batch": {"tokens": STEP, "row_tokens": STEP},
            "model": {"family": "qwen3", "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4,
                      "num_attention_heads": 4, "qk_norm": True, "initializer_range": 0.06,
                      "tie_word_embeddings": True},
            "optim": RULES[rule][0] | {"lr": lr, "warmup_steps": steps // 20, "schedule": "linear",
                                       "min_lr_ratio": 0.05},
            "layout": {"threads": 1},
        },
        "benchmark",
    )  # fmt: skip


def run(rule: str, lr: float, seed: int, folder: str) -> dict[str, Any]:
    """One training run: losses of steps, held-out losses on the way, seconds, bytes of state."""
    from equigrad.errors import UserError
    from equigrad.parallel.stop import StopRequest
    from equigrad.parallel.world import start
    from equigrad.prepare import prepare
    from equigrad.run import Run
    from equigrad.trainer import Observer, Trainer

    given = job(rule, lr, seed, folder)
    world = start(given.layout)
    with tempfile.TemporaryDirectory(dir=folder) as own:
        given, _, stream = prepare(given, Run(Path(own)), world, resume=False)
        trainer = Trainer(given, Path(own), world, stream)
        trainer.initialize(seed)
        curve, seconds, tokens, silent, stop = [], 0.0, 0, Observer(), StopRequest()
        every = max(1, given.train.steps // 16)
        for step in range(1, given.train.steps + 1):
            began = time.perf_counter()
            try:
                record, _ = trainer.update(stream.next_batch(), stop)
            except UserError:  # not finite: this learning rate is too high
                curve = []
                break
            seconds, tokens = seconds + time.perf_counter() - began, tokens + record["tokens"]
            if step % every == 0 or step == given.train.steps:
                result = trainer.evaluate(silent, None if step == given.train.steps else 20_000)
                assert result is not None
                curve.append([tokens, seconds, result.loss])
        state = sum(p.tensor.numel() * p.tensor.element_size() for p in trainer.optimizer.state().values())
        trainer.checkpointer.close()
    return {
        "rule": rule, "lr": lr, "seed": seed, "job": digest(rule, lr, seed), "curve": curve,
        "held_out_loss": curve[-1][2] if curve else math.inf, "ms_per_step": 1e3 * seconds / given.train.steps,
        "state_bytes": state, "parameters": sum(p.tensor.numel() for p in trainer.parameters.values()),
    }  # fmt: skip


def digest(rule: str, lr: float, seed: int) -> str:
    """Of what decides a run: a result of other settings is none of this study."""
    settings = job(rule, lr, seed, "").model_dump_json(exclude={"data": {"cache"}})
    return hashlib.sha256(settings.encode()).hexdigest()


def key(result: dict[str, Any]) -> tuple[str, float, int]:
    return result["rule"], result["lr"], result["seed"]


def rates(rule: str) -> list[float]:
    middle = RULES[rule][1]
    return [float(f"{middle * APART**power:.3g}") for power in (-1, 0, 1)]


def main() -> None:
    names = [name for name in RULES if not OPTIONS.only or name in OPTIONS.only.split(";")]
    done: dict[tuple[str, float, int], dict[str, Any]] = {}
    if OPTIONS.json.exists():
        kept = json.loads(OPTIONS.json.read_text())["runs"]
        done = {key(result): result for result in kept if result["job"] == digest(*key(result))}
    with tempfile.TemporaryDirectory() as folder:
        run_all([(name, lr, 0) for name in names for lr in rates(name)], done, folder)
        best = {name: min(rates(name), key=lambda lr: done[name, lr, 0]["held_out_loss"]) for name in names}
        run_all([(n, best[n], seed) for n, seed in itertools.product(names, range(1, OPTIONS.seeds))], done, folder)
    summary = {name: summarised(name, best[name], done) for name in names}
    OPTIONS.json.write_text(json.dumps({"summary": summary, "runs": list(done.values())}, indent=1) + "\n")
    print(f"{'rule':<18} {'best lr':>8}  held-out loss (three seeds)   ms/step  state bytes/parameter")
    for name, s in sorted(summary.items(), key=lambda item: item[1]["mean"]):
        at_edge = " (at the edge of its grid)" if s["lr"] != RULES[name][1] else ""
        print(f"{name:<18} {s['lr']:>8.2g}  {s['mean']:.4f} +- {s['spread']:.4f} {s['losses']}  {s['ms_per_step']:7.1f}"
              f"  {s['state_bytes_per_parameter']:.2f}{at_edge}")  # fmt: skip
    draw(best, done, OPTIONS.json.with_suffix(".svg"))


def run_all(wanted: list[tuple[str, float, int]], done: dict[Any, Any], folder: str) -> None:
    """Those that are not done yet; each is written as it comes."""
    missing = [one for one in wanted if one not in done]
    with ProcessPoolExecutor(OPTIONS.workers, get_context("spawn")) as pool:
        for future in as_completed([pool.submit(run, *one, folder) for one in missing]):
            result = future.result()
            done[key(result)] = result
            OPTIONS.json.parent.mkdir(parents=True, exist_ok=True)
            OPTIONS.json.write_text(json.dumps({"runs": list(done.values())}) + "\n")
            print(
                f"{result['rule']}, lr {result['lr']:g}, seed {result['seed']}: {result['held_out_loss']:.4f}",
                flush=True,
            )


def summarised(name: str, lr: float, done: dict[Any, Any]) -> dict[str, Any]:
    runs = [done[name, lr, seed] for seed in range(OPTIONS.seeds)]
    losses = [result["held_out_loss"] for result in runs]
    return {
        "lr": lr, "losses": [round(loss, 4) for loss in losses], "mean": statistics.fmean(losses),
        "spread": statistics.stdev(losses) if len(losses) > 1 else 0.0,
        "ms_per_step": statistics.median(result["ms_per_step"] for result in runs),
        "state_bytes_per_parameter": runs[0]["state_bytes"] / runs[0]["parameters"],
    }  # fmt: skip


def draw(best: dict[str, float], done: dict[Any, Any], path: Path) -> None:
    """Held-out loss against tokens and against seconds, the mean of the seeds."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    for name, lr in best.items():
        curves = [curve for seed in range(OPTIONS.seeds) if (curve := done[name, lr, seed]["curve"])]
        points = [[statistics.fmean(values) for values in zip(*at, strict=True)] for at in zip(*curves, strict=False)]
        for axis, column in zip(axes, (0, 1), strict=True):
            axis.plot([point[column] for point in points], [point[2] for point in points], label=name)
    for axis, label in zip(axes, ("tokens", "seconds of steps, one thread"), strict=True):
        axis.set_xlabel(label)
    axes[0].set_ylabel("held-out loss, nats per token")
    axes[0].set_ylim(top=6)
    axes[1].legend()
    figure.tight_layout()
    figure.savefig(path)
    print(f"written: {path}")


if __name__ == "__main__":
    main()
