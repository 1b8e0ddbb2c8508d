"""Rows cut for their ranks: all of it once, nothing more, and the same after a journey."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equigrad.data.microbatch import INACTIVE, MicroBatch, micro_batch
from equigrad.data.samples import Sample
from equigrad.parallel.partition import Partition


def sample(length: int, seed: int = 0) -> Sample:
    random = np.random.default_rng(seed)
    return Sample(
        {
            "ids": random.integers(0, 1000, length),
            "labels": random.integers(0, 1000, length),
            "loss": random.random(length) < 0.5,
            "advantages": random.random(length).astype(np.float32),
        }
    )


@given(
    st.lists(st.integers(1, 9), max_size=5),
    st.integers(1, 5),
    st.sampled_from([Partition.contiguous, Partition.zigzag]),
)
def test_ranks_together_have_the_row(lengths: list[int], ranks: int, make: object) -> None:
    samples = [sample(n, seed) for seed, n in enumerate(lengths)]
    partition = make(sum(lengths), ranks)  # type: ignore[operator]
    cut = [micro_batch(samples, partition, rank) for rank in range(ranks)]
    assert all(part.lengths == tuple(lengths) for part in cut)
    if not lengths:
        assert all(part.inactive and not part.streams for part in cut)
        return
    for name in samples[0].streams:
        whole = np.concatenate([s.streams[name] for s in samples])
        for part, ranges in zip(cut, partition.ranges, strict=True):
            assert np.array_equal(part.streams[name], np.concatenate([whole[a:b] for a, b in ranges]))
            assert part.streams[name].dtype == whole.dtype


@pytest.mark.parametrize("lengths", [[9], [1], [3, 10, 17]])
def test_the_journey_changes_nothing_and_carries_no_more_than_the_tokens(lengths: list[int]) -> None:
    samples = [sample(n) for n in lengths]
    partition = Partition.contiguous(sum(lengths), 4)
    for rank in range(4):
        sent = micro_batch(samples, partition, rank)
        data = sent.to_bytes()
        got = MicroBatch.from_bytes(data)
        assert got.lengths == sent.lengths
        assert not got.inactive
        assert got.streams.keys() == sent.streams.keys()
        for name, stream in sent.streams.items():
            assert np.array_equal(got.streams[name], stream)
            assert got.streams[name].dtype == stream.dtype
        assert len(data) < 21 * partition.lengths[rank] + 250


def test_an_inactive_micro_batch_carries_a_flag_and_nothing_else() -> None:
    data = INACTIVE.to_bytes()
    assert json.loads(data[8:]) == {"inactive": True}
    assert MicroBatch.from_bytes(data).inactive


@pytest.mark.parametrize("harm", [lambda d: d[:-1], lambda d: d + b"x", lambda d: d[:4], lambda d: b"\xff" * 40])
def test_what_is_not_whole_is_refused(harm: object) -> None:
    data = micro_batch([sample(7)], Partition.contiguous(7, 1), 0).to_bytes()
    with pytest.raises(ValueError):
        MicroBatch.from_bytes(harm(data))  # type: ignore[operator]


def test_samples_with_different_streams_make_no_row() -> None:
    plain = Sample({k: v for k, v in sample(3).streams.items() if k != "advantages"})
    with pytest.raises(ValueError, match="different streams"):
        micro_batch([sample(3), plain], Partition.contiguous(6, 1), 0)
