"""Kernels of ``exact.cross_entropy``: rows of logits [n, V]."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from equigrad.numerics.exact.grids import large_of
from equigrad.numerics.exact.kernels.jit import exp, log, shifted, short
from equigrad.numerics.exact.kernels.launch import Kernel, elementwise, launch, like
from equigrad.numerics.exact.kernels.rounding import itself


@triton.jit
def _logit(x, found, at, numbers):
    return (x[0],)


@triton.jit
def _term(x, found, at, numbers):
    return (shifted(exp(x[0] - x[1]), numbers[0]),)


@triton.jit
def _loss(x, found, at, numbers):
    top, total, label = x
    return (top + log(total) - label + 0.0,)


@triton.jit
def _error(x, found, at, numbers):
    logit, top, total, label, here, dloss = x
    p = short(exp(logit - top) / total)
    chosen = (at[1].to(tl.float64) == label) & (here != 0.0)
    return (tl.where(chosen, p - 1.0, p) * dloss + 0.0,)


_TOP, _SUM = Kernel(largest=_logit, row=itself), Kernel(terms=_term, row=itself)
_ERRORS = Kernel(each=_error, columns=True)
loss = elementwise(_loss, 0, dtype=torch.float32)


def top(logits: Tensor) -> Tensor:
    out = like(logits[:, :1], logits.dtype)
    launch(_TOP, [logits], rows=[out])
    return out


def sum_of(logits: Tensor, top: Tensor, bits: int) -> Tensor:
    out = like(logits[:, :1], torch.float64)
    launch(_SUM, [logits, top], rows=[out], numbers=[large_of(bits)])
    return out.squeeze(1)


def errors(logits: Tensor, top: Tensor, total: Tensor, label: Tensor, here: Tensor, dloss: Tensor) -> Tensor:
    out, of_rows = like(logits, torch.float32), (x[:, None] for x in (total, label, here.byte(), dloss))
    launch(_ERRORS, [logits, top, *of_rows], [out])
    return out
