"""The search on several kinds of nodes: close to brute force, never below baselines; and the command."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equigrad.cli import main
from equigrad.plan.mixed.baselines import baselines
from equigrad.plan.mixed.beam import search
from equigrad.plan.mixed.exhaustive import exhaustive, templates
from equigrad.plan.mixed.rule import Rule
from equigrad.plan.mixed.scorer import scorer
from equigrad.plan.mixed.train import costs, job
from tests.plan.mixed.cases import SPARSE, on, small

CONFIGS = Path(__file__).parents[3] / "configs"
MIXED = CONFIGS / "clusters" / "a100x16-h100x8.toml"
CLUSTER = """
[[nodes]]
name = "old"
device = "dgx_a100"
count = {old}
devices = 4
interface_mb_s = 100_000
inside_mb_s = 300_000
[[nodes]]
name = "new"
device = "dgx_h100"
count = 1
devices = 4
interface_mb_s = 200_000
inside_mb_s = 450_000
"""


@pytest.mark.parametrize("model", [{}, SPARSE], ids=["dense", "sparse"])
def test_pruned_brute_force_is_brute_force(model: dict[str, Any]) -> None:
    rule = Rule(on(small(**model), 0.06, dgx_h100=(1, 2), a100_40gb_roce=(1, 2)))
    every = [plan for template in templates(rule.costs.space) if (plan := rule.plan(template)) is not None]
    best = exhaustive(Rule(rule.costs))
    assert best is not None
    assert best.seconds == min(plan.seconds for plan in every)


@pytest.mark.parametrize("model", ["1B", "8B"])
def test_the_search_comes_within_two_hundredths_of_brute_force_on_a_cluster_that_was_not_learned(model: str) -> None:
    rule = Rule(costs(job(model), {"dgx_h100": (1, 3), "dgx_h200": (1, 4)}))
    found = search(rule).plans[0]
    best = exhaustive(rule, found)
    assert best is not None
    assert found.seconds <= 1.02 * best.seconds


@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_the_search_is_never_below_a_baseline(data: st.DataObject) -> None:
    machines = data.draw(st.lists(st.sampled_from(["dgx_a100", "dgx_h100", "a100_40gb_roce", "mi300x_node"]),
                                  min_size=2, max_size=3, unique=True))  # fmt: skip
    kinds = {name: (data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 3, 4, 8]))) for name in machines}
    model: dict[str, Any] = data.draw(st.sampled_from([{}, SPARSE]))
    share = data.draw(st.sampled_from([0.9, 0.06, 0.04]))
    of = on(small(data.draw(st.integers(1, 40)), **model), share, **kinds)
    found, known = search(Rule(of)), baselines(Rule(of))
    assert {name: plan.seconds for name, plan in found.baselines.items()} == {
        name: plan.seconds for name, plan in known.items()
    }
    if known:
        assert found.plans[0].seconds <= min(plan.seconds for plan in known.values())


def test_a_search_finds_the_same_in_every_run() -> None:
    first, again = (search(Rule(on(small(), dgx_h100=(1, 4), dgx_a100=(2, 4)))) for _ in range(2))
    assert [(plan.template, plan.seconds) for plan in first.plans] == [
        (plan.template, plan.seconds) for plan in again.plans
    ]


def test_the_scorer_says_where_it_is_from() -> None:
    assert "brute force" in scorer().source


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main(["plan", *map(str, words)])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_a_plan_says_that_it_is_unvalidated_wherever_it_is_shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    at = tmp_path / "plans.json"
    code, out, _ = run(capsys, CONFIGS / "8b.toml", "--cluster", MIXED, "--unvalidated", "--top", 2, "--json", at)
    assert code == 0
    assert out.count("UNVALIDATED") == 4
    assert "training has no layout for several kinds of nodes yet" in out
    told = json.loads(at.read_text())
    assert {plan["state"] for plan in told["plans"]} == {"unvalidated"}
    for plan in [*told["plans"], *told["baselines"].values()]:
        assert sum(plan["seconds_by_part"].values()) == pytest.approx(plan["seconds"])
        assert plan["seconds"] >= told["plans"][0]["seconds"]
        for pipeline in plan["pipelines"]:
            for stage in pipeline["stages"]:
                assert stage["bytes"] <= told["kinds"][stage["nodes"]]["memory_bytes"]


def test_a_plan_after_a_loss_is_that_of_the_smaller_cluster(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    whole, less = tmp_path / "whole.toml", tmp_path / "less.toml"
    whole.write_text(CLUSTER.format(old=3))
    less.write_text(CLUSTER.format(old=2))
    words = CONFIGS / "1b.toml", "--unvalidated"
    after = run(capsys, *words, "--cluster", whole, "--without", "old=1")
    assert after == run(capsys, *words, "--cluster", less)
    assert after != run(capsys, *words, "--cluster", whole)


def test_what_is_left_of_one_kind_is_planned_as_any_cluster_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = CONFIGS / "8b.toml", "--cluster"
    code, out, _ = run(capsys, *words, MIXED, "--without", "a100=2")
    assert (code, out) == run(capsys, *words, CONFIGS / "clusters" / "h100x8.toml")[:2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "unvalidated: throughput on A100 + H100, mixed nodes, up to 64 GPUs"),
        (["--unvalidated", "--without", "b200=1"], "no kind of nodes is called 'b200'; there are a100, h100"),
        (["--unvalidated", "--without", "h100=2"], "2 nodes of 'h100' cannot be lost; there are 1"),
        (["--unvalidated", "--without", "h100=1", "a100=2"], "no node is left"),
        (["--unvalidated", "--without", "h100"], "--without takes KIND=COUNT"),
        (["--unvalidated", "--memory-share", "0.02"], "no plan was found that fits"),
        (["--unvalidated", "--svg", "a.svg"], "training has no layout for several kinds yet"),
    ],
)
def test_what_is_wrong_is_said(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    code, out, err = run(capsys, CONFIGS / "8b.toml", "--cluster", MIXED, *words)
    assert (code, out) == (2, "")
    assert message in err
