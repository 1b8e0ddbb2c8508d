"""What exact ops know of a layer besides its parameters."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from equigrad.numerics.exact.channels import Channels


@dataclass(frozen=True)
class LayerGrids:
    """
    shape:    of the weight on all ranks together, for budgets depend on whole contractions
    channels: of its operands, where it is trained: ``out`` and ``in`` of a contraction over tokens, ``sum`` of a plain
              sum, ``loss`` of what losses are multiplied by; an adapter's as ``a.out``, ``a.in``, ``b.out``, ``b.in``
    """

    shape: tuple[int, ...] = ()
    channels: Mapping[str, Channels] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Channels:
        return self.channels[name]

    @property
    def outputs(self) -> int:
        """N of a weight [..., N, K]."""
        return self.shape[-2]

    @property
    def inputs(self) -> int:
        """K of a weight [..., N, K]."""
        return self.shape[-1]


def grids_of(layer: Any) -> LayerGrids:
    """Of a layer, to which ``models.grids`` gave them."""
    found = layer.grids
    assert isinstance(found, LayerGrids), "exact ops need grids, which equigrad.models.grids attaches"
    return found
