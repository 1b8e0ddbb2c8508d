"""A run says the same of its steps on any layout, and goes on with it after an interruption."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from equigrad.audit import trajectory as format
from equigrad.audit.recorder import line_of
from tests.audit.runs import audited_job, change_line, trajectory
from tests.jobs import command, inside, make_trainer, summary, tiny_job


def test_the_last_line_tells_the_parameters_of_the_summary(audited: Path) -> None:
    lines = trajectory(audited)
    assert [(line["kind"], line["step"]) for line in lines] == [("job", 0), *(("step", n) for n in range(7))]
    assert lines[-1]["parameters"]["root"] == summary(audited)["parameter_digest"]
    metrics = [json.loads(text) for text in (audited / "metrics.jsonl").read_text().splitlines()]
    losses = {r["step"]: r["loss"].hex() for r in metrics if r["kind"] == "step"}
    assert {line["step"]: line["loss"] for line in lines[2:]} == losses


@pytest.mark.parametrize("layout", [["--layout.dp_shard", "2"], ["--layout.tp", "2"]], ids=" ".join)
def test_the_trajectory_is_the_same_on_any_layout_bit_for_bit(audited: Path, tmp_path: Path, layout: list[str]) -> None:
    done = command(
        "train", audited.parent / "job.toml", "--run", tmp_path / "run", *layout, "--batch.packing", "first_fit"
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/trajectory.jsonl").read_bytes() == (audited / "trajectory.jsonl").read_bytes()


def test_a_killed_run_that_goes_on_elsewhere_has_the_same_trajectory(audited: Path, copy: Path) -> None:
    shutil.rmtree(copy / "checkpoints/step-00000006")
    (copy / "summary.json").unlink()
    with (copy / "trajectory.jsonl").open("a") as file:
        file.write('{"batch":"half a li')
    done = command("train", "--run", copy, "--resume", "--layout.tp", "2")
    assert done.returncode == 0, done.stderr
    assert (copy / "trajectory.jsonl").read_bytes() == (audited / "trajectory.jsonl").read_bytes()


def test_other_settings_are_told_where_a_run_goes_on_with_them(copy: Path) -> None:
    (copy / "summary.json").unlink()
    inside("train", "--run", copy, "--resume", "--train.steps", "8", "--optim.lr", "0.002")
    jobs = [line for line in trajectory(copy) if line["kind"] == "job"]
    assert [(line["step"], line["settings"]["optim"]["lr"]) for line in jobs] == [(0, 0.01), (6, 0.002)]


def test_more_steps_of_the_same_schedule_are_the_same_job(copy: Path) -> None:
    inside("train", "--run", copy, "--resume", "--train.steps", "7")
    assert [line["step"] for line in trajectory(copy)] == [0, *range(8)]


def test_a_run_that_is_audited_from_now_on_begins_with_the_step_it_resumes_from(train: Callable[..., Path]) -> None:
    run = train("--train.steps", "2", audit__enabled=False)
    assert not (run / "trajectory.jsonl").exists()
    inside("train", "--run", run, "--resume", "--train.steps", "4", "--audit.enabled", "true")
    assert [(line["kind"], line["step"]) for line in trajectory(run)] == [("job", 2), *(("step", n) for n in (2, 3, 4))]
    inside("train", "--run", run, "--resume", "--train.steps", "5", "--audit.enabled", "false")
    inside("train", "--run", run, "--resume", "--train.steps", "6", "--audit.enabled", "true")
    assert [line["step"] for line in trajectory(run)] == [5, 5, 6]
    assert (run / "trajectory-before-00000005.jsonl").exists()


def test_tensors_are_digested_at_every_nth_step_and_the_last(train: Callable[..., Path]) -> None:
    run = train(audit__every=4, train__steps=5)
    found = {line["step"]: format.has_tensors(line) for line in trajectory(run)[1:]}
    assert found == {0: True, 1: False, 2: False, 3: False, 4: True, 5: True}


@pytest.mark.parametrize("hidden", [False, True])
def test_a_run_does_not_go_on_with_a_trajectory_that_was_changed(
    copy: Path, capsys: pytest.CaptureFixture[str], hidden: bool
) -> None:
    from equigrad.cli import main

    change_line(copy, 6, lambda line: line["progress"].update(updates=5), hidden=hidden)
    job = (copy / "job.toml").read_bytes()
    assert main(["train", "--run", str(copy), "--resume", "--train.steps", "7"]) == 2
    told = capsys.readouterr().err
    assert f"step 6, {'progress: updates' if hidden else 'chain'}" in told
    assert "move the file away" in told
    assert (copy / "job.toml").read_bytes() == job


def test_every_tensor_of_a_checkpoint_is_in_a_line(tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    trainer = make_trainer(tiny_job(numerics__kind="exact", model__experts=experts), tmp_path)
    line = line_of(trainer, tensors=True)
    names = {prefix + name for section, prefix in format.SECTIONS.items() for name in line[section]["nodes"]}
    assert names == set(trainer.state())
    assert line["routing"]["nodes"]


def test_settings_hold_what_decides_the_numbers_and_nothing_else(tmp_path: Path) -> None:
    def job(**changes: object) -> str:
        return format.sha(format.settings(audited_job(tmp_path, **changes)))

    same = {"name": "other", "layout__tp": 2, "observe__log_every": 2, "checkpoint__every": 1, "audit__every": 2,
            "batch__packing": "first_fit", "batch__row_tokens": 48, "train__steps": 9, "train__eval_every": 1,
            "numerics__compile": True, "data__cache": "elsewhere"}  # fmt: skip
    other = {"seed": 4, "optim__lr": 0.1, "batch__tokens": 201, "model__hidden_size": 64, "data__context": 47,
             "optim__schedule_steps": 9, "numerics__dtype": "bfloat16", "train__non_finite": "skip"}  # fmt: skip
    assert {key: job(**{key: value}) == job() for key, value in (same | other).items()} == (
        dict.fromkeys(same, True) | dict.fromkeys(other, False)
    )
    native = {"numerics__kind": "native"}
    assert job(**native) != job(**native, batch__packing="first_fit")


def test_a_job_is_made_again_from_its_settings(tmp_path: Path) -> None:
    job, later = audited_job(tmp_path), audited_job(tmp_path, optim__lr=0.5, batch__samples=3, batch__tokens=None)
    found = format.job_with(job, json.loads(format.canonical(format.settings(later))), {"tp": 2})
    assert (found.optim.lr, found.batch.samples, found.batch.tokens, found.layout.tp) == (0.5, 3, None, 2)
    assert found.data.sources == job.data.sources
