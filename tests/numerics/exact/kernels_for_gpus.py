"""``python -m tests.numerics.exact.kernels_for_gpus``: every kernel compiled for a GPU, which need not be there, and
what is wrong with the instructions; nothing, if they are those that its bits rest on."""

import re
import time
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from equigrad.numerics.exact.kernels import launch
from equigrad.numerics.exact.kernels.table import KERNELS

INEXACT = re.compile(r"\b(fma\.|mad\.\w*\.?f|\w+\.ftz|\w+\.approx|div\.full|sqrt|ex2|lg2|rcp|(?:add|sub|mul)\.f(?:32|64))\S*")
"""Contracted products, or what a later stage may contract: a sum or product that does not say how it is rounded."""


class Absent:
    """Triton's view of a GPU that is not there."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Compiled:
    """Stands in for a kernel: compiles it, and calls nothing."""

    def __init__(self, kernel: Any) -> None:
        self._kernel, self.found = kernel, list[str]()

    def __getitem__(self, grid: Any) -> Any:
        def compile(*args: Any, **kwargs: Any) -> None:
            self.found.append(self._kernel.warmup(*args, grid=grid, **kwargs).asm["ptx"])

        return compile


def calls() -> dict[Any, tuple[Any, ...]]:
    """One for each kernel."""
    return {}


if __name__ == "__main__":
    driver.set_active(Absent())
    launch._kernel = compiled = Compiled(launch._kernel)
