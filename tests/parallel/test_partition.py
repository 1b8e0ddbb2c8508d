"""Every token on one rank, as even as whole tokens go."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equigrad.parallel.partition import Partition, even, part_of, segments_within

TOTALS, RANKS = st.integers(0, 200), st.integers(1, 9)


def test_worked_examples() -> None:
    assert even(9, 4) == (3, 2, 2, 2)
    assert even(1, 4) == (1, 0, 0, 0)
    assert Partition.contiguous(9, 4).ranges == (((0, 3),), ((3, 5),), ((5, 7),), ((7, 9),))
    assert Partition.zigzag(9, 2).ranges == (((0, 3), (7, 9)), ((3, 5), (5, 7)))


@given(TOTALS, RANKS)
def test_part_of_is_even(total: int, parts: int) -> None:
    ranges = [part_of(total, parts, part) for part in range(parts)]
    assert tuple(stop - start for start, stop in ranges) == even(total, parts)
    assert [start for start, _ in ranges] + [total] == [0] + [stop for _, stop in ranges]


@given(TOTALS, RANKS, st.sampled_from([Partition.contiguous, Partition.zigzag]))
def test_every_token_is_on_one_rank_and_ranks_differ_by_at_most_one(total: int, ranks: int, make: object) -> None:
    partition = make(total, ranks)  # type: ignore[operator]
    tokens = [t for own in partition.ranges for start, stop in own for t in range(start, stop)]
    assert sorted(tokens) == list(range(total))
    assert partition.total == total
    assert max(partition.lengths) - min(partition.lengths) <= 1
    assert [t for _, (start, stop) in partition.order for t in range(start, stop)] == list(range(total))
    assert partition.in_rank_order == (tokens == sorted(tokens))


@pytest.mark.parametrize("total", [64, 640, 1000])
def test_zigzag_evens_out_what_causal_attention_costs(total: int) -> None:
    def cost(partition: Partition) -> list[int]:
        return [sum(t + 1 for start, stop in own for t in range(start, stop)) for own in partition.ranges]

    even_out, plain = cost(Partition.zigzag(total, 4)), cost(Partition.contiguous(total, 4))
    assert max(even_out) <= 1.05 * min(even_out)
    assert max(plain) > 5 * min(plain)


@given(st.lists(st.integers(0, 6), max_size=6), st.integers(0, 30), st.integers(0, 30))
def test_segments_within_are_the_segments_cut_to_the_range(lengths: list[int], start: int, stop: int) -> None:
    segment = [number for number, length in enumerate(lengths) for _ in range(length)]
    found = segments_within(lengths, start, stop)
    assert [t for low, high in found for t in range(low, high)] == list(
        range(min(start, len(segment)), min(stop, len(segment)))
    ) or start >= stop
    for low, high in found:
        assert len(set(segment[low:high])) == 1
    assert len({segment[low] for low, _ in found}) == len(found)
