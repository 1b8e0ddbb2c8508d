"""One kernel for all: tiles of rows and columns, and what is computed with them.

Every function that has a kernel is of one shape: something of each element, where rows may share a largest value or an
exact sum. So there is one kernel, which reads tiles as float64, reduces them over their columns, and writes what
functions on tiles, the parts of a ``Kernel``, make of them, rounded to the type of each output. A row that is longer
than a tile is read once for each reduction and once for what is written: mostly from a cache.

Sizes of tiles are guesses, not yet measured on a GPU.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from equigrad.numerics.exact.grids import term_bits
from equigrad.numerics.exact.kernels.jit import LOWEST, exponent, key_of, of_key, onto, rounded, widened

ELEMENTS, ACROSS = 1024, 16
"""Of a tile; and its columns, where it is rows that lie side by side in memory."""
_MOST_BLOCKS = 65_535
"""What CUDA allows in the second dimension of a grid."""


class Kernel(NamedTuple):
    """Jitted functions (x, found, at, numbers) -> tuple of tiles, float64.

    ``x``: a tile of each input; ``found``: what the row's reductions were, one after another, [rows, 1]; ``at``: the
    tile's rows [rows, 1] and columns [1, columns], and the launch's ``places``; ``numbers``: constants of the launch.

    largest: what the maxima of each row are to be taken of; what it returns beyond is written as that of ``each`` is
    maxima:  how many those are
    terms:   what the exact sum of each row is to be made of
    relative: whether terms are still to be rounded, to the grid of the row's largest one, as in ``grids.sum_last``
    each:    what is written at each element
    row:     of (found, numbers), what is written of each row
    columns: whether ``each`` wants to know its column, without any reduction
    """

    largest: Any = None
    maxima: int = 1
    terms: Any = None
    relative: bool = False
    each: Any = None
    row: Any = None
    columns: bool = False


def launch(
    kernel: Kernel,
    inputs: Sequence[Tensor],
    each: Sequence[Tensor] = (),
    rows: Sequence[Tensor] = (),
    numbers: Sequence[Any] = (),
    places: Sequence[int] = (),
) -> None:
    """Computes the outputs: ``each`` of the shape [..., columns] that the inputs broadcast to, ``rows`` [..., 1]. No
    tensor may be empty; any may be a view."""
    shape = torch.broadcast_shapes(*(x.shape for x in inputs))
    reduces = kernel.largest is not None or kernel.terms is not None
    tensors = [x.expand(shape) for x in (*inputs, *each, *rows)]
    (length, steps), *kept = _collapsed(shape, [x.stride() for x in tensors], reduces or kernel.columns)
    sizes, count = tuple(size for size, _ in kept), math.prod(size for size, _ in kept)
    columns = min(triton.next_power_of_2(length), ELEMENTS)
    if 0 < kept[0][1][0] < steps[0]:
        columns = min(columns, ACROSS)
    height = min(triton.next_power_of_2(count), ELEMENTS // columns)
    blocks = 1 if reduces else min(triton.cdiv(length, columns), _MOST_BLOCKS)
    views = [(x, tuple(own[n] for _, own in kept), steps[n]) for n, x in enumerate(tensors)]
    ends = len(inputs), len(inputs) + len(each)
    _kernel[(triton.cdiv(count, height), blocks)](
        tuple(views[: ends[0]]), tuple(views[ends[0] : ends[1]]), tuple(views[ends[1] :]),
        sizes, count, length, tuple(places), term_bits(length), *kernel[:-1], tuple(numbers), height, columns,
        enable_fp_fusion=False,  # see ``jit``
    )  # fmt: skip


def like(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous tensor of that shape, without values."""
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def elementwise(body: Any, *outputs: int, dtype: torch.dtype | None = None) -> Callable[..., Any]:
    """A function of tensors and numbers that computes ``body`` at each element. ``outputs``: the tensors whose shapes
    and types its results have; or their type is ``dtype``, or the one that is among the arguments."""
    kernel = Kernel(each=body)

    def run(*args: Any) -> Any:
        tensors = [x for x in args if isinstance(x, Tensor)]
        numbers = [x for x in args if not isinstance(x, Tensor | torch.dtype)]
        own = next((x for x in args if isinstance(x, torch.dtype)), dtype)
        outs = [like(tensors[n], own or tensors[n].dtype) for n in outputs]
        launch(kernel, tensors, outs, numbers=numbers)
        return outs[0] if len(outs) == 1 else tuple(outs)

    return run


