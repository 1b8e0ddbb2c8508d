"""Mixing: each task its share, its own problems numbered without gaps, any place looked up alone."""

import pytest

from equigrad.rl.tasks.mixture import BLOCK, Mixture


@pytest.mark.parametrize("weights", [[1.0], [3.0, 1.0], [1.0, 1.0, 1.0], [1e9, 1e-9], [0.1] * 7, [5.0, 2.5, 2.5]])
def test_a_tasks_problems_are_numbered_without_gaps_and_it_gets_its_share(weights: list[float]) -> None:
    mixture = Mixture(weights, seed=3)
    places = [mixture.at(index) for index in range(2 * BLOCK)]
    for task, weight in enumerate(weights):
        own = [inner for found, inner in places if found == task]
        assert own == list(range(len(own)))
        assert abs(len(own) / 2 - weight / sum(weights) * BLOCK) < len(weights)
        assert own


def test_tasks_alternate_and_another_seed_has_another_order() -> None:
    first, other = Mixture([1.0, 1.0], 0), Mixture([1.0, 1.0], 1)
    tasks = [first.at(index)[0] for index in range(100)]
    assert 30 < sum(tasks) < 70
    assert tasks != [other.at(index)[0] for index in range(100)]
    assert tasks != [first.at(BLOCK + index)[0] for index in range(100)]
