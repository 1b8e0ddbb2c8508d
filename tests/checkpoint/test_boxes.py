import random

import pytest
import torch

from equigrad.checkpoint.boxes import Box, Claim, claims, tile, wholes
from equigrad.parallel.placement import Placed, Placement


def claim(offset, shape, whole=(4, 6)):
    return {"w": Claim("float32", whole, Box(offset, shape))}


def test_boxes_that_tile_are_accepted_and_ranks_without_the_tensor_do_not_matter():
    whole = wholes([claim((0, 0), (4, 1)), {}, claim((0, 1), (1, 5)), claim((1, 1), (3, 5))])["w"]
    assert list(whole.boxes.values()) == [0, 2, 3]


def test_a_box_claimed_twice_belongs_to_the_first_rank():
    assert wholes([claim((0, 0), (4, 6)), claim((0, 0), (4, 6))])["w"].boxes == {Box((0, 0), (4, 6)): 0}


@pytest.mark.parametrize(
    "second",
    [claim((0, 0), (4, 2)), claim((0, 2), (4, 4)), claim((0, 3), (3, 3)), claim((0, 4), (4, 3)), {}],
    ids=["other extent at the same place", "overlap", "gap", "outside", "half is missing"],
)
def test_boxes_that_do_not_tile_are_refused(second):
    with pytest.raises(ValueError, match=r"w \[4, 6\] overlap or leave a gap: \[4, 3\] at \[0, 0\] on rank 0"):
        wholes([claim((0, 0), (4, 3)), second])


def test_an_overlap_does_not_make_up_for_a_gap_of_the_same_size():
    with pytest.raises(ValueError, match="overlap"):
        wholes([claim((0, 0), (4, 2)), claim((0, 1), (4, 2)), claim((0, 4), (4, 2))])


def test_random_tilings_are_accepted_and_refused_once_a_box_moves():
    draw = random.Random(1)

    def split(box, depth):
        dim = draw.randrange(3)
        if not depth or box.shape[dim] < 2:
            return [box]
        cut = draw.randrange(1, box.shape[dim])
        at = list(box.offset)
        at[dim] += cut
        low, high = list(box.shape), list(box.shape)
        low[dim], high[dim] = cut, box.shape[dim] - cut
        return split(Box(box.offset, tuple(low)), depth - 1) + split(Box(tuple(at), tuple(high)), depth - 1)

    for _ in range(30):
        boxes = split(Box((0, 0, 0), (9, 5, 70000)), 5)
        parts = [claim(box.offset, box.shape, (9, 5, 70000)) for box in boxes]
        assert len(wholes(parts)["w"].boxes) == len(boxes)
        moved = boxes[-1]
        parts[-1] = claim((moved.offset[0], moved.offset[1], moved.offset[2] + 1), moved.shape, (9, 5, 70000))
        with pytest.raises(ValueError):
            wholes(parts)


def test_ranks_that_contradict_each_other_are_refused():
    other = {"w": Claim("bfloat16", (4, 6), Box((0, 3), (4, 3)))}
    with pytest.raises(ValueError, match=r"w is bfloat16 \[4, 6\] on rank 1, float32 \[4, 6\] on another"):
        wholes([claim((0, 0), (4, 3)), other])


def test_replicas_and_empty_boxes_claim_nothing():
    copy = Placed(Placement("w", (2,), (0,), (2,), replica=1), torch.zeros(2))
    empty = Placed(Placement("v", (2,), (0,), (0,)), torch.zeros(0))
    assert [claim.box for claim in claims({"w": copy, "v": empty}).values()] == [None, None]


def test_scalars_and_empty_tensors_are_whole():
    found = wholes([{"s": Claim("int64", (), Box((), ())), "e": Claim("int64", (0, 3), None)}])
    assert list(found) == ["e", "s"]
    assert found["e"].boxes == {}


def test_nobody_is_kept_busy_by_boxes_that_no_layout_has() -> None:
    """Strips across, and a row in pieces: as many cells as boxes squared."""
    many = 20_000
    strips = [Box((row, 0), (1, many)) for row in range(1, many)]
    pieces = [Box((0, column), (1, 1)) for column in range(many)]
    assert not tile((many, many), strips + pieces)
    assert tile((6, 4), [Box((0, 0), (3, 4)), Box((3, 0), (3, 1)), Box((3, 1), (3, 3))])  # no grid
