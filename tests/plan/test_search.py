"""The search for layouts: what brute force finds, nothing that training refuses, and few layouts computed for it."""

import json
import re
from functools import cache
from itertools import product
from math import inf
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equigrad.cli import main
from equigrad.commands.plan import planned, timeline
from equigrad.config import Job, load_job
from equigrad.config.cluster import Cluster
from equigrad.config.fit import misfits
from equigrad.config.layout import Layout
from equigrad.config.load import make_job, override_value, parse_overrides, set_key
from equigrad.plan.gates import state
from equigrad.plan.memory import exceeds, memory
from equigrad.plan.search import _Search, answers, search
from equigrad.plan.space import RECOMPUTE, Space, overrides, words
from equigrad.plan.step import step
from equigrad.plan.target import target
from equigrad.plan.workload import Workload

CONFIGS = Path(__file__).parents[2] / "configs"
DEGREES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
SMALL: dict[str, Any] = {
    "data": {"context": 2048},
    "batch": {"tokens": 4 * 2048, "row_tokens": 2048},
    "model": {"vocab_size": 32_000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 3,
              "num_attention_heads": 16, "num_key_value_heads": 2},
    "numerics": {"dtype": "bfloat16"},
}  # fmt: skip
SPARSE = {"experts": {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 1024}}


