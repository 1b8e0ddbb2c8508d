"""Every kernel compiled for a GPU, which need not be there: whether its instructions are those that its bits rest on.
``test_kernels.py`` runs this in a process of its own, where Triton is not told to interpret."""

import re
from typing import Any

import pytest
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from equigrad.numerics.exact.fused import Fused
from equigrad.numerics.exact.kernels import launch
from equigrad.numerics.exact.kernels.table import KERNELS
from tests.numerics.exact.kernel_cases import CASES, Chosen, name

INEXACT = re.compile(
    r"^.*(?:\bfma\.|\bmad\.f|\.ftz|\.approx|div\.full|\bsqrt|\bex2|\blg2|\brcp|\b(?:add|sub|mul|div)\.f(?:32|64)).*$",
    re.MULTILINE,
)
"""Contracted products, approximations, what takes subnormal numbers for zero; and sums, products and quotients that do
not say how they are rounded, which a later stage would be free to contract."""


class Absent:
    """Triton's view of a GPU that is not there."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Compiled:
    """In place of a kernel: compiles it for each call, and computes nothing."""

    def __init__(self, kernel: Any) -> None:
        self._kernel, self.found = kernel, list[Any]()

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: self.found.append(self._kernel.warmup(*args, grid=grid, **kwargs))


@pytest.mark.parametrize("function", CASES, ids=name)
def test_it_is_compiled_to_instructions_that_round_as_it_is_written(
    function: Fused[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.set_active(Absent())  # type: ignore[arg-type]
    compiled = Compiled(launch._kernel)
    monkeypatch.setattr(launch, "_kernel", compiled)
    KERNELS[function](*CASES[function](Chosen()))
    assert compiled.found
    for kernel in compiled.found:
        assert re.search(r"\.f64", kernel.asm["ptx"])
        assert INEXACT.findall(kernel.asm["ptx"]) == []
        assert kernel.metadata.enable_fp_fusion is False  # what the assembler is told
