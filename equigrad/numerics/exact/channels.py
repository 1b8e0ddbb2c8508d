"""Grids of sums over the tokens of a step, which nobody has seen when the first of them is rounded.

Tokens arrive in any order and on any rank, so the grid of such a sum, one for each channel, comes from the steps
before: the largest absolute value that the channel had, decaying slowly, and some headroom. A largest value is an
order-free reduction, so all layouts have the same grids. At the end of a step all ranks learn whether a value left its
grid anywhere; then nothing is updated, the grids are raised, and the step is done again. What is fed back through the
model does not depend on these grids, so once again is enough; and the first step, which knows none, is done again too.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from equigrad.numerics.exact.elementary import exponent, power_of_two
from equigrad.numerics.exact.grids import largest, onto

_HEADROOM = 3
"""Bits that a channel may grow by from one step to the next."""
_DECAY = float.fromhex("0x1.ea4afa2a490dap-1")
"""2^(-1/16): a channel that has grown quiet has a finer grid one bit later after sixteen steps."""
_FLOOR = 24
"""A channel that was silent, like those of an expert that nobody chose, may speak: its grid is so many bits finer than
that of the tensor's largest one."""


class Channels:
    """The grids of one operand, [channels].

    size:  float64, the largest absolute value of each channel: state, which outlives the step
    limit: int64, exponents: this step's values are to be below 2^limit
    seen:  float64, the largest absolute value of this step, on this rank so far
    """

    def __init__(self, channels: int, device: torch.device | str = "cpu") -> None:
        self.size = torch.zeros(channels, dtype=torch.float64, device=device)
        self.seen = torch.zeros_like(self.size)
        self.limit = torch.zeros_like(self.size, dtype=torch.int64)
        self.set_limit(self.size.new_zeros(()))

    def round(self, x: Tensor, bits: int) -> Tensor:
        """``x`` [tokens, channels] float64 with ``bits`` bits below each channel's limit."""
        self.seen = torch.maximum(self.seen, largest(x, 0).squeeze(0))
        return onto(x, self.limit - bits)

    def set_limit(self, of_tensor: Tensor) -> None:
        """From ``size``, and the largest of all channels on all ranks."""
        silent = exponent(of_tensor) - _FLOOR
        self.limit = torch.where(self.size > 0, exponent(self.size), silent) + _HEADROOM

    def forget(self) -> None:
        """What was seen since the step began."""
        self.seen = torch.zeros_like(self.size)

    @property
    def overflowed(self) -> Tensor:
        """Whether a value is not below its limit."""
        return (self.seen >= power_of_two(self.limit)).any()


Largest = Callable[[Tensor], None]
"""Replaces each entry of a tensor by the largest one on some ranks."""


def end_step(channels: Mapping[str, Channels], over_tokens: Largest, over_all: Largest) -> bool:
    """Whether every value of the step was within its grid; the same answer, and the same grids, on all ranks.

    Where not, the grids are raised to what was seen, and the step is to be done again. Either way they are ready for
    what comes next. A step that is not finite is refused before, and ``forget`` leaves the grids as they were.

    over_tokens: of the ranks that have the same channels and other tokens
    over_all:    of all ranks
    """
    groups = [channels[name] for name in sorted(channels)]
    sizes = [len(group.seen) for group in groups]
    seen = torch.cat([group.seen for group in groups])
    over_tokens(seen)
    for group, own in zip(groups, seen.split(sizes), strict=True):
        group.seen = own
    left = torch.stack([group.overflowed for group in groups]).any()
    tops = torch.stack([_top(torch.maximum(group.seen, group.size)) for group in groups] + [left.double()])
    over_all(tops)
    again = bool(tops[-1])
    for group, top in zip(groups, tops, strict=False):
        kept = group.size if again else group.size * _DECAY
        group.size = torch.maximum(group.seen, kept)
        group.set_limit(top)
        group.forget()
    return not again


def _top(sizes: Tensor) -> Tensor:
    return largest(sizes, 0).squeeze(0)
