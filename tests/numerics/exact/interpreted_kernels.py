"""Every kernel against the function that it stands for, bit for bit, in Triton's interpreter. ``test_kernels.py`` runs
this in a process of its own, for Triton reads TRITON_INTERPRET when it is imported."""

import math
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from equigrad.numerics.exact.fused import Fused, run_fused
from equigrad.numerics.exact.kernels import launch
from equigrad.numerics.exact.kernels.table import KERNELS
from tests.numerics.exact.kernel_cases import CASES, Drawn, name


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> Iterator[None]:
    run_fused("triton")
    yield
    run_fused("plain")


def test_every_kernel_has_a_case() -> None:
    assert set(CASES) == set(KERNELS)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, about what is not finite
@pytest.mark.parametrize("function", CASES, ids=name)
# Smaller cases of a failure would take the interpreter long to find.
@hypothesis.settings(max_examples=10, deadline=None, derandomize=True, phases=[hypothesis.Phase.generate])
@hypothesis.given(data=st.data())
def test_it_gives_the_bits_of_the_plain_function(function: Fused[Any, Any], data: st.DataObject) -> None:
    d = Drawn(data)
    launch.ELEMENTS, launch.ACROSS = d.one((1024, 16), (64, 4), (16, 4))
    args = CASES[function](d)
    found, expected = function(*args), function.plain(*args)
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, expected)), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert torch.equal(bits(a), bits(b)), (a, b)


def bits(x: Tensor) -> Tensor:
    """Any NaN is as good as another."""
    x = torch.where(x.isnan(), math.nan, x).contiguous()
    return x.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[x.itemsize])
