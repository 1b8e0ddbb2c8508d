"""Calls of autograd functions. Where gradients are off a function's forward is called as it is: the machinery around it
costs more than a small op, and decoding is many of them."""

from typing import Any

import torch
from torch.autograd import Function


class _Forgetful:
    """Stands for the context of a function that never goes backward."""

    def __init__(self, arguments: int) -> None:
        self.needs_input_grad = (False,) * arguments

    def save_for_backward(self, *_: Any) -> None:
        """Nothing."""


def forward_only() -> bool:
    """Whether nothing will go backward, and no compiler is at work, which knows what to do itself."""
    return not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def call(function: type[Function], *args: Any) -> Any:
    """``function.apply``."""
    return function.forward(_Forgetful(len(args)), *args) if forward_only() else function.apply(*args)
