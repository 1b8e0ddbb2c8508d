"""An audit confirms what is so, finds what was changed and says where, and never confirms what it could not check."""

import json
import os
import shutil
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from equigrad.audit import replay
from equigrad.errors import UserError
from equigrad.trainer import Trainer
from tests.audit.runs import (
    Line,
    audit,
    audited_job,
    change_line,
    change_manifest,
    flip_bit,
    rechained,
    replace_in,
    rewrite,
    trajectory,
    write,
)
from tests.jobs import command, inside, start_command, write_job

FIRST = "first difference  "
WEIGHT = "model.layers.1.mlp.down_proj.weight"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


# What is confirmed


def test_a_whole_run_is_confirmed_from_its_seed_and_nothing_in_it_is_touched(copy: Path) -> None:
    before = contents(copy)
    code, told = audit(copy)
    assert code == 0, told
    assert "found again       steps 0..6, 7 of them with their tensors" in told
    assert "the initial state of step 0" in told
    assert contents(copy) == before


def test_steps_are_confirmed_from_the_nearest_checkpoint_on_another_layout(audited: Path, tmp_path: Path) -> None:
    done = command("audit", audited, "--steps", "6", "--layout", "tp2", "--json", tmp_path / "report.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the checkpoint of step 4" in done.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["verdict"], report["steps"], report["confirmed"]) == ("confirmed", [6, 6], [5, 6])
    assert (report["layout"], report["tensors"]) == ("tp2", 2)
    assert report["run"] == {"chain": trajectory(audited)[-1]["chain"], "job": trajectory(audited)[-1]["job"],
                             "first": 0, "last": 6}  # fmt: skip


def test_what_several_workers_find_is_told_like_what_one_finds(copy: Path) -> None:
    flip_bit(copy, 4, f"model.{WEIGHT}", hidden=True)
    done = command("audit", copy, "--steps", "5", "--layout", "tp2")
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{FIRST}step 4, parameters: {WEIGHT}" in done.stdout


def test_an_audit_goes_on_over_a_change_of_settings(copy: Path) -> None:
    inside("train", "--run", copy, "--resume", "--train.steps", "8", "--optim.lr", "0.002", "--batch.tokens", "150")
    code, told = audit(copy, "--steps", "5..8")
    assert code == 0, told
    assert "steps 5..8" in told
    change_line(copy, 8, lambda line: line.update(loss="0x1.0p+2"), hidden=True)
    assert audit(copy, "--steps", "5..8")[1].splitlines()[1] == f"{FIRST}step 8, loss"


def test_lines_without_tensors_are_confirmed_as_far_as_they_go(train: Callable[..., Path]) -> None:
    run = train(audit__every=4, train__steps=5, checkpoint__every=3)
    code, told = audit(run, "--steps", "4..5")
    assert code == 0, told
    assert "steps 0..5, 3 of them with their tensors" in told  # the checkpoint of step 3 is not bound by a digest


def test_the_first_step_of_a_trajectory_that_begins_later(train: Callable[..., Path]) -> None:
    run = train("--train.steps", "2", audit__enabled=False)
    inside("train", "--run", run, "--resume", "--train.steps", "4", "--audit.enabled", "true")
    code, told = audit(run)
    assert code == 0, told
    assert "found again       steps 3..4" in told  # how the state of step 2 came about, nobody can tell
    assert audit(run, "--steps", "1")[0] == 3
    shutil.rmtree(run / "checkpoints/step-00000002")
    code, told = audit(run)
    assert (code, "begins at step 2" in told) == (3, True)


