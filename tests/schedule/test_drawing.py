"""Drawings of a division: complete where that is readable, and the same on every call."""

import re
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest

from equigrad.schedule.division import divide
from equigrad.schedule.svg import draw_svg
from equigrad.schedule.text import ASCII, draw_text, rank_text
from tests.jobs import refs
from tests.schedule.test_division import division, job

LAYOUTS: list[dict[str, Any]] = [
    {},
    {"dp_shard": 2, "cp": 2, "pp": 2},
    {"dp_shard": 3, "tp": 2},
    {"dp_shard": 2, "cp": 3, "cp_zigzag": False},
    {"pp": 2, "pp_schedule": "zero_bubble"},
]
LARGE: list[dict[str, Any]] = [
    {"dp_shard": 64},
    {"dp_shard": 8, "cp": 4, "pp": 2},
    {"cp": 64},
    {"dp_replicate": 32, "tp": 2},
]
NAMES = re.compile(r"#(\d+)")


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_small_drawing_names_every_sample_and_every_rank(layout: dict[str, Any]) -> None:
    found = division(**layout)
    text = draw_text(found, 160)
    assert {int(name) for name in NAMES.findall(text)} == set(range(len(found.samples)))
    for lane in range(found.layout.data_lanes):
        assert rank_text(found.ranks(lane)) in text
    assert f"real tokens {found.tokens}" in text
    assert f"executed tokens {found.tokens}" in text
    assert text.count("empty  rank") == found.empty_rows
    assert ("bubble" in text) == (found.layout.pp > 1)


@pytest.mark.parametrize("layout", LAYOUTS + LARGE, ids=str)
@pytest.mark.parametrize("width", [60, 120])
def test_text_fits_the_terminal_and_a_page_or_two(layout: dict[str, Any], width: int) -> None:
    text = draw_text(division([48, 31, 30, 17, 9] * 40, **layout), width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) <= 100
    assert text.translate(ASCII).isascii()


def test_rounds_tell_their_modality_where_there_are_several() -> None:
    given = [ref._replace(modality="image" if number % 3 else "text") for number, ref in enumerate(refs([48] * 12))]
    found = divide(job(dp_shard=2), given, 1)
    text = draw_text(found, 120)
    assert "12 samples of 2 modalities, " in text
    assert [line for line in text.splitlines() if line.startswith("round")] == [
        "round 0 · image", "round 1 · image", "round 2 · text",
    ]  # fmt: skip
    assert "round 0 · image" in draw_svg(found)
    assert "text" not in draw_text(division(dp_shard=2), 120)


def test_what_is_left_out_is_counted() -> None:
    text = draw_text(division([48] * 640, dp_shard=64), 120)
    assert "… lanes 6-62: 57 rows of 96 to 96 tokens" in text
    assert "… rounds" in text


@pytest.mark.parametrize("layout", LAYOUTS + LARGE, ids=str)
def test_an_svg_is_one_file_that_stands_alone(layout: dict[str, Any]) -> None:
    found = division([48, 31, 30, 17, 9] * 8, **layout)
    drawn = draw_svg(found)
    root = ElementTree.fromstring(drawn)
    assert drawn == draw_svg(found)
    assert drawn.replace('xmlns="http://www.w3.org/2000/svg"', "").count("http") == 0
    assert not {"script", "image", "use", "foreignObject"} & {node.tag.rpartition("}")[2] for node in root.iter()}
    assert "prefers-color-scheme: dark" in drawn
    width, height = (float(root.get(name, "0")) for name in ("width", "height"))
    assert height <= 1400
    for node in root.iter("{http://www.w3.org/2000/svg}rect"):
        x, y, w, h = (float(node.get(name, "0")) for name in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= width
        assert 0 <= y <= y + h <= height


def test_a_name_cannot_break_the_file() -> None:

    ElementTree.fromstring(draw_svg(replace(division(), name="a<b & c>")))


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([0, 1, 2], "ranks 0-2"), ([0, 2, 4, 6, 8], "ranks 0, 2, 4, …, 8"), ([1, 2, 5], "ranks 1-2, 5")],
)
def test_ranks_are_told_as_ranges(ranks: list[int], text: str) -> None:
    assert rank_text(ranks) == text
