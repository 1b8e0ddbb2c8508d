"""The context of one row: which tokens belong together and where they stand. Every op receives it.

A row is a flat run of real tokens, segment after segment, with no batch dimension and no padding. It may be empty.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from equigrad.numerics.cache import KeyValueCache


@dataclass(frozen=True)
class Row:
    """Segments of one row.

    lengths:   tokens of each segment, in row order; their sum is the number of tokens T
    positions: [T] int64, position of each token within its segment (plus what a cache already holds)
    cache:     keys and values of earlier tokens while decoding, else None

    Example: segments of 3 and 2 tokens are ``Row((3, 2), tensor([0, 1, 2, 0, 1]))``.
    """

    lengths: tuple[int, ...]
    positions: Tensor
    cache: "KeyValueCache | None" = field(default=None, compare=False)

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> "Row":
        """A row of whole segments, each counted from position 0. Segments without tokens vanish."""
        kept = tuple(n for n in lengths if n > 0)
        positions = [torch.arange(n, device=device) for n in kept]
        return cls(kept, torch.cat(positions) if positions else torch.zeros(0, dtype=torch.int64, device=device))

    @property
    def tokens(self) -> int:
        """Number of tokens T."""
        return sum(self.lengths)
