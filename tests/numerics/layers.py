"""Parameters given to an op by hand."""

from typing import Any, NamedTuple

from torch import Tensor

from equigrad.numerics.ops import Adapter


class Given(NamedTuple):
    """A layer that is no module."""

    weight: Tensor
    bias: Tensor | None = None
    adapter: Adapter | None = None
    grids: Any = None
