"""Published tables: read as they were published, each row with its source, by their own count of operations."""

import json

import pytest

from equigrad.plan.hardware import DATA, TERA, hardware
from equigrad.plan.published import SHAPES, runs, tuned
from equigrad.plan.step import step


def lines(name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


def test_every_table_is_there_with_its_rows() -> None:
    tables = [run.table for run in runs()]
    counts = {table: tables.count(table) for table in dict.fromkeys(tables)}
    assert counts == {
        "llm-foundry H100": 52, "llm-foundry H100 FP8": 10, "llm-foundry A100": 78, "llm-foundry A100 80GB": 61,
            "Megatron SC21": 10, "Sailor": 6,
        "torchtitan H100": 4, "torchtitan H100 FP8": 14, "torchtitan A100": 3, "NeMo 24.07 H100 FP8": 7,
        "Megatron 2022": 8,
    }  # fmt: skip


def test_a_run_has_as_many_ranks_as_its_row_has_gpus() -> None:
    own = [run for run in runs() if run.table.startswith("llm-foundry")]
    assert [run.work.layout.world_size for run in own] == [row["gpus"] for row in lines("fsdp_runs.jsonl")]
    further = [run for run in runs() if run.table.startswith(("torchtitan", "NeMo", "Megatron 2022"))]
    rows = lines("further_runs.jsonl")
    assert [run.work.layout.world_size for run in further] == [row["gpus"] for row in rows]
    assert [run.work.tokens for run in further] == [row["global_batch"] * row["sequence"] for row in rows]  # type: ignore[operator]
    assert all("/" in str(row["source"]) for row in rows)  # a repository and a path
    assert [run.assumed for run in further] == [row.get("assumed", "") for row in rows]


@pytest.mark.parametrize(("name", "full", "selective"), [
    ("gpt-22b", 1.42, 1.10), ("gpt-175b", 18.13, 13.75), ("gpt-530b", 49.05, 37.83), ("gpt-1t", 94.42, 71.49),
])  # fmt: skip
def test_seconds_of_megatron_2022_are_those_of_table_5(name: str, full: float, selective: float) -> None:
    for recompute, seconds in (("block", full), ("selective", selective)):
        (run,) = [run for run in runs() if run.name.startswith(f"{name} ") and run.work.recompute == recompute]
        assert run.seconds == pytest.approx(seconds, rel=1e-4)


def test_utilisation_is_the_published_one() -> None:
    """llm-foundry counts a table of positions as a weight that multiplies, which is some per cent of small models."""
    own = [run for run in runs() if run.table.startswith("llm-foundry")]
    for run, row in zip(own, lines("fsdp_runs.jsonl"), strict=True):
        peak = hardware().device(str(row["gpu"])).peak.value * TERA * (2 if run.work.fp8 else 1)
        mfu = run.work.tokens / run.seconds / run.work.layout.world_size
        mfu *= (run.work.shape.model_flops(run.work.sequence) + 6 * run.work.sequence * run.work.shape.hidden) / peak
        assert 100 * mfu == pytest.approx(row["mfu_percent"], rel=0.01), run.name


@pytest.mark.parametrize(("name", "published"), [("gpt-22b", 41.5), ("gpt-175b", 51.4), ("gpt-530b", 56.0),
                                                  ("gpt-1t", 56.3)])  # fmt: skip
def test_seconds_of_megatron_2022_are_those_of_its_published_utilisation(name: str, published: float) -> None:
    (run,) = [run for run in runs() if run.name.startswith(f"{name} ") and run.work.recompute == "selective"]
    done = run.work.tokens * SHAPES[name].model_flops(2048) / run.seconds / run.work.layout.world_size
    assert 100 * done / 312e12 == pytest.approx(published, rel=0.005)


def test_what_a_table_leaves_open_is_taken_as_the_fastest_that_fits() -> None:
    run = next(run for run in runs() if run.table == "Megatron SC21" and run.work.layout.pp == 4)
    other = tuned(run.work, run.machine)
    assert other == run.work
    for rows in (1, 2, 4):
        samples = run.work.micro_batch * run.work.micro_batches
        slower = run.work.__class__(**{**run.work.__dict__, "micro_batch": rows, "micro_batches": samples // rows})
        assert step(slower, run.machine).seconds >= step(run.work, run.machine).seconds
