"""What kernels and the functions that they stand for are called with in tests: for each of them, arguments of any size,
memory layout and value."""

import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from equigrad.numerics.exact import attention, channels, cross_entropy, elementwise, grids, linear
from equigrad.numerics.exact.attention import Budget, _Units
from equigrad.numerics.exact.elementary import power_of_two
from equigrad.numerics.exact.fused import Fused
from equigrad.numerics.exact.grids import term_bits
from equigrad.numerics.tiles import Tile

ODD = [0.0, -0.0, math.nan, math.inf, -math.inf, 1.0, -1.0, 5e-324, -1e-310, 2.0**-149, -(2.0**-127), 2.0**100, 0.5]
TYPES = (torch.float32, torch.bfloat16)
SINGLE, DOUBLE = torch.float32, torch.float64


class Drawn:
    """What hypothesis chooses for one call."""

    def __init__(self, data: st.DataObject) -> None:
        self._draw = data.draw
        self.random = torch.Generator().manual_seed(self.number(0, 10**6))

    def number(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))

    def one(self, *of: Any) -> Any:
        return self._draw(st.sampled_from(of))

    def sizes(self, dims: int) -> list[int]:
        """One, and powers of two, and what no block divides; rarely nothing at all."""
        return [self.one(1, 2, 3, 7, 19, 0) for _ in range(dims)]

    def tensor(self, shape: Any, dtype: torch.dtype = SINGLE, odd: bool = True) -> Tensor:
        """Numbers of many sizes, odd ones among them, contiguous or a view."""
        how, shape = self.one("whole", "transposed", "strided"), tuple(shape)
        stored = (*shape[:-1], 2 * shape[-1]) if how == "strided" else shape[::-1] if how == "transposed" else shape
        x = torch.randn(stored, generator=self.random, dtype=DOUBLE)
        x = x * torch.exp2(torch.randint(-20, 20, stored, generator=self.random).double())
        if x.numel() and odd:
            for value in self._draw(st.lists(st.sampled_from(ODD), max_size=4)):
                x.view(-1)[self.number(0, x.numel() - 1)] = value
        x = x.to(dtype)
        return x[..., ::2] if how == "strided" else x.permute(*reversed(range(x.dim()))) if how == "transposed" else x

    def powers(self, shape: Any) -> Tensor:
        return power_of_two(torch.randint(-30, 30, tuple(shape), generator=self.random))

    def dtype(self) -> torch.dtype:
        return self.one(*TYPES)


def matrix(d: Drawn) -> tuple[Any, ...]:
    return d.tensor(d.sizes(d.number(2, 3)), d.one(*TYPES, DOUBLE)), d.number(1, 40)


def sized(d: Drawn) -> tuple[Any, ...]:
    x, bits = matrix(d)
    size = d.tensor((*x.shape[:-1], 1) if d.one(True, False) else (*x.shape[:-2], 1, x.shape[-1]), DOUBLE)
    return x, bits, size.abs_()


def of_channels(d: Drawn) -> tuple[Any, ...]:
    tokens, own = d.sizes(2)
    return d.tensor((tokens, own), d.one(*TYPES, DOUBLE)), d.powers([own]) * grids.ROUND


def total(d: Drawn) -> Tensor:
    return d.tensor(d.sizes(2), DOUBLE)


def finished(d: Drawn) -> tuple[Any, ...]:
    x = total(d)
    return x, d.one(None, d.tensor(x.shape[1:], DOUBLE), d.tensor(x.shape, DOUBLE)), d.dtype()


def added(d: Drawn) -> tuple[Any, ...]:
    x = total(d)
    return d.tensor(x.shape, d.dtype()), x


def several(d: Drawn, number: int, *more: Any) -> tuple[Any, ...]:
    shape, dtype = d.sizes(2), d.dtype()
    return *(d.tensor(shape, dtype) for _ in range(number)), *more


def norm(d: Drawn, number: int) -> tuple[Any, ...]:
    shape, dtype = d.sizes(d.number(2, 3)), d.dtype()
    given = [d.tensor(shape, dtype) for _ in range(number)]
    return *given, d.tensor((*shape[:-1], 1)), d.tensor(shape[-1:], DOUBLE), d.one(False, True)


def rotary(d: Drawn) -> tuple[Any, ...]:
    (tokens, heads), half = d.sizes(2), d.number(1, 6)
    angles = [d.tensor((tokens, half)) for _ in range(2)]
    return d.tensor((tokens, heads, 2 * half + d.number(0, 3)), d.dtype()), *angles, d.one(1.0, -1.0)


class Chosen(Drawn):
    """One call, the same each time, of bfloat16 where there is a choice."""

    def __init__(self) -> None:
        self.random = torch.Generator()

    def number(self, low: int, high: int) -> int:
        return min(low + 2, high)

    def one(self, *of: Any) -> Any:
        return of[-1]

    def sizes(self, dims: int) -> list[int]:
        return [40] * dims

    def tensor(self, shape: Any, dtype: torch.dtype = SINGLE, odd: bool = True) -> Tensor:
        return torch.ones(tuple(shape), dtype=dtype)


