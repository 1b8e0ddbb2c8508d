"""Layouts in few words."""

import pytest

from equigrad.audit.layouts import parse_layout
from equigrad.errors import UserError


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("one", {}),
        ("dp2", {"dp_shard": 2}),
        ("rep2+dp4", {"dp_replicate": 2, "dp_shard": 4}),
        ("cp2+ulysses", {"cp": 2, "cp_strategy": "ulysses"}),
        ("ep2", {"ep": 2, "dp_shard": 2}),
        ("cp4+ep2", {"cp": 4, "ep": 2}),
        ("pp2+zero_bubble", {"pp": 2, "pp_schedule": "zero_bubble"}),
        ("pp2+interleaved", {"pp": 2, "pp_schedule": "interleaved", "pp_stages": 2}),
    ],
)
def test_words(text: str, layout: dict[str, object]) -> None:
    assert parse_layout(text) == layout


@pytest.mark.parametrize("text", ["", "dp", "dp0", "tp-2", "zz2", "tp2+tp4", "tp2+", "2tp", "tp2 + cp2"])
def test_others_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="layout"):
        parse_layout(text)
