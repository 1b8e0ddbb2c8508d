"""How long ops take on a device. Knows ops and devices, and nothing of ranks.

    product      operations / rate + operands * bytes / bandwidth
    attention    operations / rate of attention in tiles
    elementwise  bytes / bandwidth

So the efficiency of a product grows with its size: bytes grow with the square where operations grow with the cube.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import log2

from equigrad.errors import UserError
from equigrad.plan.calibration import Calibration
from equigrad.plan.hardware import GB, TERA, Hardware
from equigrad.plan.ops import Op
from equigrad.plan.workload import Workload

FULL_HEAD = 128
"""Entries of a head from which on attention in tiles is as fast as it gets."""


@dataclass(frozen=True)
class Speed:
    """What one device does in a second: operations of products and of attention, and bytes moved; and how many times
    products move theirs."""

    products: float
    attention: float
    memory: float
    operands: float

    @classmethod
    def of(cls, hardware: Hardware, device: str, fitted: Calibration, work: Workload, fp8: bool = False) -> "Speed":
        """Attention is slower with small heads. In 8-bit floating point, linear layers gain what the peak does.
        ``UserError`` for attention that the device has no kernels of."""
        found = hardware.device(device)
        rate = hardware.product_rate(device) * fitted.product.value
        if fp8 and found.peak_fp8 is not None:
            rate *= found.peak_fp8.value / found.peak.value
        halvings = max(0.0, log2(FULL_HEAD / work.shape.head_size))
        share = fitted.flash_share(found.architecture)
        if work.attention == "flash3":
            if found.flash3 is None:
                raise UserError(f'attention "flash3": no rate is known for device {device!r}; choose "flash"')
            # A long run slows it down as it does products.
            share = found.flash3.value * fitted.product.value
        return cls(
            products=rate,
            attention=found.peak.value * TERA * share * fitted.half_head.value**halvings,
            memory=found.memory_bandwidth.value * GB * hardware.streaming.value,
            operands=fitted.operands.value,
        )

    def seconds(self, op: Op) -> tuple[float, float]:
        """Of the forward and of the backward pass."""
        rate = self.attention if op.part == "attention" else self.products
        times = self.operands if op.part == "products" else 1.0
        forward, backward = (times * moved / self.memory for moved in op.moved)
        return forward + op.flops / rate, backward + op.flops * op.backward / rate


def by_part(ops: Iterable[Op], speed: Speed) -> dict[str, tuple[float, float]]:
    """Seconds of forward and backward, added up by the ops' parts."""
    total: dict[str, tuple[float, float]] = {}
    for op in ops:
        forward, backward = speed.seconds(op)
        before = total.get(op.part, (0.0, 0.0))
        total[op.part] = before[0] + forward, before[1] + backward
    return total
