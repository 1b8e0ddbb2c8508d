"""The optimizers on one small model and the same tokens: held-out loss, time and state, and loss against both.

About a million parameters and a million tokens a run, on the built-in books. Every rule gets the same search, on a
seed that is reported nowhere and by training loss, so that the held-out text chooses nothing: the three learning rates
below, fixed beforehand, and further ones where the best is at an edge, until it is not. Then three seeds at the best.
Runs are done two at a time, one thread each, and each result is written as it comes: what was interrupted goes on where
it was. A result is known by its settings and not by the code that made it: after a change of what runs compute, remove
the file of results, or old ones stand beside new ones.
Steps are timed afterwards, in turns, with nothing beside them.

    python benchmarks/optimizers.py                # two to three hours on two cores
"""

import hashlib
import itertools
import json
import math
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from common import arguments, interleaved, pin_threads, ratio, show, spread, write

OPTIONS = arguments("optimizers", __doc__ or "", tokens=1 << 20, seeds=3, workers=2, rounds=8, only="")
pin_threads(1)

STEP = 2048
"""Tokens of a step."""
TIMED = 10
"""Steps of a round: whole periods of every rule."""
LAST = 0.1
"""Share of the steps whose mean loss chooses a learning rate."""
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


def open_trainer(given: Any, own: Path) -> Any:
    """The product's own loop, before its first step."""
    from equigrad.parallel.world import start
    from equigrad.prepare import prepare
    from equigrad.run import Run
    from equigrad.trainer import Trainer

    world = start(given.layout)
    given, _, stream = prepare(given, Run(own), world, resume=False)
    trainer = Trainer(given, own, world, stream)
    trainer.initialize(given.seed)
    return trainer


