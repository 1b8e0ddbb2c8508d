"""Shares of interfaces: feasible, fair, and what a ring asks for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equigrad.plan.cluster.network import max_min, mean_max_min, mean_proportional, proportional, ring_demand
from equigrad.plan.cluster.trace import Profile
from tests.plan.cluster.cases import fill, servers

RATES = st.floats(0.01, 1000)
LINKS = 5


@st.composite
def networks(draw: st.DrawFn) -> tuple[dict[int, float], dict[int, list[int]], list[float]]:
    """Demands, interfaces and capacities."""
    jobs = draw(st.lists(st.integers(0, 40), min_size=1, max_size=8, unique=True))
    links = st.lists(st.integers(0, LINKS - 1), min_size=1, max_size=LINKS, unique=True)
    return (
        {n: draw(RATES) for n in jobs},
        {n: draw(links) for n in jobs},
        draw(st.lists(RATES, min_size=LINKS, max_size=LINKS)),
    )


Network = tuple[dict[int, float], dict[int, list[int]], list[float]]


def used(rates: dict[int, float], links: dict[int, list[int]], link: int) -> float:
    return sum(rate for n, rate in rates.items() if link in links[n])


@given(networks(), st.sampled_from([max_min, proportional]))
def test_no_interface_carries_more_than_it_can_and_no_job_more_than_it_asks(network: Network, share: type) -> None:
    demands, links, capacity = network
    rates = share(demands, links, capacity)
    assert rates.keys() == demands.keys()
    assert all(0 < rates[n] <= demands[n] for n in rates)
    assert all(used(rates, links, link) <= capacity[link] * (1 + 1e-9) for link in range(LINKS))


@given(networks())
def test_every_job_has_its_demand_or_a_bottleneck(network: Network) -> None:
    """A full interface on which nobody gets more: that is max-min fairness (Bertsekas and Gallager, 6.5.2)."""
    demands, links, capacity = network
    rates = max_min(demands, links, capacity)
    for n, rate in rates.items():
        bottlenecks = [
            link
            for link in links[n]
            if used(rates, links, link) >= capacity[link] * (1 - 1e-9)
            and all(rate >= other * (1 - 1e-9) for m, other in rates.items() if link in links[m])
        ]
        assert bottlenecks or rate == demands[n]


@given(networks())
def test_filling_agrees_with_the_definition(network: Network) -> None:
    demands, links, capacity = network
    jobs = sorted(demands)
    slow = fill([demands[n] for n in jobs], [links[n] for n in jobs], capacity)
    rates = max_min(demands, links, capacity)
    assert [rates[n] for n in jobs] == pytest.approx(slow, rel=1e-9)


@given(networks())
def test_shares_do_not_depend_on_the_order_of_jobs(network: Network) -> None:
    demands, links, capacity = network
    for share in (max_min, proportional):
        assert share(demands, links, capacity) == share(dict(reversed(demands.items())), links, capacity)


def test_shares_by_hand() -> None:
    """Two jobs share interface 0, of which one is held back by interface 1: max-min hands on what it cannot use."""
    demands, links = {0: 90.0, 1: 90.0}, {0: [0], 1: [0, 1]}
    assert max_min(demands, links, [100.0, 20.0]) == {0: 80.0, 1: 20.0}
    assert proportional(demands, links, [100.0, 20.0]) == {0: 50.0, 1: 20.0}
    assert max_min({0: 10.0, 1: 300.0}, {0: [0], 1: [0]}, [100.0]) == {0: 10.0, 1: 90.0}
    assert proportional({0: 10.0, 1: 190.0}, {0: [0], 1: [0]}, [100.0]) == {0: 5.0, 1: 95.0}


@given(st.lists(st.tuples(RATES, st.floats(0, 1)), min_size=1, max_size=6), RATES)
def test_mean_shares_of_jobs_that_always_or_never_communicate_are_those_of_jobs_that_do(
    jobs: list[tuple[float, float]], capacity: float
) -> None:
    """And between the two a share lies between the two."""
    for whole, mean in ((max_min, mean_max_min), (proportional, mean_proportional)):
        demands = {n: demand for n, (demand, _) in enumerate(jobs)}
        rates = whole(demands, {n: [0] for n in demands}, [capacity])
        for name, presence in (("all", 1.0), ("none", 0.0), ("some", None)):
            known = [(demand, demand, part if presence is None else presence) for demand, part in jobs]
            shares = [min(share, demands[n]) for n, share in enumerate(mean(known, capacity))]
            alone = [min(demand, capacity) for demand, _ in jobs]
            together = [rates[n] for n in demands]
            if name != "some":
                assert shares == pytest.approx(together if name == "all" else alone, rel=1e-9)
            assert all(a * (1 - 1e-9) <= b <= c * (1 + 1e-9) for a, b, c in zip(together, shares, alone, strict=True))


def test_a_mean_share_by_hand() -> None:
    """Of two equal jobs, one of them there for half of the time: as if there were one job and a half."""
    assert mean_max_min([(90.0, 90.0, 1.0), (90.0, 90.0, 0.5)], 60.0) == [40.0, 30.0]
    assert mean_proportional([(90.0, 90.0, 1.0), (30.0, 30.0, 0.5)], 70.0) == [60.0, 17.5]


def test_a_ring_uses_interfaces_only_where_it_leaves_a_server() -> None:
    phases = Profile(compute_s=1.0, network_s=2.0, loading_s=0.0, volume_mb=300.0)
    cluster = servers(8, 8, 8, inside=120.0)
    assert ring_demand(phases, ((1, 4),), cluster) == (120.0, ())
    assert ring_demand(phases, ((0, 3), (2, 1)), cluster) == (120.0, (0, 2))
    assert ring_demand(phases, ((0, 1), (1, 1), (2, 1)), cluster) == (150.0, (0, 1, 2))
    assert ring_demand(Profile(1.0, 0.0, 0.0, 0.0), ((0, 1),), cluster) == (0.0, ())
