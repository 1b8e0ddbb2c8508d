"""Elementwise work as one pass over memory: compiled on CPUs where a compiler is present, by kernels on GPUs.

What is marked ``fused`` is a function of tensors that gives the same bits whichever way it is run: every element is
computed by IEEE operations alone, or by reductions that have no order. So the way is a question of speed only, and one
of the whole process.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Generic, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")
Way = Literal["plain", "compiled", "triton"]

_way: Way = "plain"
_VARIANTS = 64
"""A function is compiled anew for other types, for other strides, and where a size is one or divides another."""


def run_fused(way: Way) -> None:
    """How ``fused`` functions are run from now on.

    plain:    as they are written
    compiled: by ``torch.compile``, for the CPU; needs a C++ compiler. Not for GPUs, for which a compiler contracts
              products into sums
    triton:   by the kernels of ``exact.kernels``, those that have one, for CUDA; needs Triton
    """
    global _way
    _way = way
    if way == "compiled":
        from torch._inductor import config

        # What environment variables may have switched on would change bits.
        config.cpp.enable_floating_point_contract_flag = "off"
        config.cpp.enable_unsafe_math_opt_flag = False
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _VARIANTS)
        torch._dynamo.config.accumulated_recompile_limit = max(
            torch._dynamo.config.accumulated_recompile_limit, 64 * _VARIANTS
        )
    if way == "triton":
        from equigrad.numerics.exact.kernels.table import KERNELS

        for function, kernel in KERNELS.items():
            function.kernel = kernel


def one_pass(device: torch.device) -> Way:
    """The way that takes one pass over the memory of a device, if there is one."""
    if device.type == "cuda":
        return "triton" if find_spec("triton") else "plain"
    return "compiled" if device.type == "cpu" else "plain"


class Fused(Generic[P, R]):
    """A function that is run as ``run_fused`` says.

    kernel: the same function for Triton, if there is one
    """

    def __init__(self, plain: Callable[P, R]) -> None:
        self.plain = plain
        self.kernel: Callable[P, R] | None = None
        self.__doc__, self.__name__ = plain.__doc__, plain.__name__
        self._compiled: Callable[P, R] | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        # Nothing to compute needs no compiler, which does not know every reduction over nothing, and no kernel.
        if _way == "plain" or any(_is_empty(x) for x in args):
            return self.plain(*args, **kwargs)
        if _way == "triton":
            return (self.kernel or self.plain)(*args, **kwargs)
        if self._compiled is None:
            self._compiled = torch.compile(self.plain, dynamic=True, fullgraph=True)
        return self._compiled(*args, **kwargs)


def fused(function: Callable[P, R]) -> Fused[P, R]:
    """Marks a function, see above."""
    return Fused(function)


def _is_empty(x: Any) -> bool:
    return isinstance(x, Tensor) and not x.numel()
