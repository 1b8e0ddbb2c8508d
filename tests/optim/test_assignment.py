"""Who works on which matrix: every matrix once, work even, experts at home, ranks agreed on every message."""

import sys
from collections import Counter
from collections.abc import Sequence
from itertools import product
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equigrad.optim import assignment, division
from equigrad.optim.assignment import Assignment, Part, Traffic
from equigrad.optim.division import Division, Outline
from equigrad.parallel.placement import Placement, whole

HIDDEN, INNER = 2048, 768


def assigned(everyone: Sequence[dict[str, Placement]]) -> Assignment:
    return Assignment(Division(everyone[0], [Outline.of(places) for places in everyone]))


def sharded(shapes: dict[str, tuple[int, ...]], ranks: int, copies: int = 1) -> list[dict[str, Placement]]:
    """Cut along the first dimension over ``ranks``, the whole of it ``copies`` times."""
    return [
        {name: whole(name, s, copy).part(0, s[0], ranks, rank) for name, s in shapes.items()}
        for copy, rank in product(range(copies), range(ranks))
    ]


@st.composite
def placements(draw: st.DrawFn) -> list[dict[str, Placement]]:
    sizes = st.integers(1, 9)
    matrices = st.tuples(sizes, sizes)
    stacks = st.tuples(st.integers(1, 12), sizes, sizes)
    shapes = draw(st.dictionaries(st.sampled_from("abcdef"), st.one_of(matrices, stacks), min_size=1))
    return sharded(shapes, draw(st.integers(1, 5)), draw(st.integers(1, 2)))


@given(placements())
@settings(deadline=None, max_examples=60)
def test_each_matrix_is_worked_on_once_and_each_entry_comes_from_one_and_goes_to_all(
    everyone: list[dict[str, Placement]],
) -> None:
    found = assigned(everyone)
    assert sorted(number for wave in found.waves for number in wave) == list(range(len(found.matrices)))
    ranks = range(len(everyone))
    of_ranks = [found.of(rank) for rank in ranks]
    arrived, returned = Counter[int](), Counter[tuple[int, str]]()
    for waves in zip(*of_ranks, strict=True):
        for there in (True, False):
            ways: list[Traffic] = [wave.there if there else wave.back for wave in waves]
            assert len({way.busy for way in ways}) == 1
            assert ways[0].busy == any(any(way.sent) for way in ways)
            for a, b in product(ranks, ranks):
                sizes = [[size(part) for part in parts] for parts in (ways[a].sent[b], ways[b].taken[a])]
                assert sizes[0] == sizes[1]  # both mean the same message
            for rank, way in enumerate(ways):
                for part in (*way.stay, *(part for parts in way.taken for part in parts)):
                    (arrived if there else returned)[rank if there else (rank, part.name)] += size(part)
        for rank, wave in enumerate(waves):
            assert sum(k * m * n for k, m, n in wave.stacks) == arrived.pop(rank, 0)
    held = {(rank, n): at.numel for rank, of in enumerate(everyone) for n, at in of.items() if at.numel}
    assert dict(returned) == held
    for waves in of_ranks:
        assert sorted(n for wave in waves for n in wave.first) == sorted(n for w in waves for n in w.last)
    loads = [sum(m.cost for m, o in zip(found.matrices, found.owners, strict=True) if o == rank) for rank in ranks]
    assert max(loads) <= sum(loads) / len(loads) + max(matrix.cost for matrix in found.matrices)


def size(part: Part) -> int:
    """Entries."""
    rows, columns = part.rows.stop - part.rows.start, part.columns.stop - part.columns.start
    return (part.held.stop - part.held.start) * rows * columns


@given(placements())
@settings(deadline=None, max_examples=60)
def test_owners_are_those_of_the_rule_read_word_by_word(everyone: list[dict[str, Placement]]) -> None:
    """Every rank is looked at for every matrix."""
    found, ranks = assigned(everyone), range(len(everyone))
    total, loads, owners = sum(matrix.cost for matrix in found.matrices), [0 for _ in ranks], dict[int, int]()
    costliest = sorted(range(len(found.matrices)), key=lambda number: (-found.matrices[number].cost, number))
    for whole_ones, number in product((True, False), costliest):
        if number in owners:
            continue
        matrix, has = found.matrices[number], [0 for _ in ranks]
        for rank in ranks:
            at = everyone[rank][matrix.name]
            if len(at.shape) == 2 or at.offset[0] <= matrix.member < at.offset[0] + at.local_shape[0]:
                has[rank] = at.local_shape[-2] * at.local_shape[-1]
        able = [rank for rank in ranks if has[rank] == matrix.numel or not whole_ones]
        room = [rank for rank in able if loads[rank] + matrix.cost <= total / len(ranks)]
        if room:
            owners[number] = min(room, key=lambda rank: (-has[rank], loads[rank], rank))
        elif not whole_ones:
            owners[number] = min(able, key=lambda rank: (loads[rank], -has[rank], rank))
        if number in owners:
            loads[owners[number]] += matrix.cost
    assert found.owners == [owners[number] for number in range(len(found.matrices))]


