"""Layouts in a word, as one types them: ``dp2+tp2``, ``pp2+zero_bubble``. Torch-free; knows no model."""

import re
from typing import Any

from equigrad.errors import UserError

_DEGREES = {"dp": "dp_shard", "rep": "dp_replicate", "cp": "cp", "tp": "tp", "pp": "pp", "ep": "ep"}
_CHOICES: dict[str, dict[str, Any]] = {
    **{name: {"pp_schedule": name} for name in ("gpipe", "1f1b", "zero_bubble")},
    "interleaved": {"pp_schedule": "interleaved", "pp_stages": 2},
    **{name: {"cp_strategy": name} for name in ("ring", "ulysses")},
}


def parse_layout(spec: str) -> dict[str, Any]:
    """The keys of ``layout`` that a word stands for; ``one`` is a single process.

    ``dp2+cp2`` is ``{"dp_shard": 2, "cp": 2}``. Experts borrow ranks, so ``ep2`` alone is ``dp2+ep2``. Raises
    ``UserError`` for anything else.
    """
    keys: dict[str, Any] = {}
    for word in [] if spec == "one" else spec.split("+"):
        degree = re.fullmatch(r"([a-z]+)([1-9]\d{0,4})", word)
        if degree and degree[1] in _DEGREES:
            found = {_DEGREES[degree[1]]: int(degree[2])}
        elif word in _CHOICES:
            found = _CHOICES[word]
        else:
            words = [f"{name}2" for name in _DEGREES] + list(_CHOICES)
            raise UserError(f"layout {spec!r}: {word!r} is none of {', '.join(words)} (joined by +), nor 'one'")
        if twice := keys.keys() & found.keys():
            raise UserError(f"layout {spec!r} gives {', '.join(sorted(twice))} twice")
        keys |= found
    if "ep" in keys and not keys.keys() & {"dp_shard", "cp"}:
        keys["dp_shard"] = keys["ep"]
    return keys
