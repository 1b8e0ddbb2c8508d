"""Folders that hold something else, or nothing, or cannot be written."""

import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from equigrad.cli import main
from tests.bad_input.given import Bad, job, message
from tests.jobs import environment


def test_an_existing_run_is_not_overwritten(bad: Bad, run: Path) -> None:
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    assert "already holds a run; --resume continues it" in bad("train", job(), "--run", run)
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before


def test_a_folder_that_is_not_empty_is_not_written_into(bad: Bad, model: Path) -> None:
    for words in (
        ["train", job(), "--run", model],
        ["import", model, model],
        ["export", "run", model],
        ["train", job(), "--run", "good.txt"],
        ["export", "run", "good.txt"],
    ):
        assert "exists and is not an empty folder" in bad(*words)
    assert "exists already" in bad("tokenizer", "train", "good.txt", "--out", model)


def test_a_folder_that_cannot_be_written_is_named(bad: Bad, run: Path, model: Path) -> None:
    for words in (
        ["train", job(), "--run", "good.txt/run"],
        ["train", job(data__cache="good.txt/cache"), "--run", "new"],
        ["export", run, "good.txt/model"],
        ["import", model, "good.txt/run"],
        ["tokenizer", "train", "good.txt", "--out", "good.txt/tokenizer"],
        ["info", run, "--json", "good.txt/info.json"],
        ["eval", run, "--json", "good.txt/eval.json"],
        ["generate", run, "--max-tokens", "1", "--json", "good.txt/out.json"],
    ):
        found = bad(*words)
        assert found.startswith("cannot write")
        assert "good.txt/" in found


def test_a_file_where_the_checkpoints_should_go_is_named(bad: Bad, run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").write_text("in the way")
    found = bad("train", "--run", run, "--resume", "--train.steps", "4")
    assert "run/checkpoints" in found


def test_a_full_disk_is_named_and_the_last_good_checkpoint_stays(run: Path) -> None:
    """A limit on the size of files stands for the disk: writing fails in the same way, half way through."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    words = [sys.executable, "-m", "equigrad", "train", "--run", str(run), "--resume", "--train.steps", "4"]
    done = subprocess.run(words, preexec_fn=limit, capture_output=True, text=True, env=environment(), timeout=100)
    found = message(done.returncode, done.stderr)
    assert "the checkpoint of step 4 could not be saved; earlier ones are intact" in found
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000002"]
    assert main(["info", str(run)]) == 0


@pytest.mark.parametrize("command_", ["eval", "generate", "info", "export", "import"])
def test_a_folder_that_is_not_there_or_holds_nothing_of_ours_is_named(command_: str, bad: Bad) -> None:
    more = ["out"] if command_ in ("export", "import") else []
    assert "no folder at nothing" in bad(command_, "nothing", *more)
    Path("empty").mkdir()
    assert "neither config.json (a model), job.toml (a run) nor manifest.json" in bad(command_, "empty", *more)


def test_a_report_of_what_is_no_run_is_refused(bad: Bad) -> None:
    assert "is not a run folder: it has no job.toml" in bad("report", "nothing")


def test_a_run_whose_own_files_are_broken_is_named(bad: Bad, run: Path) -> None:
    (run / "summary.json").write_text("{")
    assert "summary.json" in bad("info", run)
    assert "summary.json" in bad("report", run)
    (run / "summary.json").unlink()
    (run / "tokenizer" / "tokenizer.json").write_text("{")
    assert "tokenizer.json is not a tokenizer.json" in bad("generate", run)
    (run / "job.toml").write_text("[train")
    for name in ("info", "report", "eval", "generate"):
        assert "job.toml: not valid TOML" in bad(name, run)


def test_a_run_that_has_no_checkpoint_is_named(bad: Bad, run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    for words in (["eval", run], ["generate", run], ["export", run, "model"]):
        assert "is a run without a checkpoint yet" in bad(*words)


def test_a_model_without_a_tokenizer_cannot_read_text(bad: Bad, model: Path) -> None:
    (model / "tokenizer.json").unlink()
    assert "model has no tokenizer.json" in bad("generate", model)


def test_an_evaluation_of_nothing_is_refused(bad: Bad, model: Path) -> None:
    assert "nothing is held out: data.held_out_every is 0, of 139 documents" in bad("eval", model)
