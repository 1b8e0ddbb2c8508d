"""The shuffle is a bijection for every size, the same everywhere, and looks uniform."""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from equigrad.data.shuffle import Permutation


@given(n=st.integers(1, 3000), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_every_number_appears_exactly_once(n: int, seed: int, epoch: int) -> None:
    shuffled = Permutation(n, seed, 0, epoch)(np.arange(n))
    assert np.array_equal(np.sort(shuffled), np.arange(n))


@given(n=st.integers(1, 2**62), data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_part_can_be_drawn_alone(n: int, data: st.DataObject) -> None:
    places = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20, unique=True)))
    permutation = Permutation(n, 7)
    whole = permutation(places)
    assert len(set(whole.tolist())) == len(places)
    assert whole.min() >= 0
    assert whole.max() < n
    assert all(permutation(places[i : i + 1])[0] == whole[i] for i in range(len(places)))


def test_the_order_is_the_same_on_every_machine() -> None:
    assert Permutation(10, 0, 0, 0)(np.arange(10)).tolist() == [8, 1, 4, 6, 2, 3, 9, 5, 0, 7]
    assert Permutation(10**12, 1, 2, 3)(np.array([0, 1, 10**12 - 1])).tolist() == [
        412147745199,
        249721631443,
        464771806468,
    ]


def test_seed_source_and_epoch_each_change_the_order() -> None:
    orders = [Permutation(100, *key)(np.arange(100)).tolist() for key in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])


def test_all_orders_of_three_are_about_equally_likely() -> None:
    counts = Counter(tuple(Permutation(3, seed)(np.arange(3))) for seed in range(3000))
    assert len(counts) == 6
    # 500 expected, standard deviation 20.
    assert all(400 < count < 600 for count in counts.values())


def test_neighbours_are_scattered() -> None:
    steps = np.diff(Permutation(10_000, 5)(np.arange(10_000)))
    # For a uniform permutation the mean distance of neighbours is n / 3, and a neighbour stays one in 2 of 10,000.
    assert abs(np.abs(steps).mean() - 10_000 / 3) < 100
    assert (np.abs(steps) == 1).sum() < 12
