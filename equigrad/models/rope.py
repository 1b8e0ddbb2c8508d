"""Rotary frequencies and their long-context variants, as ``transformers`` defines them. Knows no positions."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from equigrad.config.model import Model, RopeScaling
from equigrad.numerics.exact.scalar import log

Power = Callable[[Tensor, Tensor], Tensor]
"""Base to the exponent, float32, as the op set computes it."""


def frequencies(config: Model, lengths: tuple[int, ...], power: Power) -> tuple[Tensor, float]:
    """Frequencies [D/2] float32 ([segments, D/2] where they depend on the segment) and the scale of the table; D is
    what is rotated of a head.

    ``lengths`` are the tokens of each segment; only the ``dynamic`` rule looks at them, each segment at its own length
    alone, so that no token's rotation depends on its neighbours in the row.
    """
    base = _inverse_powers(torch.tensor(config.rope_theta), config.rotary_size, power)
    scaling = config.rope_scaling
    if scaling is None:
        return base, 1.0
    if scaling.kind == "linear":
        return base / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(base, scaling, _original(config, scaling)), 1.0
    if scaling.kind == "yarn":
        return _yarn(base, config, scaling, _original(config, scaling))
    return _dynamic(config, scaling, lengths, power), 1.0


def _inverse_powers(theta: Tensor, head_dim: int, power: Power) -> Tensor:
    return 1.0 / power(theta, torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)


def _original(config: Model, scaling: RopeScaling) -> int:
    return scaling.original_max_position_embeddings or config.max_position_embeddings


def _dynamic(config: Model, scaling: RopeScaling, lengths: tuple[int, ...], power: Power) -> Tensor:
    """NTK-aware scaling that grows with the segment beyond the original context."""
    limit, dim = _original(config, scaling), config.rotary_size
    length = torch.tensor(lengths, dtype=torch.float32).clamp(min=limit)[:, None]
    stretch = scaling.factor * length / limit - (scaling.factor - 1)
    return _inverse_powers(config.rope_theta * power(stretch, torch.tensor(dim / (dim - 2))), dim, power)


def _llama3(base: Tensor, scaling: RopeScaling, original: int) -> Tensor:
    """Long wavelengths are stretched, short ones stay, those between are blended (Llama 3.1)."""
    wavelength = 2 * math.pi / base
    low, high = original / scaling.low_freq_factor, original / scaling.high_freq_factor
    blend = (original / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    between = (1 - blend) * base / scaling.factor + blend * base
    return torch.where(wavelength > low, base / scaling.factor, torch.where(wavelength < high, base, between))


def _yarn(base: Tensor, config: Model, scaling: RopeScaling, original: int) -> tuple[Tensor, float]:
    """Peng et al., arXiv 2309.00071: interpolate slow dimensions, keep fast ones, ramp between."""
    dim = config.rotary_size

    def dimension(rotations: float) -> float:
        return dim * log(original / (rotations * 2 * math.pi)) / (2 * log(config.rope_theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    stretched = base / scaling.factor * ramp + base * (1 - ramp)
    return stretched, _yarn_scale(scaling)


def _yarn_scale(scaling: RopeScaling) -> float:
    def scale(factor: float, multiplier: float = 1.0) -> float:
        return 0.1 * multiplier * log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return scale(scaling.factor, scaling.mscale) / scale(scaling.factor, scaling.mscale_all_dim)
    return scale(scaling.factor)
