"""Which of several tasks a problem comes from. In every block of places each task has its share, in any order.

So a task's own problems are numbered without gaps, and a file of prompts is gone through record by record, though any
place can be looked up alone.
"""

from collections.abc import Sequence

import numpy as np

from equigrad.data.shuffle import Permutation

BLOCK = 1000
"""Places in which shares hold exactly, to one place; every task has at least one of them."""


class Mixture:
    """``Mixture([3, 1], seed).at(i)``: three places in four belong to task 0."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        self._seed = seed
        self._shares = [1] * len(weights)
        for _ in range(BLOCK - len(weights)):
            short = [weight / sum(weights) * BLOCK - n for weight, n in zip(weights, self._shares, strict=True)]
            self._shares[short.index(max(short))] += 1
        self._tasks = np.repeat(np.arange(len(weights)), self._shares)
        self._last = -1, self._tasks  # a block, and the tasks of its places

    def at(self, index: int) -> tuple[int, int]:
        """The task at a place, and how many places before belong to it."""
        if len(self._shares) == 1:
            return 0, index
        block, place = divmod(index, BLOCK)
        known, order = self._last
        if known != block:
            order = self._tasks[Permutation(BLOCK, self._seed, block)(np.arange(BLOCK))]
            self._last = block, order
        task = int(order[place])
        return task, block * self._shares[task] + int(np.count_nonzero(order[:place] == task))