def _collapsed(
    shape: Sequence[int], strides: Sequence[Sequence[int]], apart: bool
) -> list[tuple[int, tuple[int, ...]]]:
    """Sizes, and the strides of each tensor, of at least two dimensions, the last one first. Dimensions that lie one
    behind the other in all tensors are one, except for the last one if that is to be ``apart``."""
    found = list[tuple[int, tuple[int, ...]]]()
    for dim in reversed(range(len(shape))):
        size, steps = shape[dim], tuple(stride[dim] for stride in strides)
        last = apart and not found
        if size == 1 and not last:
            continue
        if len(found) > apart:
            below, finer = found[-1]
            if all(step == below * fine for step, fine in zip(steps, finer, strict=True)):
                found[-1] = size * below, finer
                continue
        found.append((size, steps))
    return found + [(1, (0,) * len(strides))] * (2 - len(found))


@triton.jit
def _kernel(
    inputs, each, rows, sizes, count, length, places, bits,
    LARGEST: tl.constexpr, MAXIMA: tl.constexpr, TERMS: tl.constexpr, RELATIVE: tl.constexpr, EACH: tl.constexpr,
    ROW: tl.constexpr, numbers: tl.constexpr, HEIGHT: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT))[:, None]
    first, step = tl.program_id(1).to(tl.int64) * COLUMNS, tl.num_programs(1).to(tl.int64) * COLUMNS
    found = ()
    if LARGEST is not None:
        keys = ()
        for _ in tl.static_range(MAXIMA):
            keys += (tl.full([HEIGHT, 1], LOWEST, tl.int64),)
        for start in range(first, length, step):
            column, inside = _place(row, start, count, length, COLUMNS)
            values = LARGEST(_loaded(inputs, row, column, inside, sizes), found, (row, column, places), numbers)
            keys = _raised(keys, values, inside)
            if EACH is None:
                _stored(each, values, MAXIMA, row, column, inside, sizes)
        for n in tl.static_range(MAXIMA):
            found += (of_key(keys[n]),)
    if TERMS is not None:
        if RELATIVE:
            size = (tl.full([HEIGHT, 1], 0, tl.int64),)
            for start in range(first, length, step):
                column, inside = _place(row, start, count, length, COLUMNS)
                term = TERMS(_loaded(inputs, row, column, inside, sizes), found, (row, column, places), numbers)[0]
                size = _raised(size, (tl.abs(term),), inside)
            grid = exponent(of_key(size[0])) - bits
        total = tl.full([HEIGHT, 1], 0.0, tl.float64)
        for start in range(first, length, step):
            column, inside = _place(row, start, count, length, COLUMNS)
            term = TERMS(_loaded(inputs, row, column, inside, sizes), found, (row, column, places), numbers)[0]
            if RELATIVE:
                term = onto(term, grid)
            total += tl.sum(tl.where(inside, term, 0.0), 1, keep_dims=True)
        found += (total,)
    if EACH is not None:
        for start in range(first, length, step):
            column, inside = _place(row, start, count, length, COLUMNS)
            values = EACH(_loaded(inputs, row, column, inside, sizes), found, (row, column, places), numbers)
            _stored(each, values, 0, row, column, inside, sizes)
    if ROW is not None:
        _stored(rows, ROW(found, numbers), 0, row, 0, row < count, sizes)


@triton.jit
def _place(row, start, count, length, COLUMNS: tl.constexpr):
    """The columns from ``start`` on, and which elements of the tile there are."""
    column = start + tl.arange(0, COLUMNS)[None, :]
    return column, (row < count) & (column < length)


@triton.jit
def _offset(view, row, column, sizes):
    """From the start of a tensor: a row's number is that of several dimensions, the last one counting fastest."""
    pointer, strides, step = view
    found = column * step
    for dim in tl.static_range(len(sizes) - 1):
        found += row % sizes[dim] * strides[dim]
        row = row // sizes[dim]
    return pointer + (found + row * strides[len(sizes) - 1])


@triton.jit
def _loaded(views, row, column, inside, sizes):
    found = ()
    for n in tl.static_range(len(views)):
        found += (widened(tl.load(_offset(views[n], row, column, sizes), inside, other=0)),)
    return found


@triton.jit
def _stored(views, values, FIRST: tl.constexpr, row, column, inside, sizes):
    for n in tl.static_range(len(views)):
        value = rounded(values[FIRST + n], views[n][0].dtype.element_ty)
        tl.store(_offset(views[n], row, column, sizes), value, inside)


@triton.jit
def _raised(keys, values, inside):
    """Row by row the larger one of a key, and of those of a tile's values."""
    found = ()
    for n in tl.static_range(len(keys)):
        own = tl.max(tl.where(inside, key_of(values[n]), LOWEST), 1, keep_dims=True)
        found += (tl.maximum(keys[n], own),)
    return found
