"""How long collectives take, by tier: latency, and bandwidth that grows with the message. Knows no workload.

A phase (an all-gather or a reduce-scatter) takes ``latency + V / b``, which is a bandwidth of b x / (x + b latency) for
a message of x bytes. Across nodes it moves through all links of the group's ranks in a node, inside and between nodes
at one time, so the slower tier decides. A bandwidth here is the link's times ``share``, which was calibrated.
"""

from dataclasses import dataclass
from math import ceil, log2
from typing import NamedTuple

from equigrad.config.layout import Layout
from equigrad.plan.hardware import GB, MICRO, Machine


class Group(NamedTuple):
    """So many ranks, of which so many share a node."""

    ranks: int
    per_node: int

    @property
    def nodes(self) -> int:
        return ceil(self.ranks / self.per_node)


def group(machine: Machine, ranks: int, stride: int) -> Group:
    """Ranks that lie ``stride`` apart, with nodes filled in rank order."""
    return Group(ranks, min(ranks, max(1, int(machine.per_node.value) // stride)))


@dataclass(frozen=True)
class Groups:
    """The groups of a layout on a machine: tensor ranks are neighbours, then context ranks, then data lanes."""

    tensor: Group
    context: Group
    shard: Group
    expert: Group
    replicate: Group
    pipeline: Group

    @classmethod
    def of(cls, layout: Layout, machine: Machine) -> "Groups":
        tp, shards = layout.tp, layout.dp_shard * layout.cp
        return cls(
            tensor=group(machine, tp, 1),
            context=group(machine, layout.cp, tp),
            shard=group(machine, shards, tp),
            expert=group(machine, layout.ep, tp),
            replicate=group(machine, layout.dp_replicate, tp * shards),
            pipeline=group(machine, layout.pp, tp * shards * layout.dp_replicate),
        )


@dataclass(frozen=True)
class Network:
    """A machine's links, with the share of their bandwidth that collectives reach."""

    machine: Machine
    share: float

    @property
    def inside(self) -> float:
        """Bytes per second of a rank inside its node."""
        return self.machine.inside.bandwidth.value * GB * self.share

    @property
    def between(self) -> float:
        """Bytes per second of a rank to other nodes."""
        return self.machine.between.bandwidth.value * GB * self.share

    def latency(self, group: Group) -> float:
        """Seconds of a phase with nothing to move."""
        inside = self.machine.inside.latency.value if group.per_node > 1 else 0.0
        return MICRO * (inside + self.machine.between.latency.value * log2(group.nodes))

    def phase(self, size: float, group: Group) -> float:
        """Seconds of an all-gather or reduce-scatter; ``size``: bytes of the whole tensor."""
        if group.ranks == 1:
            return 0.0
        own = size * (group.ranks - 1) / group.ranks / self.inside if group.per_node > 1 else 0.0
        nodes = group.nodes
        across = size * (nodes - 1) / nodes / (group.per_node * self.between)
        return self.latency(group) + max(own, across)

    def all_reduce(self, size: float, group: Group) -> float:
        """Seconds; ``size``: bytes of the tensor on each rank."""
        return 2 * self.phase(size, group)

    def all_to_all(self, size: float, group: Group) -> float:
        """Seconds; ``size``: bytes that each rank sends, evenly to all, itself included."""
        if group.ranks == 1:
            return 0.0
        across = size * (group.ranks - group.per_node) / group.ranks / self.between
        own = size * (group.per_node - 1) / group.ranks / self.inside
        return self.latency(group) + max(own, across)

    def send(self, size: float, group: Group) -> float:
        """Seconds until a neighbour in the group has so many bytes; the slowest pair counts."""
        if group.ranks == 1:
            return 0.0
        if group.nodes == 1:
            return MICRO * self.machine.inside.latency.value + size / self.inside
        return MICRO * self.machine.between.latency.value + size / self.between
