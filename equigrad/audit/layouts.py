"""Layouts in few words, as commands take them. Torch-free."""

import re
from typing import Any, get_args

from pydantic import ValidationError

from equigrad.config.layout import ContextStrategy, Layout
from equigrad.errors import UserError

_DEGREES = {"dp": "dp_shard", "rep": "dp_replicate", "cp": "cp", "tp": "tp", "pp": "pp", "ep": "ep"}
_SCHEDULES = get_args(Layout.model_fields["pp_schedule"].annotation)
_STRATEGIES = get_args(ContextStrategy)


def parse_layout(text: str) -> dict[str, Any]:
    """The keys of a layout from words joined by ``+``: ``dp2`` shards data, ``rep2`` copies the model, ``cp2``,
    ``tp2``, ``pp2``, ``ep2``; a pipeline's schedule, a context strategy; ``one``: one process.

    Experts borrow ranks: where no others are given, ``ep2`` is ``dp2+ep2``. Raises ``UserError``.

    >>> parse_layout("cp2+tp2+ulysses")
    {'cp': 2, 'tp': 2, 'cp_strategy': 'ulysses'}
    """
    layout: dict[str, Any] = {}
    for word in text.split("+") if text != "one" else ():
        key: str | None = None
        value: int | str = word
        if found := re.fullmatch(r"([a-z]+)([1-9]\d*)", word):
            key, value = _DEGREES.get(found[1]), int(found[2])
        elif word in _SCHEDULES:
            key = "pp_schedule"
        elif word in _STRATEGIES:
            key = "cp_strategy"
        if key is None:
            known = ", ".join([*(f"{name}N" for name in _DEGREES), *_SCHEDULES, *_STRATEGIES])
            raise UserError(f"layout {text!r}: {word!r} is none of {known}; several are joined by +, as in dp2+tp2")
        if key in layout:
            raise UserError(f"layout {text!r} says twice what {key} is")
        layout[key] = value
    if layout.get("ep", 1) > 1 and not layout.keys() & {"dp_shard", "cp"}:
        layout["dp_shard"] = layout["ep"]
    if layout.get("pp_schedule") == "interleaved":
        layout["pp_stages"] = 2
    try:
        Layout(**layout)
    except ValidationError as error:
        raise UserError(f"layout {text!r}: {error.errors()[0]['msg']}") from None
    return layout
