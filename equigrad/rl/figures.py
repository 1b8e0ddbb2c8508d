"""What a step's record says of its rollouts, and what of it makes training meaningless."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from equigrad.rl.attempts import Attempt
from equigrad.rl.rollouts import deviation, mean

NEARLY_ALL = 0.95
"""A share from which on it is told."""
AGAIN = 50
"""Steps in a row after which it is told once more."""


def by_problem(attempts: Sequence[Attempt]) -> dict[str, list[Attempt]]:
    """Attempts that have a verdict, by their problem."""
    found: dict[str, list[Attempt]] = {}
    for attempt in attempts:
        if attempt.verdict is not None and not attempt.verdict.failed:
            found.setdefault(attempt.problem.id, []).append(attempt)
    return found


def has_spread(group: Sequence[Attempt]) -> bool:
    """Whether its rewards differ, so that something can be learned from them."""
    return len({attempt.reward for attempt in group}) > 1


def figures(attempts: Sequence[Attempt], version: int) -> dict[str, float]:
    """
    reward:           the mean of all attempts that have a verdict; ``reward_std``; ``reward/TASK`` where there are
                      several tasks
    response_tokens:  mean number of tokens that the model sampled in an attempt; ``response_tokens_max``
    truncated:        share of attempts whose last turn was cut off
    zero_spread:      share of groups whose rewards are all the same
    failed_verdicts:  attempts of which nothing is known
    dropped_tokens:   sampled with a log-probability that is no number, and in no loss
    entropy:          mean of the distributions that tokens were sampled from, in nats
    staleness:        updates since the weights that sampled a token, the mean over tokens
    """
    groups = by_problem(attempts)
    judged = [attempt for group in groups.values() for attempt in group]
    rewards = [attempt.reward for attempt in judged]
    lengths = [attempt.sampled for attempt in attempts]
    sampled = [
        pair
        for a in attempts
        for text in a.texts
        for pair in zip(text.entropies, text.versions, text.sampled, strict=True)
    ]
    tokens = [(entropy, old) for entropy, old, own in sampled if own]
    found: dict[str, float] = {
        "response_tokens": mean(lengths), "response_tokens_max": max(lengths),
        "truncated": mean([attempt.truncated for attempt in attempts]),
        "failed_verdicts": len(attempts) - len(judged),
        "entropy": mean([entropy for entropy, _ in tokens]) if tokens else math.nan,
        "staleness": mean([version - old for _, old in tokens]) if tokens else 0.0,
    }  # fmt: skip
    if judged:
        found |= {"reward": mean(rewards), "reward_std": deviation(rewards)}
        found["zero_spread"] = mean([not has_spread(group) for group in groups.values()])
    names = {attempt.problem.task for attempt in judged}
    if len(names) > 1:
        for name in sorted(names):
            found[f"reward/{name}"] = mean([a.reward for a in judged if a.problem.task == name])
    return found


class Warnings:
    """What a user must be told at once, and now and then as long as it stays so."""

    def __init__(self) -> None:
        self._steps: dict[str, int] = {}

    def __call__(self, facts: Mapping[str, float]) -> Iterator[str]:
        """Of one step after the other."""
        for kind, text in _warnings(facts).items():
            if facts.get(kind, 0.0) < NEARLY_ALL:
                self._steps[kind] = 0
                continue
            if self._steps.setdefault(kind, 0) % AGAIN == 0:
                yield text
            self._steps[kind] += 1


def _warnings(facts: Mapping[str, float]) -> dict[str, str]:
    return {
        "truncated": f"{facts.get('truncated', 0):.0%} of the answers were cut off at rl.longest or data.context: their"
        " rewards are of unfinished answers. Raise these, or teach the model to end (rl.warmup)",
        "zero_spread": f"in {facts.get('zero_spread', 0):.0%} of the groups all rewards are the same (mean"
        f" {facts.get('reward', 0):.3g}), and teach nothing. Choose easier or harder problems, or imitate solved ones"
        " first (rl.warmup)",
    }


def reasons(attempts: Sequence[Attempt]) -> str:
    """Why verdicts failed, the most frequent first."""
    told = Counter(a.verdict.reason for a in attempts if a.verdict is not None and a.verdict.failed)
    return "; ".join(f"{count} times: {reason}" for reason, count in told.most_common(3))
