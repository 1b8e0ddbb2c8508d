"""Which arithmetic the model computes with."""

from typing import Literal

from equigrad.config.base import Section


class Numerics(Section):
    """The op set and the precision of matrix products."""

    kind: Literal["native"] = "native"
    """``native``: PyTorch's fastest kernels; layouts agree up to rounding."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Operands of matrix products and attention. Parameters, residual stream, norms and loss stay in float32."""
    compile: bool = False
    """Compile every block with ``torch.compile`` (needs a C++ compiler on CPU)."""
