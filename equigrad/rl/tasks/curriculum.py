"""How hard problems are: levels that follow the rewards. State is JSON data; the order of results changes nothing."""

import math
from collections.abc import Iterable, Mapping
from typing import TypeAlias, TypedDict

from equigrad.config.tasks import Curriculum
from equigrad.rl.tasks.draws import Draw
from equigrad.rl.tasks.protocol import Problem, Split, Verdict


class Standing(TypedDict):
    """Where one task stands. After 3 verdicts at level 1, two of them right: level 1, judged 3, total 2.0."""

    level: int
    judged: int
    """Verdicts on problems of this level since it was entered, or last looked at."""
    total: float
    """Sum of their rewards."""


State: TypeAlias = Mapping[str, Standing]
"""Of each task by name. Part of what a checkpoint keeps."""


def begin(levels: Mapping[str, int], config: Curriculum) -> State:
    """The state before the first step. ``levels``: how many each task has."""
    return {name: Standing(level=min(config.start, n - 1), judged=0, total=0.0) for name, n in levels.items()}


def level_of(draw: Draw, split: Split, standing: Standing, levels: int, config: Curriculum) -> int:
    """The level of a problem: the standing's own, or for review one below it; any, where there is no curriculum."""
    if split == "held_out" or not config.enabled:
        return draw.below(levels)
    at = standing["level"]
    return draw.below(at) if at and draw.chance(config.review) else at


def advance(
    state: State, results: Iterable[tuple[Problem, Verdict]], levels: Mapping[str, int], config: Curriculum
) -> State:
    """The state after a step, from all its results in any order.

    What counts are verdicts on training problems of the level at which their task stands: not failed ones, nor late
    ones from a level before. Rewards count from 0 to 1.
    """
    if not config.enabled:
        return state
    rewards: dict[str, list[float]] = {name: [] for name in state}
    for problem, verdict in results:
        counts = problem.split == "train" and not verdict.failed
        if counts and problem.level == state[problem.task]["level"]:
            rewards[problem.task].append(min(max(verdict.reward, 0.0), 1.0))
    return {name: _moved(state[name], rewards[name], levels[name], config) for name in state}


def _moved(standing: Standing, rewards: list[float], levels: int, config: Curriculum) -> Standing:
    judged = standing["judged"] + len(rewards)
    total = standing["total"] + math.fsum(rewards)  # rounds once, whatever the order
    level = standing["level"]
    if judged < config.window:
        return Standing(level=level, judged=judged, total=total)
    if total / judged >= config.raise_at:
        level += 1
    elif total / judged < config.lower_at:
        level -= 1
    return Standing(level=min(max(level, 0), levels - 1), judged=0, total=0.0)
