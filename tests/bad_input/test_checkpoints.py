"""Checkpoints and model folders that are damaged, or that are not of this job."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from equigrad.cli import main
from tests.bad_input.given import TEXT, Bad, checkpoint, flip, job_from, truncate


def test_a_resumed_run_of_another_architecture_is_refused(bad: Bad, run: Path) -> None:
    text = (run / "job.toml").read_text()
    (run / "job.toml").write_text(text.replace("intermediate_size = 48", "intermediate_size = 64"))
    found = bad("train", "--run", run, "--resume", "--train.steps", "4")
    assert "checkpoint of another architecture" in found
    assert "mlp.down_proj.weight (float32 [32, 48] in it, float32 [32, 64] here)" in found
    for words in (["eval", run], ["generate", run], ["train", job_from(run), "--run", "new"]):
        assert "checkpoint of another architecture" in bad(*words)


def test_a_resumed_run_cannot_change_what_its_state_means(bad: Bad, run: Path) -> None:
    for key, value in (("model.hidden_size", "64"), ("data.context", "40"), ("seed", "4"), ("data.shuffle", "false")):
        assert f"cannot change {key}" in bad("train", "--run", run, "--resume", f"--{key}", value)


def test_a_resumed_run_with_other_data_is_refused(bad: Bad, run: Path) -> None:
    text = (run / "job.toml").read_text()
    old = next(line for line in text.splitlines() if line.startswith("sources"))
    (run / "job.toml").write_text(text.replace(old, 'sources = ["good.txt"]'))
    Path("good.txt").write_text(TEXT + "more")
    assert "the data is not what the run was trained on" in bad("train", "--run", run, "--resume", "--train.steps", "4")


def break_checkpoint(run: Path) -> None:
    flip(checkpoint(run) / "rank-00000.safetensors")


def exchange_data(run: Path) -> None:
    (run / "job.toml").write_text((run / "job.toml").read_text().replace("held_out_every = 0", "held_out_every = 3"))


@pytest.mark.parametrize(
    ("harm", "steps", "complaint"),
    [
        (lambda run: None, 1, "train.steps is 1, but run has 2 steps behind it"),
        (break_checkpoint, 4, "is damaged"),
        (exchange_data, 4, "the data is not what the run was trained on"),
    ],
    ids=["fewer steps than done", "damaged checkpoint", "other data"],
)
def test_a_resume_that_fails_changes_nothing(
    harm: Callable[[Path], None], steps: int, complaint: str, bad: Bad, run: Path
) -> None:
    """The job least of all: what was said with the resume that failed is not said to the next one."""
    harm(run)
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file() and file.name != ".lock"}
    found = bad("train", "--run", run, "--resume", "--train.steps", str(steps), "--optim.lr", "0.5")
    assert complaint in found
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file() and file.name != ".lock"} == before


def test_an_import_is_not_resumed_but_started_from(bad: Bad, model: Path) -> None:
    assert main(["import", str(model), "imported"]) == 0
    for steps in ("0", "3"):
        found = bad("train", "--run", "imported", "--resume", "--train.steps", steps)
        assert "imported holds imported weights and no training to resume" in found
    words = ["--data.sources", "good.txt", "--data.held_out_every", "0", "--data.context", "48", "--train.steps", "1"]
    told = shlex.split(found.partition("equigrad train ")[2].replace("ANOTHER_FOLDER", "new"))
    assert main(["train", *told, *words, "--observe.sample_tokens", "0"]) == 0


def test_given_weights_of_another_shape_are_refused(bad: Bad, run: Path, model: Path) -> None:
    for weights in (run, model):
        found = bad("train", job_from(weights, hidden_size=64))
        assert f"model.hidden_size is 64, but {weights} has 32" in found


def test_a_model_folder_whose_config_is_not_that_of_its_weights_is_refused(bad: Bad, model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    assert "has shape (32, 48), of which the model needs (32, 64)" in bad("generate", model)
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    assert "the weights do not fit its config.json (missing: model.layers.2." in bad("import", model, "new")
    (model / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    assert "model_type is 'gpt2'; the families that can be imported are llama, qwen2, qwen3" in bad("info", model)
    (model / "config.json").write_text("{")
    assert "config.json: cannot be read" in bad("info", model)


@pytest.mark.parametrize(
    ("harm", "name", "complaint"),
    [
        (truncate, "rank-00000.safetensors", "is damaged: it has"),
        (flip, "rank-00000.safetensors", "is damaged: its bytes are not those that were written"),
        (Path.unlink, "rank-00000.safetensors", "is missing from the checkpoint"),
        (truncate, "manifest.json", "is damaged: not valid JSON"),
        (flip, "manifest.json", "is damaged"),
    ],
    ids=["truncated", "flipped", "missing", "manifest truncated", "manifest flipped"],
)
def test_a_damaged_checkpoint_is_named_by_every_command(
    harm: Callable[[Path], None], name: str, complaint: str, bad: Bad, run: Path
) -> None:
    harm(checkpoint(run) / name)
    for words in (
        ["train", "--run", run, "--resume", "--train.steps", "4"],
        ["eval", run],
        ["generate", run],
        ["info", run],
        ["info", checkpoint(run)],
        ["train", job_from(run), "--run", "new"],
    ):
        found = bad(*words)
        assert name in found
        assert complaint in found


def test_a_truncated_checkpoint_is_not_exported(bad: Bad, run: Path) -> None:
    truncate(checkpoint(run) / "rank-00000.safetensors")
    assert "is damaged" in bad("export", run, "model")
    assert not Path("model").exists()


def test_truncated_weights_of_a_model_folder_are_named(bad: Bad, model: Path) -> None:
    truncate(model / "model.safetensors")
    for words in (["generate", model], ["import", model, "new"], ["info", model]):
        assert "model.safetensors: damaged" in bad(*words)


def test_a_checkpoint_of_a_newer_format_is_refused(bad: Bad, run: Path) -> None:
    manifest = checkpoint(run) / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 99}))
    assert "has format 99, of a newer equigrad" in bad("info", run)
