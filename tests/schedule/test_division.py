"""A division holds every token once, says where each lies, and is what the ranks compute."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equigrad.config import Job
from equigrad.models.specs import token_flops
from equigrad.schedule.division import Division, divide, sample_costs
from tests.jobs import pool_world, refs, tiny_job
from tests.workers import Workers

LENGTHS = [48, 31, 30, 17, 9, 9, 5, 2, 1, 1]


def job(**layout: Any) -> Job:
    return tiny_job(**{f"layout__{key}": value for key, value in layout.items()})


def division(lengths: Sequence[int] = LENGTHS, **layout: Any) -> Division:
    return divide(job(**layout), refs(lengths), 1)


@settings(deadline=None, max_examples=30)
@given(
    lengths=st.lists(st.integers(1, 48), min_size=1, max_size=30),
    lanes=st.integers(1, 5),
    cp=st.integers(1, 5),
    tp=st.integers(1, 2),
    zigzag=st.booleans(),
)
def test_every_token_of_every_sample_is_held_once(
    lengths: list[int], lanes: int, cp: int, tp: int, zigzag: bool
) -> None:
    found = division(lengths, dp_replicate=lanes, cp=cp, tp=tp, cp_zigzag=zigzag)
    held = Counter(
        (piece.sample, token)
        for rows in found.rounds
        for row in rows
        for share in row.shares
        for piece in share.pieces
        for token in range(piece.start, piece.stop)
    )
    assert held == Counter((sample, token) for sample, length in enumerate(lengths) for token in range(length))
    assert found.executed_tokens == found.tokens == sum(lengths)
    for rows in found.rounds:
        assert len(rows) == lanes
        for row in rows:
            sizes = [share.tokens for share in row.shares]
            assert max(sizes) - min(sizes) <= 1
            assert all(sum(share.tensor) == share.tokens for share in row.shares)
    assert found.imbalance >= 1 - 1e-9
    assert found.round_imbalance >= found.imbalance - 1e-9


def held_by(layout: dict[str, Any]) -> tuple[int, list[list[int]], list[int]]:
    """Rank; position of each token that this rank holds, row by row; and how many of them in the residual stream."""
    from equigrad.numerics.row import Row

    world = pool_world(job(**layout))
    found = division(**layout)
    rows = [rows[world.lane] for rows in found.rounds]
    made = [
        Row.of([n for _, n in row.samples], "cpu", world.axis("cp"), world.axis("tp"), zigzag=world.layout.zigzag)
        for row in rows
    ]
    at = (world.axis("pp").rank, world.lane, world.axis("cp").rank, world.axis("tp").rank)
    assert world.layout.rank_of(*at) == world.rank
    return world.rank, [row.positions.tolist() for row in made], [row.residual_tokens for row in made]


@pytest.mark.parametrize(
    "layout",
    [{"dp_shard": 2, "cp": 2}, {"cp": 2, "tp": 2}, {"cp": 4, "cp_zigzag": False}, {"pp": 2, "tp": 2}, {"dp_shard": 4}],
    ids=str,
)
def test_what_is_drawn_is_what_the_ranks_hold(workers: Callable[[int], Workers], layout: dict[str, Any]) -> None:
    found = division(**layout)
    told: dict[int, tuple[list[list[int]], list[int]]] = {}
    for lane in range(found.layout.data_lanes):
        for context in range(found.layout.cp):
            for place, rank in enumerate(found.ranks(lane, context)):
                shares = [rows[lane].shares[context] for rows in found.rounds]
                positions = [[t for p in share.pieces for t in range(p.start, p.stop)] for share in shares]
                told[rank] = positions, [share.tensor[place % found.layout.tp] for share in shares]
    assert {rank: (positions, tokens) for rank, positions, tokens in workers(4).run(held_by, layout)} == told


def test_a_pipeline_is_played_with_the_costliest_row_of_each_round() -> None:
    found = division(pp=2, dp_shard=2)
    assert found.timeline is not None
    forwards = [span for span in found.timeline.spans[0] if str(span.action).startswith("forward")]
    costs = [max(sum(found.costs[i] for i, _ in row.samples) for row in rows) for rows in found.rounds]
    taken = [span.end - span.start for span in forwards]
    assert [time - taken[0] for time in taken] == pytest.approx([(cost - costs[0]) / max(costs) for cost in costs])
    assert 0 < found.bubble < 1
    assert division(dp_shard=2).timeline is None


def test_a_label_out_of_the_loss_does_not_cost_the_head() -> None:
    model, (one, other) = tiny_job().model, refs([40, 40])
    masked, all_ = sample_costs([one._replace(loss_tokens=10), other], model)
    assert all_ - masked == 30 * 6 * model.vocab_size * model.hidden_size
    assert all_ == pytest.approx(40 * token_flops(model)(41 / 2))


def test_a_query_sees_no_more_than_its_window() -> None:
    model = tiny_job(model__sliding_window=8).model
    width = 12 * model.num_hidden_layers * model.num_attention_heads * model.head_size
    for length in (3, 8, 9, 40):
        seen = sum(min(query, 8) for query in range(1, length + 1))
        costs = [sample_costs(refs([length]), of)[0] for of in (model, tiny_job().model)]
        assert costs[1] - costs[0] == pytest.approx(width * (length * (length + 1) / 2 - seen))


def test_imbalance_compares_the_costliest_lane_with_the_mean() -> None:
    assert division([48], dp_shard=4).imbalance == pytest.approx(4)
    assert division([48] * 4, dp_shard=4).imbalance == pytest.approx(1)
    assert division([48], dp_shard=4).empty_rows == 3
