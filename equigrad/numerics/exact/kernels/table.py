"""Kernels in Triton, for CUDA: one pass over memory, or as many as there are reductions, where PyTorch takes one for
each operation. Imported only where they are used (``fused.run_fused``); nothing else needs Triton.

Which function has which kernel is said here, and nowhere else. What has none runs as it is written: the gated delta
rule, the few numbers of a token that routers and gates of experts have, and the end of a step.
"""

from collections.abc import Callable
from typing import Any

from equigrad.numerics.exact import attention, channels, cross_entropy, elementwise, grids, linear
from equigrad.numerics.exact.fused import Fused
from equigrad.numerics.exact.kernels import attention as of_attention
from equigrad.numerics.exact.kernels import cross_entropy as of_cross_entropy
from equigrad.numerics.exact.kernels import elementwise as of_elements
from equigrad.numerics.exact.kernels import rounding

KERNELS: dict[Fused[Any, Any], Callable[..., Any]] = {
    grids._to_rows: rounding.to_rows,
    grids._to_columns: rounding.to_columns,
    grids._onto_size: rounding.onto_size,
    grids._largest: rounding.largest,
    channels._onto_channels: rounding.onto_channels,
    channels._onto: rounding.onto_known,
    attention._unit: rounding.unit,
    attention._coarser: rounding.coarser,
    grids.value: rounding.value,
    linear.finish: rounding.finish,
    linear.plus: rounding.plus,
    linear.scaled: rounding.scaled,
    elementwise._inverse_rms: of_elements.inverse_rms,
    elementwise._normed: of_elements.normed,
    elementwise._norm_backward: of_elements.norm_backward,
    elementwise._opened: of_elements.opened,
    elementwise._opened_backward: of_elements.opened_backward,
    elementwise._clamped: of_elements.clamped,
    elementwise._clamped_backward: of_elements.clamped_backward,
    elementwise._times_sigmoid: of_elements.times_sigmoid,
    elementwise._times_sigmoid_backward: of_elements.times_sigmoid_backward,
    elementwise._rotated: of_elements.rotated,
    attention._attend: of_attention.attend,
    attention._terms: of_attention.terms,
    attention._of_query: of_attention.of_query,
    attention._of_key: of_attention.of_key,
    attention._finish: of_attention.finish,
    attention._scaled: of_attention.scaled,
    attention._delta: of_attention.delta,
    cross_entropy._top: of_cross_entropy.top,
    cross_entropy._sum: of_cross_entropy.sum_of,
    cross_entropy._errors: of_cross_entropy.errors,
    cross_entropy._loss: of_cross_entropy.loss,
}
