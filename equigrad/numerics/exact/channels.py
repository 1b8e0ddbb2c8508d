"""Grids of sums over the tokens of a step, which nobody has seen when the first of them is rounded.

Tokens arrive in any order and on any rank, so the grid of such a sum, one for each channel, comes from the steps
before: the largest absolute value that the channel had, decaying slowly, and some headroom. A largest value is an
order-free reduction, so all layouts have the same grids. At the end of a step all ranks learn whether a value left its
grid anywhere; then nothing is updated, the grids are raised, and the step is done again. What is fed back through the
model does not depend on these grids, so once again is enough; and the first step, which knows none, is done again too.

*Budget.* Below its limit an entry has as many bits as ``grids.operand_bits`` allows for the most tokens that a step may
have: then every partial sum over them is exact, the sums over micro-batches and ranks included.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equigrad.numerics.exact.elementary import exponent, power_of_two
from equigrad.numerics.exact.fused import fused
from equigrad.numerics.exact.grids import ROUND, onto
from equigrad.parallel.placement import Placed, whole

_HEADROOM = 3
"""Bits that a channel may grow by from one step to the next."""
_DECAY = float.fromhex("0x1.ea4afa2a490dap-1")
"""2^(-1/16): a channel that has grown quiet has a finer grid one bit later after sixteen steps."""
_FLOOR = 24
"""A channel that was silent, like those of an expert that nobody chose, may speak: its grid is so many bits finer than
that of the tensor's largest one."""


@dataclass(frozen=True)
class Want:
    """The channels of one operand, of the whole model.

    channels: how many
    bits:     that an entry has below its limit
    own:      [start, stop) of those that this rank computes with
    """

    channels: int
    bits: int
    own: tuple[int, int]


class Channels:
    """This rank's channels of one operand.

    large: [own] float64, adding and subtracting it rounds to the grid
    seen:  [own] float64, the largest absolute value of this step, on this rank so far
    """

    def __init__(self, large: Tensor, seen: Tensor) -> None:
        self.large, self.seen = large, seen

    def part(self, start: int, stop: int) -> "Channels":
        """Some of them."""
        return Channels(self.large[start:stop], self.seen[start:stop])

    def round(self, x: Tensor) -> Tensor:
        """``x`` [tokens, own] on the grid, float64."""
        rounded, seen = _onto_channels(x, self.large)
        torch.maximum(self.seen, seen, out=self.seen)
        return rounded

    def see(self, x: Tensor) -> None:
        """Take up the values of ``x`` [tokens, own], which bound those that are rounded apart from them."""
        if len(x):
            torch.maximum(self.seen, x.double().abs().amax(0), out=self.seen)

    def onto(self, x: Tensor) -> Tensor:
        """``x`` on the grid, not seen."""
        return _onto(x, self.large)


@fused
def _onto_channels(x: Tensor, large: Tensor) -> tuple[Tensor, Tensor]:
    x = x.double()
    seen = x.abs().amax(0) if x.shape[0] else torch.zeros_like(large)
    return onto(x, large), seen


@fused
def _onto(x: Tensor, large: Tensor) -> Tensor:
    return onto(x.double(), large)


class Grids:
    """All channels of a model, the same on every rank, which computes with some of them.

    size: float64 [all channels], the largest absolute value of each: state, which outlives the step
    """

    def __init__(
        self,
        wants: Mapping[str, Want],
        device: torch.device | str = "cpu",
        tied: Sequence[tuple[str, str, str]] = (),
    ) -> None:
        """``tied``: names (in, out, further) of channels where the sum of products ``out in`` and that of ``further``
        are to be one exact sum; ``out`` is one channel, and the others are as many as each other."""
        self._names, self._tied = sorted(wants), tied
        sizes = [wants[name].channels for name in self._names]
        total = sum(sizes)
        self.size = torch.zeros(total, dtype=torch.float64, device=device)
        self._seen, self._large = torch.zeros_like(self.size), torch.zeros_like(self.size)
        groups = torch.arange(len(sizes), device=device)
        lengths = torch.tensor(sizes, device=device)
        self._group = groups.repeat_interleave(lengths)
        bits = torch.tensor([wants[name].bits for name in self._names], device=device)
        self._bits = bits.repeat_interleave(lengths)
        self._spans, start = dict[str, tuple[int, int]](), 0
        self._own = dict[str, Channels]()
        for name, size in zip(self._names, sizes, strict=True):
            first, stop = (start + at for at in wants[name].own)
            self._spans[name] = start, start + size
            self._own[name] = Channels(self._large[first:stop], self._seen[first:stop])
            start += size
        self.prepare()

    def __getitem__(self, name: str) -> Channels:
        return self._own[name]

    def __contains__(self, name: str) -> bool:
        return name in self._own

    def limit(self) -> Tensor:
        """Exponents, int64: this step's values are to be below 2^limit."""
        tops = self.size.new_zeros(len(self._names)).scatter_reduce_(0, self._group, self.size, "amax")
        silent = exponent(tops) - _FLOOR
        limit = torch.where(self.size > 0, exponent(self.size), silent[self._group]) + _HEADROOM
        for names in self._tied:
            into, out, further = (limit[slice(*self._spans[name])] for name in names)
            # A term that is added for itself is as if its ``out`` were a power of two, of the size that they have.
            into.copy_(torch.maximum(into, further - (out - _HEADROOM)))
            further.copy_(into + (out - _HEADROOM))
        return limit

    def prepare(self) -> None:
        """Make the grids of the next step from ``size``, and forget what was seen."""
        self._limit = self.limit()
        self._large.copy_(ROUND * power_of_two(self._limit - self._bits))
        self.forget()

    def forget(self) -> None:
        """What was seen since the step began."""
        self._seen.zero_()

    def end_step(self, over_ranks: Callable[[Tensor], None]) -> bool:
        """Whether every value of the step was within its grid; the same answer, and the same grids, on all ranks.

        Where not, the grids are raised to what was seen, and the step is to be done again. Either way they are ready
        for what comes next. What is not finite leaves them as they were: such a step's loss or norm is not finite
        either, and nothing is gained by doing it again.

        over_ranks: replaces each entry of a tensor by the largest one on all ranks
        """
        self._seen.masked_fill_(self._seen.isnan(), torch.inf)  # the largest of a NaN and a number may be either
        over_ranks(self._seen)
        if bool(self._seen.isinf().any()):
            self.forget()
            return True
        again = bool((self._seen >= power_of_two(self._limit)).any())
        kept = self.size if again else self.size * _DECAY
        torch.maximum(self._seen, kept, out=self.size)
        self.prepare()
        return not again

    def state(self, rank: int) -> dict[str, Placed]:
        """What a checkpoint holds: the sizes by name; ``rank`` among all, each of which has a copy."""
        spans = ((f"grids.{name}", self.size[start:stop]) for name, (start, stop) in self._spans.items())
        return {name: Placed(whole(name, size.shape, replica=rank), size) for name, size in spans}