def run(rule: str, lr: float, seed: int, folder: str) -> dict[str, Any]:
    """One training run: losses at its end and held-out ones on the way, bytes of state. Not finite: infinite."""
    from equigrad.errors import UserError
    from equigrad.parallel.stop import StopRequest
    from equigrad.trainer import Observer

    curve, losses, tokens, silent, stop = [], [], 0, Observer(), StopRequest()
    with tempfile.TemporaryDirectory(dir=folder) as own:
        trainer = open_trainer(job(rule, lr, seed, folder), Path(own))
        steps = trainer.job.train.steps
        for step in range(1, steps + 1):
            try:
                record, _ = trainer.update(trainer.stream.next_batch(), stop)
            except UserError:  # not finite: this learning rate is too high
                curve, losses = [], [math.inf]
                break
            tokens += record["tokens"]
            losses.append(record["loss"])
            if step % max(1, steps // 16) == 0 or step == steps:
                result = trainer.evaluate(silent, None if step == steps else 20_000)
                assert result is not None
                curve.append([tokens, result.loss])
        state = sum(p.tensor.numel() * p.tensor.element_size() for p in trainer.optimizer.state().values())
        trainer.checkpointer.close()
    return {
        "rule": rule, "lr": lr, "seed": seed, "job": digest(rule, lr, seed), "curve": curve,
        "train_loss": statistics.fmean(losses[-max(1, int(LAST * steps)) :]),
        "held_out_loss": curve[-1][1] if curve else math.inf,
        "state_bytes": state, "parameters": sum(p.tensor.numel() for p in trainer.parameters.values()),
    }  # fmt: skip


def timed(best: dict[str, float], folder: str) -> dict[str, list[float]]:
    """Seconds of a step of each rule, the rules in turns."""
    from equigrad.parallel.stop import StopRequest

    stop = StopRequest()

    def steps(trainer: Any) -> Any:
        return lambda: [trainer.update(trainer.stream.next_batch(), stop) for _ in range(TIMED)]

    sides = {
        rule: steps(open_trainer(job(rule, lr, 0, folder), Path(tempfile.mkdtemp(dir=folder))))
        for rule, lr in best.items()
    }
    return {rule: [s / TIMED for s in seconds] for rule, seconds in interleaved(sides, OPTIONS.rounds, 1).items()}


def digest(rule: str, lr: float, seed: int) -> str:
    """Of what decides a run: a result of other settings is none of this study."""
    settings = job(rule, lr, seed, "").model_dump_json(exclude={"data": {"cache"}})
    return hashlib.sha256(settings.encode()).hexdigest()


def key(result: dict[str, Any]) -> tuple[str, float, int]:
    return result["rule"], result["lr"], result["seed"]


def rate(rule: str, power: int) -> float:
    return float(f"{RULES[rule][1] * APART**power:.3g}")


def search(names: list[str], done: dict[Any, Any], folder: str) -> dict[str, float]:
    """Each rule's best learning rate."""
    powers = {name: {-1, 0, 1} for name in names}
    while True:
        run_all([(name, rate(name, power), 0) for name in names for power in sorted(powers[name])], done, folder)
        best = {n: min(sorted(powers[n]), key=lambda p: done[n, rate(n, p), 0]["train_loss"]) for n in names}
        further = {n: {best[n] - 1, best[n] + 1} - powers[n] for n in names}
        if not any(further.values()):
            return {name: rate(name, power) for name, power in best.items()}
        for name in names:
            powers[name] |= further[name]


def main() -> None:
    names = [name for name in RULES if not OPTIONS.only or name in OPTIONS.only.split(";")]
    done: dict[tuple[str, float, int], dict[str, Any]] = {}
    if OPTIONS.json.exists():
        kept = json.loads(OPTIONS.json.read_text())["runs"]
        done = {key(result): result for result in kept if result["job"] == digest(*key(result))}
    with tempfile.TemporaryDirectory() as folder:
        best = search(names, done, folder)
        run_all([(n, best[n], s) for n, s in itertools.product(names, range(1, OPTIONS.seeds + 1))], done, folder)
        seconds = timed(best, folder)
    summary = {name: summarised(name, best[name], done, seconds) for name in names}
    print(f"{'rule':<18} {'best lr':>8}  held-out loss of {OPTIONS.seeds} seeds   state bytes/parameter")
    for name, s in sorted(summary.items(), key=lambda item: item[1]["mean"]):
        print(f"{name:<18} {s['lr']:>8.2g}  {s['mean']:.4f} +- {s['deviation']:.4f} {s['losses']}"
              f"  {s['state_bytes_per_parameter']:.2f}"
              f"  {s['ms_per_step']['median']:.0f} ms a step, {s['trials']} trials")  # fmt: skip
    for name in names:
        show(f"{name}, a step / adamw's", summary[name]["step_over_adamw"])
    write(OPTIONS.json, {"summary": summary, "runs": list(done.values())})
    draw(summary, done, OPTIONS.json.with_suffix(".svg"))


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


def summarised(name: str, lr: float, done: dict[Any, Any], seconds: dict[str, list[float]]) -> dict[str, Any]:
    runs = [done[name, lr, seed] for seed in range(1, OPTIONS.seeds + 1)]
    losses = [result["held_out_loss"] for result in runs]
    return {
        "lr": lr, "losses": [round(loss, 4) for loss in losses], "mean": statistics.fmean(losses),
        "deviation": statistics.stdev(losses) if len(losses) > 1 and all(map(math.isfinite, losses)) else 0.0,
        "trials": sum(rule == name and seed == 0 for rule, _, seed in done),
        "search": {str(at): result["train_loss"] for (rule, at, seed), result in sorted(done.items())
                   if rule == name and seed == 0},
        "ms_per_step": spread([1e3 * s for s in seconds[name]]),
        "step_over_adamw": ratio(seconds[name], seconds.get("adamw", seconds[name])),
        "state_bytes_per_parameter": runs[0]["state_bytes"] / runs[0]["parameters"],
    }  # fmt: skip


def draw(summary: dict[str, Any], done: dict[Any, Any], path: Path) -> None:
    """Held-out loss, of the same part of that text, against tokens and against seconds; the mean of the seeds."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "optimizers"  # the same file from the same results
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    for name, of in summary.items():
        curves = [curve for seed in range(1, OPTIONS.seeds + 1) if (curve := done[name, of["lr"], seed]["curve"])]
        if len(curves) < OPTIONS.seeds:
            continue  # it diverged, and what is left of it would flatter it
        curves = [curve[:-1] for curve in curves]  # the last is of all the held-out text, the others of a part
        points = [[statistics.fmean(values) for values in zip(*at, strict=True)] for at in zip(*curves, strict=False)]
        second = of["ms_per_step"]["median"] / 1e3 / STEP
        for axis, unit in zip(axes, (1.0, second), strict=True):
            axis.plot([tokens * unit for tokens, _ in points], [loss for _, loss in points], label=name)
    for axis, label in zip(axes, ("tokens", "seconds of steps, one thread"), strict=True):
        axis.set_xlabel(label)
    axes[0].set_ylabel("held-out loss, nats per token")
    axes[0].set_ylim(top=6)
    axes[1].legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    print(f"written: {path}")


if __name__ == "__main__":
    main()
