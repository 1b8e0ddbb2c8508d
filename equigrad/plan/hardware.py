"""What is known of devices, links and nodes: data files, each value with its provenance. Knows no workload.

A machine is a kind of node: so many devices, what links them inside the node and what links nodes.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

from pydantic import BaseModel

from equigrad.config.base import Section
from equigrad.errors import UserError
from equigrad.plan.datafile import checked

DATA = Path(__file__).parent / "data"
GB, GIB, TERA, MICRO = 1e9, float(1 << 30), 1e12, 1e-6


class Constant(Section):
    """A number, its unit, and where it was read: a repository and path, an address, or a publication.

    Example: ``Constant(value=450, unit="GB/s", source="stas00/ml-engineering, network/README.md: NVLink 4")``
    """

    value: float
    unit: str
    source: str

    @property
    def assumed(self) -> bool:
        """Whether nobody published it. Its source says so, and with this word first."""
        return self.source.startswith("assumption")


class Device(Section):
    """One accelerator."""

    architecture: str
    peak: Constant
    """Dense bfloat16, of the vendor."""
    peak_fp8: Constant | None = None
    """Dense 8-bit floating point, of the vendor."""
    product: Constant | None = None
    """The fastest bfloat16 matrix product that was measured; where it is unknown, the architecture's share of the peak
    is taken from a device that has it."""
    flash3: Constant | None = None
    """Of the peak, what attention in tiles reaches with kernels that were made for the architecture."""
    memory: Constant
    memory_bandwidth: Constant
    host_link: Constant
    """To the host's memory, one direction."""


class Link(Section):
    """What connects devices: bandwidth of one device in one direction, and latency of one phase of a collective (an
    all-gather, say); an all-reduce has two. Between nodes latency is that of each doubling of their number."""

    bandwidth: Constant
    latency: Constant


class Machine(Section):
    """A kind of node, and the network that connects many of it."""

    device: str
    per_node: Constant
    inside: Link
    between: Link


class Measured(Section):
    """Measured bus bandwidth of an all-reduce, by size of the message."""

    name: str
    ranks: int
    nodes: int
    source: str
    mib: list[float]
    gb_s: list[float]


class Hardware(Section):
    """Everything in ``hardware.json``."""

    devices: dict[str, Device]
    machines: dict[str, Machine]
    measured: list[Measured]
    streaming: Constant
    """Of the memory bandwidth, what a kernel that only reads and writes reaches."""

    def machine(self, name: str) -> Machine:
        """``UserError`` for a machine that is not there."""
        if name not in self.machines:
            raise UserError(f"no machine is called {name!r}; there are {', '.join(self.machines)}")
        return self.machines[name]

    def device(self, name: str) -> Device:
        """``UserError`` for a device that is not there."""
        if name not in self.devices:
            raise UserError(f"no device is called {name!r}; there are {', '.join(self.devices)}")
        return self.devices[name]

    def product_rate(self, name: str) -> float:
        """FLOP/s of the best matrix product on a device: measured, or in a relative's proportion to the peak."""
        device = self.device(name)
        if device.product is not None:
            return device.product.value * TERA
        for other in self.devices.values():
            if other.architecture == device.architecture and other.product is not None:
                return device.peak.value * TERA * other.product.value / other.peak.value
        raise UserError(f"device {name!r}: no device of architecture {device.architecture!r} has a measured product")


@cache
def hardware(path: Path = DATA / "hardware.json") -> Hardware:
    """The data file, checked. ``UserError`` where it is not what it should be."""
    return checked(Hardware, path)


def constants(tree: BaseModel, at: str = "") -> Iterator[tuple[str, Constant]]:
    """Every constant in a tree of sections, with its dotted name."""
    if isinstance(tree, Constant):
        yield at, tree
        return
    for name in type(tree).model_fields:
        value, here = getattr(tree, name), f"{at}.{name}".lstrip(".")
        children = value.items() if isinstance(value, dict) else [(None, value)]
        for key, child in children:
            if isinstance(child, BaseModel):
                yield from constants(child, here if key is None else f"{here}.{key}")