def test_an_initial_state_comes_from_the_seed_and_from_nowhere_else(
    train: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever trains from other weights can save them as a checkpoint of step 0."""
    initialize = Trainer.initialize

    def other(trainer: Trainer, seed: int) -> None:
        initialize(trainer, seed)
        trainer.parameters[WEIGHT].tensor.mul_(-3)
        trainer.save()

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "initialize", other)
        run = train()
    assert (run / "checkpoints/step-00000000").is_dir()
    for steps in ([], ["--steps", "0..1"], ["--steps", "0"]):
        code, told = audit(run, *steps)
        assert (code, told.splitlines()[1]) == (1, f"{FIRST}step 0, parameters: {WEIGHT}")


def test_a_step_cannot_be_passed_over(copy: Path) -> None:
    """A line that tells nothing of its step, as the first one does, would be confirmed by the state alone."""

    def say_nothing(line: Line) -> None:
        line.update(batch=None, loss=None, grad_norm=None)

    change_line(copy, 4, say_nothing, hidden=True)
    for steps in ("0..3", "5..6", "4"):
        code, told = audit(copy, "--steps", steps)
        assert (code, told.splitlines()[1]) == (1, f"{FIRST}step 4, batch")


def test_every_checkpoint_of_the_steps_is_compared(copy: Path) -> None:
    flip_bit(copy, 6, f"model.{WEIGHT}", hidden=True)
    code, told = audit(copy)
    assert (code, told.splitlines()[1]) == (1, f"{FIRST}step 6, parameters: {WEIGHT}")
    assert audit(copy, "--steps", "0..5")[0] == 0


def test_a_checkpoint_of_a_line_without_digests_is_compared_with_the_step_done_again(
    train: Callable[..., Path],
) -> None:
    run = train(audit__every=4, checkpoint__every=2)
    assert audit(run)[0] == 0
    flip_bit(run, 2, f"model.{WEIGHT}", hidden=True)
    code, told = audit(run)
    assert (code, told.splitlines()[1]) == (1, f"{FIRST}step 2, parameters: {WEIGHT}")


@pytest.mark.parametrize(
    "sections", [["parameters", "optimizer", "grids", "routing"], ["optimizer"], ["grids"]], ids=str
)
@pytest.mark.parametrize("step", [4, 6])
def test_digests_that_were_taken_away_hide_nothing(copy: Path, sections: list[str], step: int) -> None:
    change_line(copy, step, lambda line: line.update(dict.fromkeys(sections)), hidden=True)
    for tensor in (f"model.{WEIGHT}", f"optim.exp_avg.{WEIGHT}", "grids.model.embed_tokens.weight/in"):
        flip_bit(copy, step, tensor, hidden=True)
    code, told = audit(copy)
    assert (code, f"{FIRST}step {step}, " in told) == (1, True), told


def test_the_first_state_always_has_its_digests(copy: Path) -> None:
    change_line(
        copy, 0, lambda line: line.update(dict.fromkeys(("parameters", "optimizer", "grids", "routing"))), hidden=True
    )
    assert audit(copy)[0] == 1


@pytest.mark.parametrize("step", [2, 6])
def test_what_a_checkpoint_would_go_on_from_is_compared_too(copy: Path, step: int) -> None:
    change_manifest(copy, step, lambda body: body["meta"].update(updates=1))
    code, told = audit(copy)
    assert (code, told.splitlines()[1]) == (1, f"{FIRST}step {step}, checkpoint: updates")


def test_one_byte_of_a_file_that_no_tensor_holds_is_found(copy: Path) -> None:
    (file,) = (copy / "checkpoints" / "step-00000006").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    size = struct.unpack("<Q", data[:8])[0]
    assert data[7 + size : 8 + size] == b" "  # padding of the header
    data[7 + size] = ord("\n")
    file.write_bytes(data)
    code, told = audit(copy)
    assert (code, "SHA-256" in told) == (1, True)


def test_boxes_that_overlap_or_leave_a_gap_are_no_checkpoint(copy: Path) -> None:
    """What a resume reads of them would depend on their order."""

    def twice(body: dict[str, Any]) -> None:
        boxes = body["tensors"][f"model.{WEIGHT}"]["boxes"]
        boxes.append(boxes[0])

    change_manifest(copy, 6, twice)
    code, told = audit(copy)
    assert (code, "overlap or leave a gap" in told) == (1, True)
    change_manifest(copy, 6, lambda body: body["tensors"][f"model.{WEIGHT}"].update(boxes=[]))
    assert audit(copy)[0] == 1


@pytest.mark.parametrize("change", ["shape", "dtype"])
def test_a_tensor_is_in_its_file_as_the_manifest_says(copy: Path, change: str) -> None:
    """Stretched or rounded to what the manifest says, it has the bits of the trajectory."""

    def spoil(tensors: dict[str, Tensor]) -> None:
        norm = tensors["optim.exp_avg.model.norm.weight"]
        tensors["optim.exp_avg.model.norm.weight"] = norm[None] if change == "shape" else norm.double()

    rewrite(copy, 4, spoil)
    for steps in ("0..6", "5..6"):
        code, told = audit(copy, "--steps", steps)
        assert (code, told.splitlines()[1]) == (1, "first difference  step 4, checkpoint")


def test_a_checkpoint_has_no_tensor_of_which_the_trajectory_does_not_tell(copy: Path) -> None:
    rewrite(copy, 6, lambda tensors: tensors.update(further=torch.ones(3)))
    boxes = [{"file": "rank-00000.safetensors", "offset": [0], "shape": [3]}]
    further = {"dtype": "float32", "shape": [3], "boxes": boxes}
    change_manifest(copy, 6, lambda body: body["tensors"].update(further=further))
    code, told = audit(copy)
    assert (code, told.splitlines()[1]) == (1, "first difference  step 6, checkpoint: further")


def test_a_trajectory_does_not_begin_before_the_first_step(copy: Path) -> None:
    lines = trajectory(copy)
    before = [line | {"step": -1} for line in lines[:2]]
    told = {"batch": "0" * 64, "loss": "0x0p+0", "grad_norm": "0x0p+0"}
    write(copy, rechained([*before, lines[1] | told, *lines[2:]]))
    assert audit(copy)[0] == 1


def test_checkpoints_from_the_base_on_are_compared(train: Callable[..., Path]) -> None:
    run = train(audit__every=3, checkpoint__every=2)
    flip_bit(run, 4, f"model.{WEIGHT}", hidden=True)
    code, told = audit(run, "--steps", "5..6")  # from the beginning: no checkpoint before has digests
    assert (code, told.splitlines()[1]) == (1, f"{FIRST}step 4, parameters: {WEIGHT}")


@pytest.mark.parametrize("when", ["list_checkpoints", "tree_of_files", "verify"])
def test_a_checkpoint_that_a_run_removes_meanwhile_accuses_nobody(
    copy: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    whole = getattr(replay, when)

    def removed(path: Path, *rest: Any) -> Any:
        found = whole(path, *rest) if when == "list_checkpoints" else None
        shutil.rmtree(copy / "checkpoints" / "step-00000002", ignore_errors=True)
        return found or whole(path, *rest)

    monkeypatch.setattr(replay, when, removed)
    assert audit(copy)[0] == 0


def test_a_second_name_for_a_step_is_no_checkpoint(copy: Path) -> None:
    folder = copy / "checkpoints"
    shutil.copytree(folder / "step-00000006", folder / "step-000000006")
    flip_bit(copy, 6, f"model.{WEIGHT}", hidden=True)
    assert audit(copy)[0] == 1


def test_a_report_is_not_written_into_the_run(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(copy)
    assert audit(copy, "--json", copy / "trajectory.jsonl")[0] == audit(copy, "--json", copy.parent)[0] == 2
    assert contents(copy) == before


def test_another_version_may_compute_otherwise(copy: Path) -> None:
    """It has other settings, or another arithmetic: no difference accuses the run."""
    lines = trajectory(copy)
    for line in lines:
        if line["kind"] == "job":
            line.update(version="0.0.1")
    write(copy, rechained(lines))
    assert audit(copy, "--steps", "1")[0] == 0
    change_line(copy, 1, lambda line: line.update(loss="0x1.0p+2"), hidden=True)
    code, told = audit(copy, "--steps", "1")
    assert code == 3
    assert "made by equigrad 0.0.1" in told
    for line in lines:
        if line["kind"] == "job":
            del line["settings"]["optim"]["eps"]
    write(copy, rechained(lines))
    code, told = audit(copy)
    assert code == 3
    assert "optim.eps" in told


def test_a_trajectory_that_is_no_file_keeps_nobody_waiting(copy: Path) -> None:
    (copy / "trajectory.jsonl").unlink()
    os.mkfifo(copy / "trajectory.jsonl")
    code, told = audit(copy)
    assert (code, "trajectory.jsonl is not a file" in told) == (3, True)


def test_a_job_that_is_no_file_keeps_nobody_waiting(copy: Path) -> None:
    (copy / "job.toml").unlink()
    os.mkfifo(copy / "job.toml")
    code, told = audit(copy)
    assert (code, "job.toml is not a file" in told) == (3, True)


@pytest.mark.parametrize("words", [("verify", "--numerics", "exact", "--layouts", "tp2", "--steps", "200"), ("audit",)])
def test_a_stop_ends_it(words: tuple[str, ...], copy: Path, tmp_path: Path) -> None:
    name, *more = words
    job = audited_job(copy, train__steps=200)
    what = write_job(job, tmp_path / "job.toml") if name == "verify" else copy
    more += ["--layout", "tp2"] if name == "audit" else []
    process = start_command(name, what, *more, env={"TMPDIR": str(tmp_path)}, start_new_session=True)
    while not list(tmp_path.glob("equigrad-launch-*/pid-*")):  # until there are workers
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, out + err
    assert "interrupted" in err
    assert "Traceback" not in err
    assert not {"equal", "confirmed", "FAILED"} & set(out.replace(":", " ").split())


def test_native_numerics_are_confirmed_on_the_same_machine_and_layout(train: Callable[..., Path]) -> None:
    run = train(numerics__kind="native", train__steps=3)
    assert audit(run) == audit(run, "--steps", "0..3")
    code, told = audit(run)
    assert code == 0, told
    change_line(run, 3, lambda line: line.update(loss="0x1.0p+2"), hidden=True)
    code, told = audit(run)
    assert code == 3
    assert "step 3, loss" in told
    assert "native numerics" in told
    change_line(run, 3, lambda line: line.update(batch="00"), hidden=True)  # which no rounding explains
    code, told = audit(run)
    assert (code, told.splitlines()[1]) == (1, f"{FIRST}step 3, batch")


# What is contradicted, and where


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize(
    ("tensor", "where"),
    [
        (f"model.{WEIGHT}", "parameters: "),
        (f"optim.exp_avg.{WEIGHT}", "optimizer: exp_avg."),
        (f"optim.exp_avg_sq.{WEIGHT}", "optimizer: exp_avg_sq."),
        ("grids.model.embed_tokens.weight/in", "grids: "),
    ],
)
def test_a_flipped_bit_of_a_checkpoint_is_found_by_the_name_of_its_tensor(
    copy: Path, tensor: str, where: str, hidden: bool
) -> None:
    flip_bit(copy, 4, tensor, hidden=hidden)
    code, told = audit(copy, "--steps", "5")
    name = tensor.split(".", 2 if tensor.startswith("optim") else 1)[-1]
    assert (code, told.splitlines()[1]) == (1, f"{FIRST}step 4, {where}{name}")


def _root(line: Line) -> None:
    line["parameters"]["root"] = "0" * 64


def _node(line: Line) -> None:
    line["optimizer"]["nodes"][f"exp_avg.{WEIGHT}"] = "0" * 64


EDITS: dict[str, tuple[Callable[[Line], Any], str]] = {
    "loss": (lambda line: line.update(loss="0x1.0p+2"), "loss"),
    "grad_norm": (lambda line: line.update(grad_norm="0x1.0p+2"), "grad_norm"),
    "batch": (lambda line: line.update(batch="0" * 64), "batch"),
    "data": (lambda line: line.update(data=["0" * 64]), "data: 0"),
    "parameters": (_root, "parameters: root"),
    "optimizer": (_node, f"optimizer: exp_avg.{WEIGHT}"),
    "missing tensor": (lambda line: line["grids"]["nodes"].popitem(), "grids: model.norm.weight/sum"),
    "more tensors": (lambda line: line["routing"]["nodes"].update(extra="0" * 64), "routing: extra"),
    "terminal": (lambda line: line["routing"]["nodes"].update({"\x1b[31m": ""}), "routing: ?[31m"),
    "no tensors": (lambda line: line.update(parameters={}), "parameters: nodes"),
    "tokens": (lambda line: line["progress"].update(tokens=1), "progress: tokens"),
    "updates": (lambda line: line["progress"].update(updates=True), "progress: updates"),
    "cursor": (lambda line: line["progress"].update(sources=[[1, 1]]), "progress: sources.0.0"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_changed_line_is_found_also_where_its_chain_is_made_anew(copy: Path, edit: str) -> None:
    change, where = EDITS[edit]
    change_line(copy, 5, change, hidden=False)
    code, told = audit(copy, "--steps", "6")  # the whole chain is checked
    assert (code, told.splitlines()[1]) == (1, f"{FIRST}step 5, chain")
    write(copy, rechained(trajectory(copy)))
    code, told = audit(copy, "--steps", "5..6")
    assert (code, told.splitlines()[1]) == (1, f"{FIRST}step 5, {where}")


def _format(line: Line) -> None:
    line["format"] = 0


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda lines: lines.pop(4), "step 4, {chain}"),
        (lambda lines: lines.insert(3, lines.pop(4)), "step 3, {chain}"),
        (lambda lines: lines.insert(4, lines[4]), "step 3, {chain}"),
        (lambda lines: lines.pop(0), "step 0, {chain}"),
        (lambda lines: lines[4].update(step=4), "step 4, {chain}"),
        (lambda lines: _format(lines[4]), "step 3, line"),
        (lambda lines: lines[4].pop("loss"), "step 3, line"),
        (lambda lines: lines[4].update(more=1), "step 3, line"),
        (lambda lines: lines[4].update(step="3"), "step 3, line"),
    ],
    ids=["deleted", "swapped", "doubled", "headless", "renumbered", "format", "field-gone", "field-more", "step-text"],
)
@pytest.mark.parametrize("hidden", [False, True])
def test_a_file_that_was_cut_up_is_found(
    copy: Path, change: Callable[[list[Line]], Any], where: str, hidden: bool
) -> None:
    lines = trajectory(copy)
    change(lines)
    write(copy, rechained(lines) if hidden else lines)
    code, told = audit(copy, "--steps", "1")
    where = where.format(chain="step" if hidden else "chain")
    assert (code, told.splitlines()[1]) == (1, f"{FIRST}{where}")


def test_a_line_that_is_cut_short_in_the_middle_is_found(copy: Path) -> None:
    lines = (copy / "trajectory.jsonl").read_bytes().splitlines(keepends=True)
    lines[4] = lines[4][:100] + b"\n"
    (copy / "trajectory.jsonl").write_bytes(b"".join(lines))
    code, told = audit(copy, "--steps", "1")
    assert (code, told.splitlines()[1]) == (1, f"{FIRST}step 3, line")


@pytest.mark.parametrize("steps", ["1..3", "5..6"], ids=["from the seed", "from a checkpoint"])
def test_another_text_is_found(train: Callable[..., Path], tmp_path: Path, steps: str) -> None:
    run = train()
    replace_in(tmp_path / "text.jsonl", "the age of wisdom", "the age of welcome")
    code, told = audit(run, "--steps", steps)
    assert (code, told.splitlines()[1]) == (1, f"{FIRST}step {'0' if steps == '1..3' else '4'}, data: 0")


@pytest.mark.parametrize("steps", ["2", "6"], ids=["from the seed", "from a checkpoint"])
def test_another_learning_rate_in_the_job_is_found(copy: Path, steps: str) -> None:
    replace_in(copy / "job.toml", "lr = 0.01", "lr = 0.011")
    code, told = audit(copy, "--steps", steps)
    assert (code, told.splitlines()[1]) == (1, f"{FIRST}job.toml: optim.lr")
    # Where job, settings, digests and chain are all made to agree, only doing the steps again tells.
    lines = trajectory(copy)
    lines[0]["settings"]["optim"]["lr"] = 0.011
    write(copy, rechained(lines))
    code, told = audit(copy, "--steps", steps)
    changed = 1 if steps == "2" else 5
    assert (code, told.splitlines()[1].startswith(f"{FIRST}step {changed}, parameters: ")) == (1, True), told


def test_another_seed_is_found_in_the_initial_state(copy: Path) -> None:
    replace_in(copy / "job.toml", "seed = 3", "seed = 4")
    lines = trajectory(copy)
    lines[0]["settings"]["seed"] = 4
    write(copy, rechained(lines))
    code, told = audit(copy, "--steps", "1")
    assert (code, "step 0, parameters: " in told) == (1, True)


@pytest.mark.parametrize(
    ("change", "sealed"),
    [
        (lambda body: body["meta"]["counters"].update(tokens=1), True),
        (lambda body: body["meta"].update(updates=3), True),
        (lambda body: body["meta"]["cursor"]["sources"][0].update(samples=0), True),
        (lambda body: body["meta"].pop("updates"), True),
        (lambda body: body["meta"]["cursor"]["order"].update(seed=4), True),
        (lambda body: body.update(meta=[]), True),
        (lambda body: body.update(step=2), True),
        (lambda body: body["meta"].update(updates=3), False),
    ],
    ids=["tokens", "updates", "cursor", "gone", "order", "malformed", "step", "seal"],
)
def test_a_changed_manifest_is_found(copy: Path, change: Callable[[dict[str, Any]], None], sealed: bool) -> None:
    change_manifest(copy, 4, change, sealed=sealed)
    code, told = audit(copy, "--steps", "5")
    assert (code, told.splitlines()[1].startswith(f"{FIRST}step 4, ")) == (1, True), told


# What cannot be verified


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda run: None, "steps 7..9 are not in the trajectory"),
        (lambda run: (run / "trajectory.jsonl").unlink(), "there is no trajectory.jsonl"),
        (lambda run: (run / "trajectory.jsonl").write_text(""), "no step yet"),
        (lambda run: (run / "trajectory.jsonl").write_text('{"format":2,"new":"things"}\n'), "a newer equigrad"),
        (lambda run: (run / "job.toml").unlink(), "no job.toml"),
    ],
    ids=["steps", "no trajectory", "empty", "newer", "no job"],
)
def test_what_is_not_there_cannot_be_verified(copy: Path, spoil: Callable[[Path], Any], why: str) -> None:
    spoil(copy)
    code, told = audit(copy, "--steps", "7..9" if "steps 7" in why else "6")
    assert (code, why in told) == (3, True), told


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda run: (run / "checkpoints/step-00000004/rank-00000.safetensors").unlink(), "is missing"),
        (lambda run: change_manifest(run, 4, lambda body: body.update(format=9)), "of a newer equigrad"),
        (lambda run: replace_in(run / "job.toml", "[data]", "[data]\nnew_key = 1"), "unknown key 'data.new_key'"),
        (lambda run: (run / "tokenizer/tokenizer.json").write_text("{}"), "tokenizer"),
    ],
    ids=["file", "newer", "key", "tokenizer"],
)
def test_what_cannot_be_opened_cannot_be_verified(copy: Path, spoil: Callable[[Path], Any], why: str) -> None:
    spoil(copy)
    code, told = audit(copy, "--steps", "5")
    assert (code, why in told) == (3, True), told


def test_without_the_text_nothing_can_be_verified(copy: Path, audited: Path) -> None:
    replace_in(copy / "job.toml", str(audited.parent), "/nowhere")
    code, told = audit(copy, "--steps", "5")
    assert (code, "/nowhere" in told) == (3, True), told


def test_steps_that_were_taken_off_the_end_are_not_in_it(copy: Path) -> None:
    write(copy, trajectory(copy)[:-2])
    assert audit(copy, "--steps", "5")[0] == audit(copy, "--steps", "4..6")[0] == 3
    code, told = audit(copy)
    assert (code, "step-00000006 is of a later step than the trajectory's last, 4" in told) == (3, True)
    shutil.rmtree(copy / "checkpoints" / "step-00000006")
    assert audit(copy)[1].startswith("confirmed: steps 0..4 of ")


def test_the_line_that_a_killed_run_was_writing_is_no_step_yet(copy: Path) -> None:
    file = copy / "trajectory.jsonl"
    file.write_bytes(file.read_bytes()[:-10])
    shutil.rmtree(copy / "checkpoints" / "step-00000006")  # it is written after the line
    code, told = audit(copy, "--steps", "6")
    assert (code, "which has 0..5" in told) == (3, True)
    assert audit(copy, "--steps", "5")[0] == 0


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), MemoryError(), UserError("?"), StopIteration()])
def test_whatever_goes_wrong_is_no_confirmation(copy: Path, error: Exception) -> None:
    with patch("equigrad.audit.replay.line_of", side_effect=error):
        assert audit(copy, "--steps", "5")[0] == 3


def test_workers_that_die_confirm_nothing(copy: Path) -> None:
    with patch("equigrad.parallel.launch.launch", return_value=1):
        code, told = audit(copy, "--steps", "5", "--layout", "tp2")
    assert (code, "without an answer" in told) == (3, True)


# What was given is wrong


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--steps", "5..4"], "neither a step nor a range"),
        (["--steps", "x"], "neither a step nor a range"),
        (["--steps", "1..2..3"], "neither a step nor a range"),
        (["--layout", "xp2"], "'xp2' is none of"),
        (["--layout", "ep2"], "ep"),
        (["--merge", "a.json"], "not both"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_words_are_told(audited: Path, words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit(audited, *words)[0] == 2
    assert why in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit(tmp_path / "nothing")[0] == audit()[0] == 2
    assert "expected a run" in capsys.readouterr().err


# A run may be anybody's


def test_nothing_is_unpickled_and_nothing_of_the_run_is_executed(copy: Path) -> None:
    with (
        patch("pickle.load", side_effect=AssertionError("pickle.load")),
        patch("pickle.loads", side_effect=AssertionError("pickle.loads")),
        patch("torch.load", side_effect=AssertionError("torch.load")),
    ):
        assert audit(copy, "--steps", "5")[0] == 0


@pytest.mark.parametrize("name", ["../../../secret", "/etc/passwd", "..", "a/b", "a\\b", "C:x", ""])
def test_a_manifest_cannot_name_files_elsewhere(copy: Path, name: str) -> None:
    def change(body: dict[str, Any]) -> None:
        body["files"][name] = body["files"].pop("rank-00000.safetensors")
        for tensor in body["tensors"].values():
            for box in tensor["boxes"]:
                box["file"] = name

    (copy.parent / "secret").write_bytes((copy / "checkpoints/step-00000004/rank-00000.safetensors").read_bytes())
    change_manifest(copy, 4, change)
    code, told = audit(copy, "--steps", "5")
    assert (code, "is not the name of a file" in told) == (1, True), told


def test_a_manifest_cannot_place_tensors_in_files_that_it_does_not_vouch_for(copy: Path) -> None:
    change_manifest(copy, 4, lambda body: body["tensors"][f"model.{WEIGHT}"]["boxes"][0].update(file="other"))
    code, told = audit(copy, "--steps", "5")
    assert (code, "not one of the checkpoint's files" in told) == (1, True), told


def test_a_link_does_not_lead_out_of_a_checkpoint(copy: Path) -> None:
    file = copy / "checkpoints/step-00000004/rank-00000.safetensors"
    file.rename(copy.parent / "elsewhere")
    file.symlink_to(copy.parent / "elsewhere")
    code, told = audit(copy, "--steps", "5")
    assert (code, "leads out of the checkpoint" in told) == (1, True), told


def test_what_a_run_left_in_a_cache_of_text_is_not_used(train: Callable[..., Path], tmp_path: Path) -> None:
    """The store of the text that was learned, under the key of the text that is there now."""
    run = train(data__cache=str(tmp_path / "cache"))
    (learned,) = (tmp_path / "cache").iterdir()
    text = tmp_path / "text.jsonl"
    replace_in(text, "the age of wisdom", "the age of welcome")
    inside("train", tmp_path / "job.toml", "--run", tmp_path / "other", "--train.steps", "1")
    (current,) = (folder for folder in (tmp_path / "cache").iterdir() if folder != learned)
    shutil.rmtree(current)
    learned.rename(current)
    assert audit(run, "--steps", "1")[0] == 1


def test_remote_data_sets_are_not_opened(copy: Path, audited: Path) -> None:
    source = str(audited.parent / "text.jsonl")
    replace_in(copy / "job.toml", source, "hf:somebody/something")
    code, told = audit(copy, "--steps", "1")
    assert (code, "may run code" in told) == (3, True)
