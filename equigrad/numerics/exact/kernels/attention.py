"""The scores of a tile and what is made of them: kernels of ``exact.attention``, whose shapes these are too.

A product is [count, kv, group, queries, keys]. Its rows are queries, except where a key's largest value is wanted: then
they are keys, and their columns the queries of the group's heads.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from equigrad.numerics.exact.grids import large_of
from equigrad.numerics.exact.kernels.jit import exp, exponent, larger, onto, power_of_two, shifted, short
from equigrad.numerics.exact.kernels.launch import Kernel, elementwise, launch, like
from equigrad.numerics.exact.kernels.rounding import itself, power_of


@triton.jit
def _sees(query, key, offset, window):
    """Whether a query sees a key; ``window`` 0: all up to its own."""
    place = query + offset
    return (key <= place) & ((window == 0) | (key > place - window))


@triton.jit
def _score(product, q_power, k_power, scale):
    return short(product * (q_power * k_power) * scale + 0.0)


# Forward. Numbers: the scale, what rounds terms and what rounds factors, and whether there are sinks. Places: the
# tile's queries, its offset and window.


@triton.jit
def _scored(x, at, numbers):
    row, column, places = at
    queries, offset, window = places
    return _sees(row % queries, column, offset, window), _score(x[0], x[1], x[2], numbers[0])


@triton.jit
def _top_and_power(x, found, at, numbers):
    seen, score = _scored(x, at, numbers)
    top = tl.where(seen, score, float("-inf"))
    if numbers[3]:
        top = larger(top, x[4])
    return top, tl.where(seen, x[3], 0.0)


@triton.jit
def _term(x, found, at, numbers):
    seen, score = _scored(x, at, numbers)
    term = shifted(tl.where(seen, exp(score - found[0]), 0.0), numbers[1])
    if numbers[3]:
        # A sink is one more term, and belongs to no key: the first one brings it in.
        term += tl.where(at[1] == 0, shifted(exp(x[4] - found[0]), numbers[1]), 0.0)
    return (term,)


@triton.jit
def _weighted(x, found, at, numbers):
    seen, score = _scored(x, at, numbers)
    factor = tl.where(seen, exp(score - found[0]) * (x[3] / found[1]), 0.0)
    return (shifted(factor, numbers[2]),)


@triton.jit
def _top_total_power(found, numbers):
    top, power, total = found
    return top, total, power


_ATTEND = Kernel(largest=_top_and_power, maxima=2, terms=_term, each=_weighted, row=_top_total_power)


def attend(
    product: Tensor, q_power: Tensor, k_power: Tensor, v_power: Tensor, sinks: Tensor | None,
    scale: float, offset: int, window: int, terms: int, bits: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    factors, total, power = like(product, torch.float64), *(like(product[..., :1], torch.float64) for _ in range(2))
    top = like(total, torch.float32)
    launch(
        _ATTEND, [product, q_power, k_power, v_power, *([] if sinks is None else [sinks])], [factors],
        [top, total, power], [scale, large_of(terms), large_of(bits), sinks is not None],
        [product.shape[-2], offset, window],
    )  # fmt: skip
    return factors, top, total, power[:, :, :1]  # the group's heads see the same values


# Backward. Places: the tile's queries and keys, its offset and window.


@triton.jit
def _terms(x, found, at, numbers):
    product, dproduct, q_power, k_power, v_power, d_power, top, total, delta = x
    row, column, places = at
    queries, keys, offset, window = places
    seen = _sees(column % queries, row % keys, offset, window)
    score = tl.where(seen, _score(product, q_power, k_power, numbers[0]), float("-inf"))
    weight = tl.where(seen, exp(score - top), 0.0)
    p = short(weight / total)
    dp = short(dproduct * (d_power * v_power))
    ds = short(p * short(dp - delta))
    return p * d_power, tl.abs(ds) * q_power, p, ds


_TERMS = Kernel(largest=_terms, maxima=2, row=itself)


def terms(
    product: Tensor, dproduct: Tensor, q_power: Tensor, k_power: Tensor, v_power: Tensor, d_power: Tensor,
    top: Tensor, total: Tensor, delta: Tensor, scale: float, offset: int, window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    inputs = [x.flatten(2, 3).mT for x in (product, dproduct, q_power, k_power, v_power, d_power, top, total, delta)]
    p, ds = like(product, torch.float32), like(product, torch.float32)
    of_p, of_ds = (product.new_empty(*product.shape[:2], product.shape[-1]) for _ in range(2))
    launch(
        _TERMS, inputs, [out.flatten(2, 3).mT for out in (p, ds)], [size.unsqueeze(-1) for size in (of_p, of_ds)],
        [scale], [*product.shape[-2:], offset, window],
    )  # fmt: skip
    return p, ds, of_p, of_ds


@triton.jit
def _times_power(x, found, at, numbers):
    return (tl.abs(x[0] * x[1]),)


@triton.jit
def _unit_of_query(x, found, at, numbers):
    return (shifted(x[0] * x[1] * power_of_two(-exponent(found[0])), numbers[0]),)


@triton.jit
def _unit_of_key(x, found, at, numbers):
    ds, q_power, size = x
    return (onto(ds * q_power, exponent(size) - numbers[0]),)


@triton.jit
def _finished(x, found, at, numbers):
    sums, power, total = x
    return (sums * power / total + 0.0,)


@triton.jit
def _scaled(x, found, at, numbers):
    return (x[0] * x[1] * numbers[0] + 0.0,)


@triton.jit
def _product(x, found, at, numbers):
    return (x[0] * x[1],)


_OF_QUERY = Kernel(largest=_times_power, each=_unit_of_query, row=power_of)
_DELTA = Kernel(terms=_product, relative=True, row=itself)
of_key = elementwise(_unit_of_key, 0, dtype=torch.float64)
finish, scaled = elementwise(_finished, 0), elementwise(_scaled, 0)


def of_query(ds: Tensor, k_power: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    units, power = like(ds, torch.float64), like(ds[..., :1], torch.float64)
    launch(_OF_QUERY, [ds, k_power], [units], [power], [large_of(bits)])
    return units, power


def delta(dout: Tensor, out: Tensor) -> Tensor:
    found = like(out[..., :1], torch.float32)
    launch(_DELTA, [dout, out], rows=[found])
    return found.squeeze(-1)
