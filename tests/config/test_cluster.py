"""Cluster files: servers in order, and errors that name file and key."""

from pathlib import Path

import pytest

from equigrad.config.cluster import Cluster, Server, load_cluster
from equigrad.errors import UserError

NODES = """\
[[nodes]]
name = "big"
count = 2
devices = 8
interface_mb_s = 463
inside_mb_s = 16384.0
[[nodes]]
name = "small"
count = 1
devices = 4
device = "t4"
interface_mb_s = 100
inside_mb_s = 5000
"""


def load(folder: Path, text: str) -> Cluster:
    (folder / "cluster.toml").write_text(text)
    return load_cluster(folder / "cluster.toml")


def test_servers_are_numbered_kind_by_kind(tmp_path: Path) -> None:
    assert load(tmp_path, NODES).servers == [
        Server("big-0", 8, 463.0, 16384.0), Server("big-1", 8, 463.0, 16384.0), Server("small-0", 4, 100.0, 5000.0),
    ]  # fmt: skip


def test_the_cluster_of_the_documentation_loads() -> None:
    assert len(load_cluster(Path(__file__).parents[2] / "docs" / "cluster.toml").servers) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("count = 2", "count = 0"),
            "cluster.toml: nodes.0.count: Input should be greater than or equal to 1 (given: 0)",
        ),
        (("devices = 4", "devices = 4.5"), "nodes.1.devices: Input should be a valid integer (given: 4.5)"),
        (("463", "nan"), "nodes.0.interface_mb_s: Input should be"),
        (("463", "-1"), "nodes.0.interface_mb_s: Input should be greater than 0 (given: -1)"),
        (("devices = 8", ""), "nodes.0.devices: Field required"),
        (("devices = 8", "device = 8"), "nodes.0.device: Input should be a valid string (given: 8)"),
        (("count = 2", "counts = 2"), "unknown key 'nodes.0.counts'; did you mean 'count'?"),
        (('"small"', '"big"'), "cluster.toml: two kinds of nodes are called 'big'"),
        ((NODES, ""), "cluster.toml: nodes: Field required"),
        ((NODES, "nodes = []"), "cluster.toml: nodes: List should have at least 1 item"),
        ((NODES, "nodes = ["), "cluster.toml: not valid TOML"),
        ((NODES, "speed = 3"), "unknown key 'speed'; keys: nodes"),
    ],
)
def test_what_is_wrong_is_told_with_file_and_key(change: tuple[str, str], message: str, tmp_path: Path) -> None:
    assert change[0] in NODES
    with pytest.raises(UserError) as error:
        load(tmp_path, NODES.replace(*change))
    assert message in str(error.value)


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no cluster file at"):
        load_cluster(tmp_path / "none.toml")
    with pytest.raises(UserError, match=r"is a folder$"):
        load_cluster(tmp_path)
