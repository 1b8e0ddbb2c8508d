"""Samples: one invariant guards every stream."""

import numpy as np
import pytest

from equigrad.data.samples import Sample, SampleRef


def test_a_stream_of_another_length_is_refused_by_name() -> None:
    streams = {"ids": np.arange(3), "labels": np.arange(3), "loss": np.ones(3, bool)}
    assert len(Sample(streams)) == 3
    with pytest.raises(ValueError, match="advantages"):
        Sample(streams | {"advantages": np.zeros(2)})
    with pytest.raises(ValueError, match="share one length"):
        Sample(streams | {"advantages": np.zeros((3, 1))})


def test_refs_are_small_values_that_compare_and_hash() -> None:
    ref = SampleRef(source=0, document=7, span=1, length=2, loss_tokens=2)
    assert {ref: "x"}[SampleRef(0, 7, 1, 2, 2)] == "x"
    assert not hasattr(ref, "__dict__")
