"""Two-hop against flat expert dispatch: the published break-evens, and what must hold for any fabric."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equigrad.errors import UserError
from equigrad.plan.dispatch import (
    Arrival,
    Fabric,
    Routing,
    break_even,
    byte_break_even,
    flat_seconds,
    step_gain,
    two_hop_seconds,
)
from equigrad.plan.gates import Withdrawn

# 16 groups of 8 ranks, 6 experts a token in 2 groups, hidden 2048 in bfloat16, 4,096 tokens a rank.
ROUTING = Routing(groups=16, ranks=8, chosen=2, quota=3, tokens=4096, row=2 * 2048)
FABRIC = Fabric(fast=100e9, latency={8: 0.111e-3, 16: 0.157e-3, 128: 0.378e-3}, half=54 * 1024)


@pytest.mark.parametrize(("row", "published"), [(0.0875e-6, 3.98), (0.012e-6, 1.49), (0.0, 1.10)])
def test_break_evens_are_the_published_ones(row: float, published: float) -> None:
    assert round(break_even(ROUTING, FABRIC, Arrival(row, 0.044e-3)), 2) == published


def test_the_break_even_of_bytes_is_the_published_one() -> None:
    assert byte_break_even(ROUTING) == pytest.approx((1 - 1 / 8) * 3 / 2)


def test_both_take_equally_long_at_the_break_even_and_two_hops_win_beyond() -> None:
    arrival = Arrival(0.03e-6, 0.044e-3)
    ratio = break_even(ROUTING, FABRIC, arrival)
    flat, two = (f(ROUTING, FABRIC, FABRIC.fast / ratio, *extra) for f, extra in BOTH(arrival))
    assert flat == pytest.approx(two, rel=1e-12)
    slower = FABRIC.fast / (ratio * 1.5)
    assert two_hop_seconds(ROUTING, FABRIC, slower, arrival) < flat_seconds(ROUTING, FABRIC, slower)


def BOTH(arrival: Arrival) -> list:  # type: ignore[type-arg]
    return [(flat_seconds, ()), (two_hop_seconds, (arrival,))]


@given(tokens=st.integers(1, 1 << 16), quota=st.integers(2, 8), chosen=st.integers(1, 8))
def test_without_latency_chain_and_small_messages_bytes_decide(tokens: int, quota: int, chosen: int) -> None:
    """But for what stays in the group, (n - 1) / n of each exchange, which the closed form leaves out."""
    routing = replace(ROUTING, tokens=tokens, quota=quota, chosen=chosen)
    free = Fabric(100e9, {8: 0.0, 16: 0.0, 128: 0.0}, 0.0)
    k, r = chosen * quota, 7 / 8
    exact = k * r / (k * 127 / 128 - chosen * 15 / 16)
    assert break_even(routing, free, Arrival(0, 0)) == pytest.approx(exact)
    assert break_even(routing, free, Arrival(0, 0)) == pytest.approx(byte_break_even(routing), rel=0.07)


@given(row=st.floats(0, 1e-6), more=st.floats(0, 1e-6))
def test_a_longer_chain_never_makes_two_hops_better(row: float, more: float) -> None:
    assert break_even(ROUTING, FABRIC, Arrival(row + more, 0)) >= break_even(ROUTING, FABRIC, Arrival(row, 0))


def test_one_expert_a_group_saves_no_copy() -> None:
    one = replace(ROUTING, quota=1)
    assert byte_break_even(one) == math.inf
    assert break_even(one, FABRIC, Arrival(1e-6, 0)) > 100


def test_latencies_between_the_measured_ones_lie_between_them_and_none_lies_beyond() -> None:
    assert FABRIC.latency_of(16) == 0.157e-3
    assert 0.157e-3 < FABRIC.latency_of(64) < 0.378e-3
    with pytest.raises(UserError, match="from 8 to 128 ranks, not for 256"):
        FABRIC.latency_of(256)


def test_what_two_hops_gain_a_step_is_withdrawn() -> None:
    with pytest.raises(Withdrawn, match="no published run"):
        step_gain(ROUTING, FABRIC, 25e9, Arrival(0, 0))
