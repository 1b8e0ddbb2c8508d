"""Layouts in a word."""

from typing import Any

import pytest

from equigrad.audit.layouts import parse_layout
from equigrad.errors import UserError


@pytest.mark.parametrize(
    ("spec", "keys"),
    [
        ("one", {}),
        ("dp2+cp2", {"dp_shard": 2, "cp": 2}),
        ("rep2", {"dp_replicate": 2}),
        ("tp2", {"tp": 2}),
        ("ep2", {"dp_shard": 2, "ep": 2}),
        ("cp2+ep2", {"cp": 2, "ep": 2}),
        ("dp4+ep2", {"dp_shard": 4, "ep": 2}),
        ("pp2+zero_bubble", {"pp": 2, "pp_schedule": "zero_bubble"}),
        ("pp2+interleaved", {"pp": 2, "pp_schedule": "interleaved", "pp_stages": 2}),
        ("cp2+ulysses", {"cp": 2, "cp_strategy": "ulysses"}),
    ],
)
def test_words(spec: str, keys: dict[str, Any]) -> None:
    assert parse_layout(spec) == keys


@pytest.mark.parametrize("spec", ["", "dp", "dp0", "xp2", "dp2+", "dp2+dp4", "one+tp2", "DP2", "dp2 tp2", "1f1b+gpipe"])
def test_anything_else_is_refused(spec: str) -> None:
    with pytest.raises(UserError, match="layout"):
        parse_layout(spec)