def cluster(gpus: int, device: str | None = "dgx_h100", **changes: object) -> Cluster:
    nodes = {"name": "n", "count": -(-gpus // 8), "devices": min(gpus, 8), "device": device,
             "interface_mb_s": 400_000.0 * min(gpus, 8) / 8, "inside_mb_s": 450_000.0}  # fmt: skip
    return Cluster.model_validate({"nodes": [nodes | changes]})


def small(model: dict[str, Any] | None = None, **batch: int) -> Job:
    tree = SMALL | {"model": SMALL["model"] | (model or {}), "batch": SMALL["batch"] | batch}
    return make_job(tree, "the test")


def bare(layout: Layout) -> Layout:
    """Its degrees alone."""
    return Layout.model_validate({name: getattr(layout, name) for name in DEGREES})


@cache
def naive(sparse: bool) -> list[tuple[Layout, float, float]]:
    """Degrees, seconds and bytes of every job that the configuration takes on 4 GPUs, asked one by one."""
    job, where, found = small(SPARSE if sparse else {}), target(cluster(4)), []
    for numbers in product((1, 2, 3, 4), repeat=6):
        degrees = Layout.model_validate(dict(zip(DEGREES, numbers, strict=True)))
        if degrees.world_size != 4 or degrees.data_lanes > 4:
            continue
        for kind, stages, strategy, reshard, reduces, rows, (recompute, every) in product(
            ("gpipe", "1f1b", "interleaved", "zero_bubble") if degrees.pp > 1 else ("1f1b",), range(1, 4),
            ("ring", "ulysses") if degrees.cp > 1 else ("ring",), (True, False), (True, False), range(1, 5), RECOMPUTE,
        ):  # fmt: skip
            # A pipeline reduces once a step, whatever is said; what else the cost model does not know.
            if (degrees.pp > 1 and reduces) or (kind == "zero_bubble" and (stages > 1 or recompute != "none")):
                continue
            layout = degrees.model_copy(
                update={"pp_schedule": kind, "pp_stages": stages, "cp_strategy": strategy,
                        "reshard_after_forward": reshard, "reduce_every_round": reduces})  # fmt: skip
            if any(misfits(layout, job.model)):
                continue
            changed = job.model_copy(
                update={"layout": layout, "batch": job.batch.model_copy(update={"row_tokens": 2048 * rows}),
                        "memory": job.memory.model_copy(update={"recompute": recompute, "recompute_every": every})}
            )  # fmt: skip
            work = Workload.of(changed)
            if answers(work, where)[2] != "withdrawn":
                found.append((degrees, step(work, where.machine, known=where.known).seconds, memory(work).total))
    return found


@pytest.mark.parametrize("share", [0.9, 0.06, 0.045])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_the_best_few_are_those_of_brute_force(sparse: bool, share: float) -> None:
    where = target(cluster(4), share)
    best: dict[Layout, tuple[float, float]] = {}
    for degrees, seconds, needs in naive(sparse):
        if needs <= where.memory:
            best[degrees] = min(best.get(degrees, (inf, inf)), (seconds, needs))
    found = search(small(SPARSE if sparse else {}), where, 3, unvalidated=True)
    assert [plan.seconds for plan in found.plans] == pytest.approx(sorted(one for one, _ in best.values())[:3])
    for plan in found.plans:
        assert (plan.seconds, plan.memory.value.total) == pytest.approx(best[bare(plan.work.layout)], rel=1e-12)


def test_where_nothing_fits_the_leanest_is_that_of_brute_force() -> None:
    found = search(small(), target(cluster(4), 1e-3), unvalidated=True)
    assert found.plans == []
    assert found.least is not None
    assert found.least[0] == min(needs for _, _, needs in naive(False))


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_no_layout_takes_less_than_its_bounds(data: st.DataObject) -> None:
    """Time and memory, over degrees, choices, orders, models and memories; relative rounding of 1e-9 aside."""
    models: list[dict[str, Any]] = [{}, SPARSE, {"tie_word_embeddings": False}]
    job = small(
        data.draw(st.sampled_from(models)),
        tokens=2048 * data.draw(st.integers(1, 40)),
    )
    where = target(cluster(data.draw(st.sampled_from([1, 2, 6, 8, 16]))))
    space = Space.of(job, where.gpus)
    seeker = _Search(space, where, 3, True)
    layouts = list(space.degrees())
    if not layouts:
        return
    layout = data.draw(st.sampled_from(layouts))
    choice = data.draw(st.sampled_from(list(space.choices(layout))))
    order = data.draw(st.sampled_from(list(space.orders(layout, choice))))
    works = list(space.works(layout, choice, order))
    assert seeker.bound(layout, choice) <= seeker.bound(layout, choice, order) * (1 + 1e-9)
    for work in works:
        assert seeker.bound(layout, choice, order) <= step(work, where.machine, known=where.known).seconds
        assert seeker.least_bytes(layout, choice) <= memory(work).total
        assert not exceeds(works[-1], memory(work).total * (1 + 1e-9))


@settings(deadline=None, max_examples=10)
@given(
    gpus=st.sampled_from([1, 3, 4, 8]),
    samples=st.integers(1, 70),
    rest=st.integers(0, 2047),
    sparse=st.booleans(),
    compiled=st.booleans(),
)
def test_training_takes_every_plan_and_means_the_same(
    gpus: int, samples: int, rest: int, sparse: bool, compiled: bool
) -> None:
    """Through the words of the command line, and as a job; even tokens that leave a short sample."""
    job = small(SPARSE if sparse else {}, tokens=2048 * samples + rest)
    job = job.model_copy(update={"numerics": job.numerics.model_copy(update={"compile": compiled})})
    for plan in search(job, target(cluster(gpus)), 4, unvalidated=True).plans:
        again = planned(job, plan)
        tree = job.model_dump(exclude_none=True)
        for key, text in parse_overrides(words(overrides(job, plan.work))):
            set_key(tree, key, override_value(key, text), {})
        assert make_job(tree, "the test") == again
        assert Workload.of(again) == plan.work
        assert again.layout.world_size == gpus
        assert plan.tokens <= plan.work.tokens


def test_plans_are_the_same_again_and_the_best_of_more() -> None:
    where = target(cluster(8))
    few, many = (search(small(), where, top, unvalidated=True).plans for top in (2, 6))
    assert few == many[:2]
    assert many == search(small(), where, 6, unvalidated=True).plans
    assert len({bare(plan.work.layout) for plan in many}) == len(many) == 6


def test_1024_gpus_take_few_computed_steps() -> None:
    """A bound on work, not on time: 8B on 128 nodes, all that may be asked, of a space of hundreds of thousands."""
    job, where = load_job(CONFIGS / "8b.toml", ["--batch.tokens", "8388608"]), target(cluster(1024))
    found = search(job, where, 5, unvalidated=True)
    assert len(found.plans) == 5
    assert found.timed < 1000


def test_each_plan_bears_its_state_and_what_is_withdrawn_bears_none() -> None:
    job = load_job(CONFIGS / "8b.toml")
    found, more = (search(job, target(cluster(8)), 30, unvalidated) for unvalidated in (False, True))
    assert {plan.state for plan in found.plans} <= {"validated"}
    for plan in more.plans:
        states = {state(plan.time.capability), state(plan.memory.capability)}
        assert "withdrawn" not in states
        assert plan.state == ("unvalidated" if "unvalidated" in states else "validated")
        assert plan.state == "validated" or "UNVALIDATED" in plan.time.label + plan.memory.label
    assert more.degrees > found.degrees
    assert sum(more.left_out.values()) < sum(found.left_out.values())
    assert all(why.startswith("withdrawn") for why in more.left_out)


def test_what_is_validated_of_a_machine_is_not_of_one_with_other_links() -> None:
    slow = target(cluster(8, inside_mb_s=25_000.0))
    assert "inside a node: 25 GB/s instead of 450" in slow.changed
    assert search(load_job(CONFIGS / "8b.toml"), slow).plans == []
    plans = search(load_job(CONFIGS / "8b.toml"), slow, unvalidated=True).plans
    assert plans
    assert {plan.state for plan in plans} == {"unvalidated"}
    fast = search(load_job(CONFIGS / "8b.toml"), target(cluster(8)), unvalidated=True).plans
    assert plans[0].seconds >= fast[0].seconds


def written(folder: Path, nodes: str) -> str:
    file = folder / "cluster.toml"
    file.write_text(f'[[nodes]]\nname = "n"\ncount = 1\ninterface_mb_s = 4e5\ninside_mb_s = 4.5e5\n{nodes}\n')
    return str(file)


EIGHT = 'devices = 8\ndevice = "dgx_h100"'


@pytest.mark.parametrize(
    ("nodes", "words", "told"),
    [
        ("devices = 8", [], "nodes 'n' name no device; set nodes.device to one of a100_40gb_roce"),
        ('devices = 8\ndevice = "abacus"', [], "no machine is called 'abacus'; there are"),
        ('device = "dgx_h100"', [], "devices: Field required"),
        ('devices = 0\ndevice = "dgx_h100"', [], "devices: Input should be greater than or equal to 1"),
        (EIGHT + '\n[[nodes]]\nname = "m"\ncount = 1\ndevices = 8\ninterface_mb_s = 1.0\ninside_mb_s = 1.0', [],
         "nodes 'm' name no device"),
        (EIGHT, ["--top", "0"], "--top must be at least 1"),
        (EIGHT, ["--memory-share", "1.5"], "--memory-share must be more than 0 and at most 1, not 1.5"),
        (EIGHT, ["--numerics.kind", "exact"], "the cost model knows native numerics in bfloat16"),
        (EIGHT, ["--batch.tokens", "none", "--batch.samples", "8"], "the cost model needs batch.tokens"),
        (EIGHT, ["--model.vocab_size", "none"], "set model.vocab_size"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_said(
    nodes: str, words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(CONFIGS / "8b.toml"), "--cluster", written(tmp_path, nodes), *words]) == 2
    assert told in capsys.readouterr().err


def test_a_model_that_fits_nowhere_is_told_by_how_much_and_what_would_fit_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", str(CONFIGS / "8b.toml"), "--cluster", written(tmp_path, EIGHT), "--model.num_hidden_layers", "48"]
    assert main([*words, "--unvalidated", "--memory-share", "0.3"]) == 2
    error = capsys.readouterr().err
    needs, may, over = map(float, re.findall(r"([\d.]+) GiB", error)[:3])
    assert over == pytest.approx(needs - may, abs=0.11)
    assert may == 24.0
    assert "it would fit on as many GPUs of" in error
    assert main([*words, "--unvalidated", "--memory-share", f"{needs / 80 + 0.01}"]) == 0


def test_what_is_written_is_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job, svg, found = (tmp_path / name for name in ("job.toml", "step.svg", "plans.json"))
    words = ["plan", str(CONFIGS / "8b.toml"), "--cluster", written(tmp_path, EIGHT), "--top", "30", "--unvalidated"]
    assert main([*words, "--write", str(job), "--svg", str(svg), "--json", str(found)]) == 0
    printed, plans = capsys.readouterr().out, json.loads(found.read_text())["plans"]
    command = next(line for line in printed.splitlines() if line.startswith("the best:")).split()[3:]
    assert command[0] == "train"
    assert load_job(Path(command[1]), command[2:]) == load_job(job)
    assert printed.count("UNVALIDATED") >= 2 * sum(plan["state"] == "unvalidated" for plan in plans)
    for plan in plans:
        assert sum(plan["seconds_by_part"].values()) == pytest.approx(plan["seconds"])
        assert plan["mfu"] * plan["tokens_per_day"] > 0
        assert f"{plan['mfu']:.1%}" in printed
    root = ElementTree.parse(svg).getroot()
    assert root.tag.endswith("svg")
    assert "validated" in svg.read_text().lower()


def test_the_timeline_of_a_pipeline_has_the_predicted_seconds() -> None:
    where = target(cluster(8))
    for plan in search(load_job(CONFIGS / "8b.toml"), where, 30, unvalidated=True).plans:
        if plan.work.layout.pp > 1:
            parts = plan.time.value.parts
            computed = sum(parts[name] for name in ("products", "attention", "elementwise", "recompute", "bubble"))
            assert timeline(plan, where).time == pytest.approx(computed + parts["context"] + parts["tensor"], rel=0.05)
            return
    raise AssertionError("no pipeline to draw")
