"""Attempts as people look at them: text, rewards and, token by token, what the step made of it. The lines of
``rollouts.jsonl``, of which the report makes a browser."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from equigrad.data.tokenizers import Tokenizer
from equigrad.rl.attempts import Attempt
from equigrad.rl.rollouts import Rollout

PerToken = Sequence[Sequence[np.ndarray]]
"""Of each segment of each rollout, a number for each token but the first."""


def records(
    step: int,
    attempts: Mapping[str, Attempt],
    rollouts: Sequence[Rollout],
    advantages: PerToken,
    trained: PerToken,
    tokenizer: Tokenizer,
) -> list[dict[str, Any]]:
    """A record for each group. ``attempts``: by the ids of rollouts; ``trained``: log-probabilities that the trainer
    gives."""
    found: dict[str, dict[str, Any]] = {}
    for rollout, advantage, logprobs in zip(rollouts, advantages, trained, strict=True):
        attempt = attempts[rollout.id]
        problem, verdict = attempt.problem, attempt.verdict
        group = found.setdefault(
            problem.id,
            {"kind": "group", "step": step, "problem": problem.id, "task": problem.task, "level": problem.level,
             "attempts": []},
        )  # fmt: skip
        segments = [
            {
                "tokens": [tokenizer.token_text(token) for token in segment.ids[1:].tolist()],
                "sampled": segment.sampled.astype(int).tolist(),
                "advantage": _rounded(own, segment.learned),
                "logprob": _rounded(segment.logprob, segment.learned),
                "difference": _rounded(np.subtract(segment.logprob, theirs, dtype=np.float64), segment.learned),
            }
            for segment, own, theirs in zip(rollout.segments, advantage, logprobs, strict=True)
        ]
        group["attempts"].append(
            {"reward": attempt.reward, "reason": verdict.reason if verdict else "", "truncated": attempt.truncated,
             "segments": segments}
        )  # fmt: skip
    return list(found.values())


def _rounded(values: np.ndarray, where: np.ndarray) -> list[float | None]:
    return [float(f"{x:.4g}") if counts else None for x, counts in zip(values.tolist(), where.tolist(), strict=True)]
