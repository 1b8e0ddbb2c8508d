"""What a plan is made for: so many GPUs of one kind of machine, and the memory of each that may be planned with."""

from dataclasses import dataclass
from math import isclose

from equigrad.config.cluster import Cluster, Nodes
from equigrad.errors import UserError
from equigrad.plan.hardware import GB, GIB, Hardware, hardware

MEMORY_SHARE = 0.9
"""Of a device's memory. Estimates have been off by up to a tenth where they are validated (``docs/plan.md``), and what
the allocator loses between tensors is not in them."""


@dataclass(frozen=True)
class Target:
    """Example: ``target(load_cluster(path))`` of 16 servers with eight H100 has 128 GPUs of ``dgx_h100``.

    machine: its name in ``known``
    memory:  bytes of one device that a rank may take
    known:   the data files, where nodes and links of the machine are those of the cluster
    changed: how these differ from the machine's own, on which the model was tested; empty: they do not
    """

    machine: str
    gpus: int
    memory: float
    known: Hardware
    changed: str


def target(cluster: Cluster, share: float = MEMORY_SHARE) -> Target:
    """``UserError`` for clusters of several kinds of nodes, and as ``target_of``."""
    if len(cluster.nodes) > 1:
        names = ", ".join(nodes.name for nodes in cluster.nodes)
        raise UserError(f"the cluster has several kinds of nodes ({names}); plans are made for one kind at a time")
    return target_of(cluster.nodes[0], share)


def target_of(nodes: Nodes, share: float = MEMORY_SHARE) -> Target:
    """One kind of nodes. ``UserError`` for nodes without a device that is known, and for impossible shares."""
    if not 0 < share <= 1:
        raise UserError(f"--memory-share must be more than 0 and at most 1, not {share:g}")
    known = hardware()
    machines = ", ".join(known.machines)
    if nodes.device is None:
        raise UserError(f"nodes {nodes.name!r} name no device; set nodes.device to one of {machines}")
    if nodes.device not in known.machines:
        raise UserError(f"nodes {nodes.name!r}: no machine is called {nodes.device!r}; there are {machines}")
    machine = known.machines[nodes.device]
    found = {
        "devices of a node": (machine.per_node, float(nodes.devices)),
        "inside a node": (machine.inside.bandwidth, nodes.inside_mb_s * 1e6 / GB),
        # A node's interface is shared by its devices.
        "between nodes": (machine.between.bandwidth, nodes.interface_mb_s * 1e6 / GB / nodes.devices),
    }
    changed = ", ".join(
        f"{what}: {value:g} {constant.unit} instead of {constant.value:g}"
        for what, (constant, value) in found.items()
        if not isclose(value, constant.value, rel_tol=1e-6)
    )
    per_node, inside, between = (
        constant.model_copy(update={"value": value, "source": "the cluster's file"})
        for constant, value in found.values()
    )
    own = machine.model_copy(
        update={
            "per_node": per_node,
            "inside": machine.inside.model_copy(update={"bandwidth": inside}),
            "between": machine.between.model_copy(update={"bandwidth": between}),
        }
    )
    known = known.model_copy(update={"machines": known.machines | {nodes.device: own}})
    memory = share * known.device(machine.device).memory.value * GIB
    return Target(nodes.device, nodes.count * nodes.devices, memory, known, changed)