class Scores:
    """A tile of attention, and what belongs to its queries and keys."""

    def __init__(self, d: Drawn) -> None:
        self.d, (self.kv, self.group) = d, d.one((1, 1), (1, 2), (2, 1), (2, 2))
        count, queries, offset = d.number(1, 2), d.one(1, 3, 5), d.number(0, 6)
        self.tile = Tile(d.number(0, 2), d.number(0, 2), count, queries, queries + offset, offset, d.one(None, 1, 4))
        self.shape = count, self.kv, self.group, queries, queries + offset
        self.scale, self.masked = 1 / math.sqrt(d.number(3, 80)), (offset, self.tile.window or 0)

    def products(self) -> Tensor:
        """Scores of moderate size, most of them, so that exponentials do not vanish."""
        x = self.d.tensor(self.shape, DOUBLE).contiguous()
        return torch.where(x.abs() > 1e6, x * 2.0**-20, x) if self.d.one(True, False) else x

    def powers(self, of_keys: bool) -> Tensor:
        heads, tokens = (self.kv, 80) if of_keys else (self.kv * self.group, 60)
        units = _Units(torch.zeros(tokens, heads, 1), self.d.powers((tokens, heads)))
        return units.of_keys(self.tile)[1] if of_keys else units.of_queries(self.tile, self.kv)[1]

    def of_queries(self, dtype: torch.dtype, odd: bool = True) -> Tensor:
        x = self.d.tensor((60, self.kv * self.group), dtype, odd)
        return self.tile.q_view(x).unflatten(1, (self.kv, -1)).unsqueeze(-1)


def attended(d: Drawn) -> tuple[Any, ...]:
    s = Scores(d)
    budget = Budget.of(16, 64, s.group)
    sinks = d.one(None, d.tensor((1, s.kv, s.group, 1, 1)) + 0.0)
    powers = s.powers(False), s.powers(True), s.powers(True)
    return s.products(), *powers, sinks, s.scale, *s.masked, budget.terms, budget.keys[0]


def terms(d: Drawn) -> tuple[Any, ...]:
    s = Scores(d)
    powers = s.powers(False), s.powers(True), s.powers(True), s.powers(False)
    queries = s.of_queries(SINGLE), s.of_queries(DOUBLE).abs(), s.of_queries(SINGLE)
    return s.products(), s.products(), *powers, *queries, s.scale, *s.masked


def of_query(d: Drawn) -> tuple[Any, ...]:
    s = Scores(d)
    return d.tensor(s.shape), s.powers(True), d.number(1, 30)


def of_key(d: Drawn) -> tuple[Any, ...]:
    s = Scores(d)
    size = s.tile.k_view(d.tensor((80, s.kv), DOUBLE).abs_())[:, :, None, None]
    return d.tensor(s.shape), s.powers(False), size, d.number(1, 30)


def finished_sums(d: Drawn) -> tuple[Any, ...]:
    s = Scores(d)
    return d.tensor((*s.shape[:-1], 5), DOUBLE), s.powers(False), s.of_queries(DOUBLE), d.dtype()


def scaled_sums(d: Drawn) -> tuple[Any, ...]:
    s = Scores(d)
    return d.tensor((*s.shape[:-1], 5), DOUBLE), s.powers(False), 1 / 3, d.dtype()


def out_and_gradient(d: Drawn) -> tuple[Any, ...]:
    shape, dtype = d.sizes(3), d.dtype()
    return d.tensor(shape, dtype), d.tensor(shape, dtype)


def logits(d: Drawn) -> Tensor:
    x = d.tensor((*d.sizes(1), d.one(1, 2, 3, 7, 40)))
    return torch.where(x.abs() > 1e3, x * 2.0**-12, x)


def sum_of_logits(d: Drawn) -> tuple[Any, ...]:
    x = logits(d)
    return x, grids.largest(x, 1), term_bits(x.shape[1]) - 1


def errors(d: Drawn) -> tuple[Any, ...]:
    x = logits(d)
    n, vocabulary = x.shape
    label = torch.randint(-1, vocabulary + 1, (n,), generator=d.random)
    here = torch.rand(n, generator=d.random) < 0.7
    return x, d.tensor((n, 1)), d.tensor((n,), DOUBLE), label, here, d.tensor((n,))


def losses(d: Drawn) -> tuple[Any, ...]:
    (n,) = d.sizes(1)
    return d.tensor((n,)), d.tensor((n,), DOUBLE), d.tensor((n,), DOUBLE)


CASES: dict[Fused[Any, Any], Callable[[Drawn], tuple[Any, ...]]] = {
    grids._to_rows: matrix,
    grids._to_columns: matrix,
    grids._onto_size: sized,
    grids._largest: lambda d: (matrix(d)[0], d.one(-1, -2)),
    channels._onto_channels: of_channels,
    channels._onto: of_channels,
    attention._unit: matrix,
    attention._coarser: lambda d: (total(d), d.number(1, 40)),
    grids.value: lambda d: (total(d), d.dtype()),
    linear.finish: finished,
    linear.plus: added,
    linear.scaled: lambda d: (total(d), d.one(1 / 3, 0.7), d.dtype()),
    elementwise._inverse_rms: lambda d: (*several(d, 1), 1e-6),
    elementwise._normed: lambda d: norm(d, 1),
    elementwise._norm_backward: lambda d: norm(d, 2),
    elementwise._opened: lambda d: several(d, 2),
    elementwise._opened_backward: lambda d: several(d, 3),
    elementwise._clamped: lambda d: several(d, 2, 1.702, 7.0),
    elementwise._clamped_backward: lambda d: several(d, 3, 1.702, 7.0),
    elementwise._times_sigmoid: lambda d: several(d, 2),
    elementwise._times_sigmoid_backward: lambda d: several(d, 3),
    elementwise._rotated: rotary,
    attention._attend: attended,
    attention._terms: terms,
    attention._of_query: of_query,
    attention._of_key: of_key,
    attention._finish: finished_sums,
    attention._scaled: scaled_sums,
    attention._delta: out_and_gradient,
    cross_entropy._top: lambda d: (logits(d) + 0.0,),
    cross_entropy._sum: sum_of_logits,
    cross_entropy._errors: errors,
    cross_entropy._loss: losses,
}


def name(function: Fused[Any, Any]) -> str:
    """For the title of a test."""
    return f"{function.plain.__module__.rpartition('.')[2]}.{function.__name__}"
