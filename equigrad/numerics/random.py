"""Initial weights from a counter: element ``i`` of the tensor named ``n`` under seed ``s`` is a function of (s, n, i).

So every rank, whatever its shard, and every machine draw the same numbers. The generator is SplitMix64 (Steele, Lea and
Flood 2014); a normal value is the centred sum of twelve 16-bit uniforms (Irwin-Hall), which is integer arithmetic and
two float64 operations, hence the same bits everywhere. It is bounded by six standard deviations.
"""

import hashlib

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_CHUNK = 1 << 18  # elements at a time: the int64 temporaries stay in cache


def key(seed: int, name: str) -> int:
    """64-bit key of a stream of numbers."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little")


def signed(value: int) -> int:
    """An unsigned 64-bit constant as the int64 of the same bits."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: int64 has only the arithmetic one."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def splitmix64(counter: Tensor, stream: int | Tensor) -> Tensor:
    """Output number ``counter`` (int64, from 0) of SplitMix64 seeded with ``stream``: 64 random bits as int64. Streams
    may differ: then they are int64 of the same bits (``signed``)."""
    x = (counter + 1) * signed(_GOLDEN) + (stream if isinstance(stream, Tensor) else signed(stream))
    x = (x ^ _shift_right(x, 30)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def uniform(counter: Tensor, stream: int | Tensor) -> Tensor:
    """Number ``counter`` of a stream, float64 from [0, 1): a multiple of 2^-53."""
    return _shift_right(splitmix64(counter, stream), 11).double() * 2.0**-53


def _normal(index: Tensor, stream: int) -> Tensor:
    """Standard normal values (float64) for element numbers ``index``."""
    total = torch.zeros_like(index)
    for word in range(3):
        bits = splitmix64(index * 3 + word, stream)
        for shift in (0, 16, 32, 48):
            total += (bits >> shift) & 0xFFFF
    # Twelve uniforms on {0, ..., 65535}/65536: mean 6 - 12/131072, variance 1 up to 2^-32.
    return (total.double() - 12 * 65535 / 2) / 65536


@torch.no_grad()
def fill_normal(
    local: Tensor, std: float, seed: int, name: str, shape: tuple[int, ...], offset: tuple[int, ...]
) -> None:
    """Fill ``local``, the box at ``offset`` of the global tensor ``name`` of ``shape``, with N(0, std^2)."""
    if local.numel() == 0:
        return
    stream = key(seed, name)
    index = torch.zeros((), dtype=torch.int64, device=local.device)
    for start, extent, size in zip(offset, local.shape, shape, strict=True):
        index = index[..., None] * size + torch.arange(start, start + extent, device=local.device)
    flat = index.reshape(-1)
    values = torch.cat([(_normal(part, stream) * std).to(local.dtype) for part in flat.split(_CHUNK)])
    local.copy_(values.view(local.shape))
