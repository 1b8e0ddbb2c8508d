"""Layouts for the tests that promise the same answer on all of them: the full product, and a choice of it in which any
two settings that can meet do meet."""

from itertools import combinations, product
from typing import Any

Layout = dict[str, Any]
Pair = tuple[tuple[int, Any], ...]

RANKS = 8
MODELS = ("dense", "experts")
DATA = ({}, {"dp_shard": 2}, {"dp_replicate": 2}, {"dp_replicate": 2, "dp_shard": 2})
CONTEXT = (
    {},
    {"cp": 2, "cp_zigzag": False},
    {"cp": 2},
    {"cp": 2, "cp_strategy": "ulysses"},
    {"cp": 3, "cp_strategy": "ulysses", "cp_zigzag": True},
)
TENSOR = ({}, {"tp": 2})
PIPELINE = (
    {},
    {"pp": 2, "pp_schedule": "gpipe"},
    {"pp": 2, "pp_schedule": "1f1b"},
    {"pp": 2, "pp_stages": 2, "pp_schedule": "interleaved"},
    {"pp": 2, "pp_schedule": "zero_bubble"},
)
EXPERT = ({}, {"ep": 2}, {"ep": 4})
SETTINGS = (MODELS, DATA, CONTEXT, TENSOR, PIPELINE, EXPERT)


def full_product() -> list[tuple[str, Layout]]:
    """Every combination of settings on up to ``RANKS`` ranks, as (model, layout)."""
    return [_layout(choice) for choice in _choices()]


def pairwise() -> list[tuple[str, Layout]]:
    """Few of them: each two settings that stand together in the product stand together in one of these."""
    choices = _choices()
    pairs = {choice: set(combinations(enumerate(choice), 2)) for choice in choices}
    missing, chosen = set[Pair]().union(*pairs.values()), []
    while missing:
        best = max(choices, key=lambda choice: (len(pairs[choice] & missing), -_ranks(_layout(choice)[1])))
        chosen.append(best)
        missing -= pairs[best]
    return [_layout(choice) for choice in chosen]


def _choices() -> list[tuple[int, ...]]:
    """Combinations that make sense, as indices into the settings."""
    every = product(*(range(len(setting)) for setting in SETTINGS))
    return [choice for choice in every if _fits(*_layout(choice))]


def _layout(choice: tuple[int, ...]) -> tuple[str, Layout]:
    model, *parts = (setting[index] for setting, index in zip(SETTINGS, choice, strict=True))
    return str(model), {key: value for part in parts for key, value in dict(part).items()}


def _ranks(layout: Layout) -> int:
    ranks = 1
    for degree in ("dp_replicate", "dp_shard", "cp", "tp", "pp"):
        ranks *= layout.get(degree, 1)
    return ranks


def _fits(model: str, layout: Layout) -> bool:
    experts = layout.get("ep", 1)
    borrowed = layout.get("dp_shard", 1) * layout.get("cp", 1) % experts == 0 and (experts == 1 or model == "experts")
    return 1 < _ranks(layout) <= RANKS and borrowed
