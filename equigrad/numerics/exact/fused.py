"""Elementwise work as one pass over memory, where a compiler is present.

What is marked ``fused`` is a function of tensors that gives the same bits compiled and not: every element is computed
by IEEE operations alone, or by reductions that have no order. So whether it is compiled is a question of speed only,
and one of the whole process.
"""

from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

_compiled = False
_VARIANTS = 64
"""A function is compiled anew for other types, for other strides, and where a size is one or divides another."""


def compile_fused(now: bool) -> None:
    """Whether ``fused`` functions are compiled from now on; needs a C++ compiler on the CPU."""
    global _compiled
    _compiled = now
    if now:
        from torch._inductor import config

        # What environment variables may have switched on would change bits.
        config.cpp.enable_floating_point_contract_flag = "off"
        config.cpp.enable_unsafe_math_opt_flag = False
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _VARIANTS)
        torch._dynamo.config.accumulated_recompile_limit = max(
            torch._dynamo.config.accumulated_recompile_limit, 64 * _VARIANTS
        )


class Fused(Generic[P, R]):
    """A function that is compiled at its first call after ``compile_fused``."""

    def __init__(self, plain: Callable[P, R]) -> None:
        self.plain = plain
        self.__doc__, self.__name__ = plain.__doc__, plain.__name__
        self._fast: Callable[P, R] | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        # Nothing to compute needs no compiler, which does not know every reduction over nothing.
        if not _compiled or any(_is_empty(x) for x in args):
            return self.plain(*args, **kwargs)
        if self._fast is None:
            self._fast = torch.compile(self.plain, dynamic=True, fullgraph=True)
        return self._fast(*args, **kwargs)


def fused(function: Callable[P, R]) -> Fused[P, R]:
    """Marks a function, see above."""
    return Fused(function)


def _is_empty(x: Any) -> bool:
    return isinstance(x, Tensor) and not x.numel()
