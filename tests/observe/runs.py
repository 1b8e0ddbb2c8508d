"""Run folders as a finished job leaves them, with made-up but realistic figures."""

import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from equigrad.config import Job, dump_toml
from equigrad.observe.metrics import MetricsLog

DIGEST = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
SUMMARY = {
    "steps": 200,
    "tokens": 1_638_400,
    "tokens_per_second": 12034.5,
    "wall_seconds": 136.0,
    "held_out_loss": 3.0123,
    "held_out_bits_per_byte": 1.9876,
    "parameter_digest": DIGEST,
}


def step_record(step: int, total: int, **changes: float) -> dict[str, Any]:
    """The record of one step of a run of ``total`` steps; always the same for the same step."""
    draw, done = random.Random(step), step / total
    return {
        "kind": "step",
        "step": step,
        "loss": 2.9 + 4.8 * math.exp(-9 * done) + draw.gauss(0, 0.06),
        "lr": 3e-3 * min(20 * done, 0.1 + 0.45 * (1 + math.cos(math.pi * done))),
        "grad_norm": 0.6 + 3 * math.exp(-15 * done) + abs(draw.gauss(0, 0.1)),
        "tokens": 8192,
        "total_tokens": 8192 * step,
        "tokens_per_second": draw.gauss(12000, 300),
        "mfu": 0.41,
        "memory_mb": 812,
        "skipped": 0,
        "elapsed": 0.68 * step,
    } | changes


def eval_record(step: int, total: int) -> dict[str, Any]:
    loss = 3.0 + 4.8 * math.exp(-9 * step / total)
    return {"kind": "eval", "step": step, "held_out_loss": loss, "held_out_bits_per_byte": loss / 1.5}


def write_run(
    folder: Path,
    total: int,
    eval_every: int = 0,
    changes: Mapping[int, Mapping[str, float]] | None = None,
    summary: Mapping[str, Any] | None = SUMMARY,
    sample: Mapping[str, str] | None = None,
) -> Path:
    """Write the files that a report is made of; ``changes`` puts other figures into the records of some steps."""
    folder.mkdir(parents=True, exist_ok=True)
    log = MetricsLog(folder / "metrics.jsonl")
    for step in range(1, total + 1):
        log.log(step_record(step, total, **(changes or {}).get(step, {})))
        if eval_every and step % eval_every == 0:
            log.log(eval_record(step, total))
    log.close()
    (folder / "job.toml").write_text(dump_toml(Job.model_validate({"name": folder.name, "train": {"steps": total}})))
    for name, content in (("summary", summary), ("sample", sample)):
        if content is not None:
            (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def group_record(step: int, problem: str = "sums/train/0/7/0", token: str = "4") -> dict[str, Any]:
    """A line of ``rollouts.jsonl``: two attempts at a problem, one of them cut off."""
    first = {
        "tokens": ["2", "+", "2", "=", token, "<|endoftext|>"], "sampled": [0, 0, 0, 0, 1, 1],
        "advantage": [None, None, None, None, 1.5, 1.5], "logprob": [None, None, None, None, -0.5, -0.25],
        "difference": [None, None, None, None, 1e-6, -2e-6],
    }  # fmt: skip
    second = first | {"advantage": [None, None, None, None, -0.5, -0.5]}
    attempts = [
        {"reward": 1.0, "reason": "4 is right", "truncated": False, "segments": [first]},
        {"reward": 0.0, "reason": f"{token} is wrong", "truncated": True, "segments": [second]},
    ]
    return {"kind": "group", "step": step, "problem": problem, "task": "sums", "level": 0, "attempts": attempts}


def write_rollouts(folder: Path, groups: Sequence[Mapping[str, Any]]) -> None:
    log = MetricsLog(folder / "rollouts.jsonl")
    for group in groups:
        log.log(group)
    log.close()


def policy_figures(step: int, total: int) -> dict[str, float]:
    """What the record of a step of reinforcement learning has besides."""
    done = step / total
    return {
        "reward": done, "response_tokens": 5 + done, "entropy": 1 - done / 2, "truncated": 0.1, "zero_spread": 0.5,
        "clip_share": 0.0, "logprob_diff_max": 1e-6,
    }  # fmt: skip
