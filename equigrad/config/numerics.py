"""Which arithmetic the model computes with."""

from typing import Literal

from equigrad.config.base import Section


class Numerics(Section):
    """The op set and the precision of matrix products."""

    kind: Literal["native", "exact"] = "native"
    """``native``: PyTorch's fastest kernels; layouts agree up to rounding. ``exact``: the same bits on any layout,
    packing and machine; parameters are float64."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Operands of matrix products and attention. Parameters, residual stream, norms
    and the softmax of the loss stay in float32; the logits are such products, rounded to ``dtype``."""
    compile: bool = False
    """Compile every block with ``torch.compile`` (needs a C++ compiler on CPU). In exact numerics it is what is
    elementwise that is compiled, on CPUs, or run by Triton's kernels, on GPUs, which changes no bits."""
