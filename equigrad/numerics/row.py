"""The context of one row: which tokens belong together, where they stand, and which of them this rank computes.

A row is a flat run of real tokens, segment after segment, with no batch dimension and no padding. It may be empty.
Its tokens are divided twice. The context axis divides the row; each rank runs every op on its own tokens, and attention
alone exchanges any. The tensor axis divides features: heads, the inner width, the vocabulary. Between such ops, in the
residual stream, it divides the context rank's tokens once more, so that no two ranks compute the same norm.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from equigrad.config.layout import ContextStrategy
from equigrad.parallel.collectives import ALONE, Axis, Split
from equigrad.parallel.partition import Partition

if TYPE_CHECKING:
    from equigrad.numerics.cache import DecodingCache


@dataclass(frozen=True)
class Row:
    """Segments of one row.

    lengths:   tokens of each segment, in row order; their sum is the number of tokens T
    positions: [own tokens] int64, position of each token within its segment (plus what a cache already holds)
    cache:     keys and values of earlier tokens while decoding, else None
    context:   how the row's tokens lie on the context ranks; None: they are all here
    tensor:    how this context rank's tokens lie on the tensor ranks in the residual stream; None: they are all here
    strategy:  how attention exchanges between context ranks, as ``layout.cp_strategy`` says
    experts:   the ranks that share the experts, each with tokens of its own

    Example: segments of 3 and 2 tokens are ``Row((3, 2), tensor([0, 1, 2, 0, 1]))``.
    """

    lengths: tuple[int, ...]
    positions: Tensor
    cache: "DecodingCache | None" = field(default=None, compare=False)
    context: Split | None = None
    tensor: Split | None = None
    strategy: ContextStrategy = "ring"
    experts: Axis = ALONE

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        device: torch.device | str = "cpu",
        context: Axis = ALONE,
        tensor: Axis = ALONE,
        experts: Axis = ALONE,
        zigzag: bool = False,
        strategy: ContextStrategy = "ring",
    ) -> "Row":
        """A row of whole segments, each counted from position 0. Segments without tokens vanish. ``zigzag``: each
        context rank has a range of tokens from the front and one from the back."""
        kept = tuple(n for n in lengths if n > 0)
        positions = [torch.arange(n, device=device) for n in kept]
        whole = torch.cat(positions) if positions else torch.zeros(0, dtype=torch.int64, device=device)
        split = context.split(Partition.of_row(len(whole), context.size, zigzag))
        own = whole if split is None else split.take(whole)
        residual = tensor.split(Partition.contiguous(len(own), tensor.size))
        return cls(kept, own, None, split, residual, strategy, experts)

    @property
    def residual_tokens(self) -> int:
        """Tokens of this rank in the residual stream."""
        return len(self.positions) if self.tensor is None else self.tensor.length

    @property
    def tokens(self) -> int:
        """Number of tokens T, on all ranks together."""
        return sum(self.lengths)
