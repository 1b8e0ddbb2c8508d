"""The machines that jobs run on: servers with devices, and the network that joins them. A TOML file of its own."""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator

from equigrad.config.base import Section
from equigrad.config.load import read_toml
from equigrad.errors import UserError

MOST_SERVERS = 1 << 16
MOST_DEVICES = 1 << 10
"""Of one server: far more than any has."""


class Nodes(Section):
    """Servers of one kind."""

    name: str = Field(min_length=1)
    """Of the kind; the servers are called ``name-0``, ``name-1``, and so on."""
    count: int = Field(ge=1, le=MOST_SERVERS)
    """How many there are."""
    devices: int = Field(ge=1, le=MOST_DEVICES)
    """GPUs, or other accelerators, of each."""
    device: str | None = None
    """Which device: a key of a device data file."""
    interface_mb_s: float = Field(gt=0)
    """What the network interface of a server carries in each direction, MB (10^6 bytes) a second."""
    inside_mb_s: float = Field(gt=0)
    """What one device of a server sends to another one of it, MB a second."""


@dataclass(frozen=True)
class Server:
    """One of the nodes; fields as of ``Nodes``."""

    name: str
    devices: int
    interface_mb_s: float
    inside_mb_s: float


class Cluster(Section):
    """All servers, kind by kind."""

    nodes: list[Nodes] = Field(min_length=1)
    """Kinds of servers, in the order in which servers are numbered."""

    @model_validator(mode="after")
    def _names_differ(self) -> "Cluster":
        names = [nodes.name for nodes in self.nodes]
        if again := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two kinds of nodes are called {again[0]!r}")
        return self

    def without(self, lost: Mapping[str, int]) -> "Cluster":
        """With so many servers fewer of each kind that is named. ``UserError`` for kinds that are not there, and where
        too few are."""
        counts = {nodes.name: nodes.count for nodes in self.nodes}
        for name, count in lost.items():
            if name not in counts:
                raise UserError(f"no kind of nodes is called {name!r}; there are {', '.join(counts)}")
            if not 0 <= count <= counts[name]:
                raise UserError(f"{count} nodes of {name!r} cannot be lost; there are {counts[name]}")
        left = [
            nodes.model_copy(update={"count": nodes.count - lost.get(nodes.name, 0)})
            for nodes in self.nodes
            if nodes.count > lost.get(nodes.name, 0)
        ]
        if not left:
            raise UserError("no node is left")
        return self.model_copy(update={"nodes": left})

    @property
    def servers(self) -> list[Server]:
        """Every server, in order."""
        return [
            Server(f"{nodes.name}-{number}", nodes.devices, nodes.interface_mb_s, nodes.inside_mb_s)
            for nodes in self.nodes
            for number in range(nodes.count)
        ]


def load_cluster(path: Path) -> Cluster:
    """The cluster of a TOML file.

    Raises ``UserError`` for a file that cannot be read, unknown keys, wrong types and impossible values.
    """
    try:
        return Cluster.model_validate(read_toml(path, "cluster"))
    except ValidationError as error:
        raise UserError("\n".join(_explain(e, path) for e in error.errors())) from None


def _explain(error: Any, path: Path) -> str:
    key, leaf = ".".join(map(str, error["loc"])), str(error["loc"][-1]) if error["loc"] else ""
    if error["type"] == "extra_forbidden":
        known = Nodes.model_fields if len(error["loc"]) > 1 else Cluster.model_fields
        close = get_close_matches(leaf, known, 1)
        return f"{path}: unknown key {key!r}" + (
            f"; did you mean {close[0]!r}?" if close else f"; keys: {', '.join(known)}"
        )
    message = error["msg"].removeprefix("Value error, ")
    given = error.get("input")
    shown = "" if isinstance(given, dict | list) else f" (given: {given!r})"
    return f"{path}: {key}: {message}{shown}" if key else f"{path}: {message}"
