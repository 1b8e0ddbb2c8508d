"""Where workers go: always on free devices, and as each placement promises."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equigrad.plan.cluster.placement import PLACEMENTS, colocate, pack, spread

CLUSTERS = st.lists(
    st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), min_size=1, max_size=6
)
"""Devices of each server, and how many of them are free."""


@given(CLUSTERS, st.integers(1, 30), st.sampled_from(sorted(PLACEMENTS)))
def test_every_worker_gets_a_free_device(cluster: list[tuple[int, int]], workers: int, name: str) -> None:
    devices, free = [n for n, _ in cluster], [n for _, n in cluster]
    placement = PLACEMENTS[name](free, devices, workers)
    if placement is None:
        assert name == "colocate" or sum(free) < workers
        return
    assert sum(n for _, n in placement) == workers
    assert all(0 < n <= free[server] for server, n in placement)
    assert [server for server, _ in placement] == sorted({server for server, _ in placement})


def fewest(room: list[int], workers: int) -> int | None:
    """Servers that are needed, by trying all choices."""
    for count in range(1, len(room) + 1):
        if any(sum(chosen) >= workers for chosen in combinations(room, count)):
            return count
    return None


@given(CLUSTERS, st.integers(1, 30))
def test_packing_uses_as_few_servers_as_there_is_room_for(cluster: list[tuple[int, int]], workers: int) -> None:
    placement = pack([n for _, n in cluster], [n for n, _ in cluster], workers)
    assert (len(placement) if placement else None) == fewest([n for _, n in cluster], workers)


@given(CLUSTERS, st.integers(1, 30))
def test_colocation_waits_until_as_few_servers_do_as_in_an_empty_cluster(
    cluster: list[tuple[int, int]], workers: int
) -> None:
    devices, free = [n for n, _ in cluster], [n for _, n in cluster]
    now, empty = fewest(free, workers), fewest(devices, workers)
    placement = colocate(free, devices, workers)
    assert (placement is not None) == (now is not None and now == empty)
    assert placement in (None, pack(free, devices, workers))


@given(CLUSTERS, st.integers(1, 30))
def test_spreading_uses_as_many_servers_as_have_room_and_evenly(cluster: list[tuple[int, int]], workers: int) -> None:
    free = [n for _, n in cluster]
    placement = spread(free, [n for n, _ in cluster], workers)
    if placement is None:
        return
    assert len(placement) == min(workers, sum(room > 0 for room in free))
    taken = dict(placement)
    assert all(n <= taken.get(other, 0) + 1 or taken.get(other, 0) == room for n in taken.values()
               for other, room in enumerate(free))  # fmt: skip


@pytest.mark.parametrize(
    ("place", "free", "workers", "expected"),
    [
        (pack, [3, 1, 8], 1, ((1, 1),)),  # the fullest that has room
        (pack, [3, 1, 8], 10, ((0, 2), (2, 8))),
        (pack, [3, 3, 3], 4, ((0, 3), (1, 1))),
        (colocate, [3, 3, 3], 4, None),  # fits a server of eight
        (colocate, [8, 3, 8], 12, ((0, 8), (2, 4))),
        (spread, [4, 2, 5], 4, ((0, 1), (1, 1), (2, 2))),
        (spread, [1, 1, 1], 4, None),
    ],
)
def test_placements_by_hand(place, free, workers, expected) -> None:  # type: ignore[no-untyped-def]
    assert place(free, [8, 8, 8], workers) == expected
