"""Collectives: their limits for small and large messages, and which tier decides."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equigrad.config.layout import Layout
from equigrad.plan.collectives import Group, Groups, Network, group
from equigrad.plan.hardware import hardware

MACHINE = hardware().machine("dgx_a100")  # 8 GPUs a node, 300 GB/s inside, 25 GB/s each between nodes
NETWORK = Network(MACHINE, share=1.0)


def test_groups_lie_in_nodes_as_rank_order_has_it() -> None:
    groups = Groups.of(Layout(tp=4, dp_shard=4, pp=2), MACHINE)
    assert groups.tensor == Group(4, 4)
    assert groups.shard == Group(4, 2)  # ranks 0, 4 | 8, 12
    assert groups.pipeline == Group(2, 1)
    assert group(MACHINE, 16, 1) == Group(16, 8)


def test_a_large_message_gets_the_bandwidth_of_its_slowest_tier() -> None:
    size = 1e12
    assert NETWORK.phase(size, Group(8, 8)) == pytest.approx(size * 7 / 8 / 300e9, rel=1e-3)
    # All eight links of a node take part, so 200 GB/s.
    assert NETWORK.phase(size, Group(32, 8)) == pytest.approx(size * 3 / 4 / 200e9, rel=1e-3)
    assert NETWORK.phase(size, Group(4, 1)) == pytest.approx(size * 3 / 4 / 25e9, rel=1e-3)
    assert NETWORK.all_reduce(size, Group(8, 8)) == 2 * NETWORK.phase(size, Group(8, 8))
    assert NETWORK.all_to_all(size, Group(32, 8)) == pytest.approx(size * 24 / 32 / 25e9, rel=1e-3)


def test_a_small_message_takes_the_latency() -> None:
    assert NETWORK.phase(1, Group(8, 8)) == pytest.approx(15.4e-6, rel=1e-3)
    assert NETWORK.phase(1, Group(32, 8)) == pytest.approx(15.4e-6 + 2 * 50.3e-6, rel=1e-3)
    assert NETWORK.phase(1, Group(1, 1)) == NETWORK.all_to_all(1, Group(1, 1)) == NETWORK.send(1, Group(1, 1)) == 0


@given(size=st.floats(1, 1e12), more=st.floats(1, 1e9), nodes=st.sampled_from([1, 2, 8]))
def test_time_grows_with_bytes_and_with_nodes(size: float, more: float, nodes: int) -> None:
    here, larger = Group(8 * nodes, 8), Group(16 * nodes, 8)
    for collective in (NETWORK.phase, NETWORK.all_reduce, NETWORK.all_to_all):
        assert collective(size + more, here) > collective(size, here)
        assert collective(size, larger) > collective(size, here)


def test_half_of_the_bandwidth_is_reached_where_latency_and_transfer_are_equal() -> None:
    size = 15.4e-6 * 300e9 * 8 / 7
    assert NETWORK.phase(size, Group(8, 8)) == pytest.approx(2 * 15.4e-6)