def instructions(ranks: int, layers: int) -> int:
    """Of Python's, that one rank takes to plan what is dense and what is experts', once all are told."""
    shapes = {f"{layer}.{name}": shape for layer in range(layers) for name, shape in SHAPES.items()}
    everyone = sharded(shapes, ranks // 2, 2)
    outlines, counted, before = [Outline.of(places) for places in everyone], 0, sys.gettrace()

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal counted
        if frame.f_code.co_filename not in (assignment.__file__, division.__file__):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        counted += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        Assignment(Division(shapes, outlines)).of(1)
    finally:
        sys.settrace(before)
    return counted


SHAPES = {"q": (64, 64), "k": (16, 64), "up": (96, 64), "down": (64, 96), "experts": (8, 16, 64)}


def test_twice_the_matrices_on_twice_the_ranks_take_twice_the_work_of_a_plan_and_not_four_times() -> None:
    assert instructions(128, 32) < 2 * instructions(64, 16)


def test_experts_stay_at_home_though_others_are_costlier_and_travel_as_stacks() -> None:
    """Thirty-two ranks with four experts each, and dense matrices of which everyone has some rows."""
    experts = {f"{layer}.experts": (128, INNER, HIDDEN) for layer in range(4)}
    dense = {f"{layer}.dense": (4 * HIDDEN, HIDDEN) for layer in range(8)}
    everyone = sharded(experts | dense, 32)
    found = assigned(everyone)
    for matrix, owner in zip(found.matrices, found.owners, strict=True):
        if matrix.name in experts:
            assert matrix.member in range(owner * 4, owner * 4 + 4)
    for wave in found.of(5):
        moved = [
            part for way in (wave.there, wave.back) for of in (way.sent, way.taken) for parts in of for part in parts
        ]
        assert not any(part.name in experts for part in moved)
        stays = [part.name for part in wave.there.stay if part.name in experts]
        assert len(stays) == len(set(stays))


def test_a_large_model_is_planned_in_moments_and_its_messages_are_few() -> None:
    """16,384 matrices of experts on 64 ranks, cut so that nobody has one whole: the plan of a rank names runs."""
    experts = {f"{layer}.experts": (256, 32, 64) for layer in range(64)}
    everyone = [
        {n: whole(n, s).part(1, s[1], 4, rank % 4).part(0, s[0], 16, rank // 4) for n, s in experts.items()}
        for rank in range(64)
    ]
    found = assigned(everyone)
    counts = Counter(found.owners)
    assert max(counts.values()) == min(counts.values()) == 256
    for number, owner in enumerate(found.owners):
        assert owner // 4 == found.matrices[number].member // 16  # among those that have a part of it
    moved = [part for wave in found.of(7) for parts in wave.there.taken for part in parts]
    assert sum(size(part) for part in moved) == 256 * 32 * 64 * 3 // 4


def test_what_ranks_tell_each_other_grows_with_kinds_of_parameters_and_hardly_with_their_number() -> None:
    everyone = sharded({f"{layer}.{name}": shape for layer in range(50) for name, shape in SHAPES.items()}, 3)
    for places in everyone:
        told = Outline.of(places)
        assert len(told.boxes) == len(SHAPES)
        assert [told.boxes[number].local_shape for number in told.numbers] == [
            places[name].local_shape for name in sorted(places)
        ]


def test_boxes_that_leave_a_gap_or_overlap_are_refused() -> None:
    rows = [Placement("w", (4, 3), (start, 0), (2, 3)) for start in (0, 1, 2)]
    assigned([{"w": rows[0]}, {"w": rows[2]}, {"w": rows[0]}])
    for wrong in ([rows[0], rows[0]], [rows[0], rows[1], rows[2]], [rows[0], whole("w", (4, 3))]):
        with pytest.raises(ValueError, match="boxes of w overlap or leave a gap"):
            assigned([{"w": at} for at in wrong])


def test_ranks_that_tell_of_other_parameters_are_refused() -> None:
    one, other, both = (sharded(shapes, 2) for shapes in ({"a": (4, 3)}, {"a": (3, 4)}, {"a": (4, 3), "b": (4, 3)}))
    for first, second in ((one, other), (one, both)):
        with pytest.raises(ValueError, match=r"same parameters|zip\(\)"):
            assigned([first[0], second[1]])


def test_waves_have_no_more_than_memory_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assignment, "WAVE_ENTRIES", 1000)
    shapes = {f"{n}": (10, 10 + n % 3) for n in range(60)}
    for ranks in (1, 3):
        found = assigned(sharded(shapes, ranks))
        for rank in range(ranks):
            waves = found.of(rank)
            assert len(waves) >= 60 * 110 // ranks // 1000
            assert max(sum(k * m * n for k, m, n in wave.stacks) for wave in waves) <= 1000 + 120
