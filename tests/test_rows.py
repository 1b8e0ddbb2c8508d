"""A row's tokens and all that goes with them lie on the same ranks."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from equigrad.data.samples import Sample
from equigrad.rows import row_tensors
from tests.jobs import pool_world, tiny_job
from tests.workers import Workers

Token = tuple[int, int, int | None]
"""Id, position in its segment, and label if it is in the loss."""


class _Stream:
    """Samples whose token t has the id 10 t, the label 10 t + 1, and every third is out of the loss."""

    def read(self, ref: Any) -> Any:
        at = np.arange(ref.start, ref.start + ref.length)
        return Sample({"ids": 10 * at, "labels": 10 * at + 1, "loss": at % 3 > 0})


class _Ref:
    def __init__(self, start: int, length: int) -> None:
        self.start, self.length = start, length


def _tokens(lengths: tuple[int, ...], layout: dict[str, Any]) -> list[Token]:
    world = pool_world(tiny_job(**{f"layout__{key}": value for key, value in layout.items()}))
    refs = [_Ref(sum(lengths[:index]), length) for index, length in enumerate(lengths)]
    row = row_tensors(_Stream(), refs, world)  # type: ignore[arg-type]
    assert row.at is not None or not len(row.ids) or len(row.labels) == len(row.ids)
    at = range(len(row.ids)) if row.at is None else row.at.tolist()
    labels = dict(zip(at, row.labels.tolist(), strict=True))
    return [
        (i, p, labels.get(n)) for n, (i, p) in enumerate(zip(row.ids.tolist(), row.row.positions.tolist(), strict=True))
    ]


@pytest.mark.parametrize("lengths", [(3, 10, 17), (1,), (), (9,)])
@pytest.mark.parametrize("zigzag", [False, True])
def test_ids_positions_and_labels_stay_together(
    workers: Callable[[int], Workers], lengths: tuple[int, ...], zigzag: bool
) -> None:
    one = _tokens(lengths, {})
    positions = [position for length in lengths for position in range(length)]
    assert one == [(10 * t, p, 10 * t + 1 if t % 3 else None) for t, p in enumerate(positions)]
    ranks = workers(4).run(_tokens, lengths, {"cp": 4, "cp_zigzag": zigzag})
    assert sorted((token for own in ranks for token in own), key=lambda token: token[0]) == one
    sizes = [len(own) for own in ranks]
    assert max(sizes) - min(sizes) <= 1
    assert zigzag or [token for own in ranks for token in own] == one
