"""Sums without an order: operands on grids, and as many bits as leave every partial sum exact.

A float64 sum depends on its order only because additions round. Where all addends are multiples of one power of two,
the *grid*, and every partial sum stays below 2^53 of it, no addition rounds: any order, any kernel, any number of
threads or ranks gives the same bits. So operands are rounded to a grid before they are added or multiplied, and the
grid depends on facts alone that no layout can change: a token's own row, a weight's row or column, or what is known
before the step.

*Budget.* In a contraction of length L, one operand has entries of at most 2^a grid units in absolute value and the
other of at most 2^b. Then a product has at most 2^(a + b), and any partial sum, in any order, at most L 2^(a + b). It
is exact as long as that is at most 2^53, that is a + b + ceil(log2 L) <= 53. L is the length before anything was
divided.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from equigrad.numerics.exact.elementary import EXPONENT_BITS, EXPONENT_FIELD
from equigrad.numerics.exact.fused import fused

MANTISSA = 53
"""Bits of a float64: integers up to 2^53 are exact."""
ROUND = 1.5 * 2.0**52


def length_bits(length: int) -> int:
    """ceil(log2 length): bits by which a sum of so many terms is larger than the largest term."""
    return max(length - 1, 0).bit_length()


def operand_bits(length: int, extra: int = 0) -> tuple[int, int]:
    """Bits (a, b) of the operands of a contraction of ``length``, the first with ``extra`` more than the second.

    >>> operand_bits(4096)
    (20, 20)
    >>> operand_bits(151_936, 9)
    (22, 13)
    """
    second = (MANTISSA - length_bits(length) - extra) // 2
    return second + extra, second


def term_bits(terms: int) -> int:
    """Bits of the addends of a plain sum of so many."""
    # ``onto`` wants its operands below 2^51 of the grid.
    return min(MANTISSA - length_bits(terms), MANTISSA - 2)


def onto(x: Tensor, large: Tensor | float) -> Tensor:
    """``x`` float64 rounded to the multiples of a power of two, ties to even; ``large``: ``ROUND`` times that power.

    ``|x|`` must be below 2^51 of those; infinite and undefined entries become undefined, and are found at the end of
    the step as they are in any numerics. Two additions, for between 2^52 and 2^53 float64 has integers alone.
    """
    return (x + large) - large


def large_of(bits: int) -> float:
    """What rounds to multiples of 2^-bits."""
    return ROUND * 2.0**-bits  # of two, any pow is exact


def fixed(x: Tensor, bits: int) -> Tensor:
    """``x`` float64, below 1, rounded to multiples of 2^-bits."""
    return onto(x, large_of(bits))


def largest(x: Tensor, dim: int) -> Tensor:
    """Largest absolute value over ``dim``, which is kept; 0 where there is none. An order-free reduction."""
    if x.shape[dim]:
        return x.abs().amax(dim, keepdim=True)
    return x.sum(dim, keepdim=True)


def relative(x: Tensor, bits: int, size: Tensor) -> Tensor:
    """``x`` on the grid that leaves ``bits`` bits below ``size``, the largest absolute value that shares the grid."""
    # ROUND 2^(exponent(size) - bits), put together from bits; at least ROUND 2^-1022, and a NaN where that is more than
    # a float64 can be, as it is where ``size`` is not finite.
    field = ((size.view(torch.int64) >> EXPONENT_BITS) + (MANTISSA - bits)).clamp(MANTISSA, EXPONENT_FIELD)
    return onto(x, ((field << EXPONENT_BITS) | (1 << (EXPONENT_BITS - 1))).view(torch.float64))


def sum_last(x: Tensor) -> Tensor:
    """Exact sum over the last dimension, which is kept, of rows that lie on one rank as a whole. Its error is that of
    rounding each entry to the grid, L 2^(ceil(log2 L) - 54) of the largest one for rows of length L."""
    return relative(x, term_bits(x.shape[-1]), largest(x, -1)).sum(-1, keepdim=True)


@fused
def value(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to a value type: the end of every reduction. A sum that is zero has no sign, whoever added it up."""
    return (x + 0.0).to(dtype)


@fused
def _to_rows(x: Tensor, bits: int) -> Tensor:
    x = x.double()
    return relative(x, bits, largest(x, -1))


@fused
def _to_columns(x: Tensor, bits: int) -> Tensor:
    x = x.double()
    return relative(x, bits, largest(x, -2))


@fused
def _onto_size(x: Tensor, bits: int, size: Tensor) -> Tensor:
    return relative(x.double(), bits, size)


@fused
def _largest(x: Tensor, dim: int) -> Tensor:
    return largest(x, dim).double()


def rows(x: Tensor, bits: int, across: ProcessGroup | None = None) -> Tensor:
    """``x`` [..., C] float64, each row with ``bits`` bits below its own largest value; ``across``: the ranks that have
    the other columns of the same rows."""
    return _to_rows(x, bits) if across is None else together([Side([x], -1, bits)], across)[0][0]


def columns(x: Tensor, bits: int, across: ProcessGroup | None = None) -> Tensor:
    """The same for each column of ``x`` [..., R, C]; ``across``: the ranks that have its other rows."""
    return _to_columns(x, bits) if across is None else together([Side([x], -2, bits)], across)[0][0]


class Side(NamedTuple):
    """Tensors side by side (``dim`` -1: their rows share a grid) or one above the other (-2: their columns do), which
    get ``bits`` bits below the largest value."""

    tensors: Sequence[Tensor]
    dim: int
    bits: int


def together(sides: Sequence[Side], across: ProcessGroup | None) -> list[list[Tensor]]:
    """Each of several sides on its grids; the ranks ``across`` share them, and exchange largest values once."""
    sizes = []
    for side in sides:
        if across is None and len(side.tensors) == 1:
            continue
        size = _largest(side.tensors[0], side.dim)
        for tensor in side.tensors[1:]:
            size = torch.maximum(size, _largest(tensor, side.dim))
        sizes.append(size)
    if across is not None:
        flat = largest_across(torch.cat([size.reshape(-1) for size in sizes]), across)
        parts = flat.split([size.numel() for size in sizes])
        sizes = [part.view_as(size) for part, size in zip(parts, sizes, strict=True)]
    known, rounded = iter(sizes), []
    for tensors, dim, bits in sides:
        if across is None and len(tensors) == 1:
            rounded.append([(_to_rows if dim == -1 else _to_columns)(tensors[0], bits)])
        else:
            size = next(known)
            rounded.append([_onto_size(tensor, bits, size) for tensor in tensors])
    return rounded


def largest_across(size: Tensor, group: ProcessGroup) -> Tensor:
    """Replaces each entry by the largest one of some ranks."""
    size = size.contiguous()
    dist.all_reduce(size, dist.ReduceOp.MAX, group=group)
    return size
