"""Folders that hold something else, or nothing, or cannot be written."""

import shutil
from pathlib import Path

import pytest

from equigrad.cli import main
from equigrad.data.tokenizers import read_tokenizer
from equigrad.run import Run
from tests.bad_input.given import Bad, job, job_from, truncate
from tests.jobs import full_disk


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


def test_a_full_disk_is_named_and_the_last_good_checkpoint_stays(bad: Bad, run: Path) -> None:
    with full_disk(100_000):
        found = bad("train", "--run", run, "--resume", "--train.steps", "4")
    assert "the checkpoint of step 4 could not be saved; earlier ones are intact" in found
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000002"]
    assert main(["info", str(run)]) == 0


def test_a_resume_that_cannot_write_its_tokenizer_can_be_repeated(bad: Bad, run: Path) -> None:
    (run / "tokenizer/tokenizer.json").unlink()
    with full_disk(2_000):
        assert bad("train", "--run", run, "--resume").startswith(f"cannot write {run / 'tokenizer'}")
    assert main(["train", "--run", str(run), "--resume", "--train.steps", "3"]) == 0


# ---- a start that failed is repeated as it was, without --resume and without clearing up by hand


def test_a_start_that_failed_late_leaves_nothing_to_the_next_one(bad: Bad, model: Path) -> None:
    """The tokenizer was written, the folder of checkpoints made; the next start wants another tokenizer."""
    truncate(model / "model.safetensors")
    assert "model.safetensors: damaged" in bad("train", job_from(model), "--run", "new")
    assert Path("new/tokenizer/tokenizer.json").exists()
    other = job(data__tokenizer={"kind": "bpe", "vocab_size": 300}, model__vocab_size=None)
    assert main(["train", other, "--run", "new"]) == 0
    assert read_tokenizer(Path("new/tokenizer")).vocab_size == Run(Path("new")).job().model.vocab_size > 257


def test_an_import_that_failed_can_be_repeated(bad: Bad, model: Path) -> None:
    with full_disk(50_000):
        assert "the checkpoint of step 0 could not be saved" in bad("import", model, "new")
    assert Path("new/tokenizer/tokenizer.json").exists()
    (model / "tokenizer.json").unlink()
    assert main(["import", str(model), "new"]) == 0
    assert main(["info", "new"]) == 0
    assert not Path("new/tokenizer").exists()  # the next one has none, and takes none that is not its own


@pytest.mark.parametrize("stranger", ["notes.txt", "checkpoints/step-00000002/manifest.json"])
def test_what_a_failed_start_does_not_leave_is_not_cleared_away(stranger: str, bad: Bad, model: Path) -> None:
    file = Path("new", stranger)
    for path in (Path("new/tokenizer/tokenizer.json"), file):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    start = ["train", job(), "--run", "new"]
    for words in (start, [*start, "--resume"], ["import", model, "new"]):
        assert "new exists and is not an empty folder" in bad(*words)
    assert file.read_text() == Path("new/tokenizer/tokenizer.json").read_text() == "mine"


# ---- folders that are not there, or are not what they should be


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


@pytest.mark.parametrize("text", ["[]", "3", "null", '{"steps": "x"}', '{"steps": 2}', "[" * 100_000])
def test_a_summary_that_is_none_is_named(text: str, bad: Bad, run: Path) -> None:
    (run / "summary.json").write_text(text)
    for words in (["info", run], ["train", "--run", run, "--resume"]):
        assert "summary.json" in bad(*words)


def test_a_run_that_had_ended_does_not_begin_again_without_its_checkpoints(bad: Bad, run: Path) -> None:
    kept = {name: (run / name).read_bytes() for name in ("metrics.jsonl", "summary.json")}
    shutil.rmtree(run / "checkpoints")
    assert "its checkpoints are gone" in bad("train", "--run", run, "--resume", "--train.steps", "5")
    assert kept == {name: (run / name).read_bytes() for name in kept}


def test_a_run_that_has_no_checkpoint_is_named(bad: Bad, run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    for words in (["eval", run], ["generate", run], ["export", run, "model"]):
        assert "is a run without a checkpoint yet" in bad(*words)


def test_a_model_without_a_tokenizer_cannot_read_text(bad: Bad, model: Path) -> None:
    (model / "tokenizer.json").unlink()
    assert "model has no tokenizer.json" in bad("generate", model)


def test_an_evaluation_of_nothing_is_refused(bad: Bad, model: Path) -> None:
    assert "nothing is held out: data.held_out_every is 0, of 139 documents" in bad("eval", model)


def test_a_folder_that_no_start_has_locked_keeps_what_is_in_it(bad: Bad) -> None:
    assert main(["tokenizer", "train", "good.txt", "--vocab-size", "300", "--out", "mine/tokenizer"]) == 0
    own = job(data__tokenizer={"kind": "file", "path": "mine/tokenizer"}, model__vocab_size=300)
    assert "is not an empty folder" in bad("train", own, "--run", "mine")
    assert Path("mine/tokenizer/tokenizer.json").exists()


def test_a_start_that_was_overtaken_clears_nothing_away(bad: Bad, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([None])  # the first look finds the folder empty, the one under the lock finds the other's run
    look = Run.check_free
    monkeypatch.setattr(Run, "check_free", lambda self: next(free, 0) is None or look(self))
    assert "already holds a run" in bad("train", job(), "--run", run)
    assert (run / "checkpoints" / "step-00000002" / "manifest.json").exists()


def test_a_checkpoint_is_found_from_within_and_through_a_link(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = run.absolute() / "checkpoints" / "step-00000002"
    Path("latest").symlink_to(checkpoint)
    assert main(["info", "latest"]) == 0
    monkeypatch.chdir(checkpoint)
    assert main(["generate", ".", "--max-tokens", "1"]) == 0


def test_what_could_not_be_written_leaves_nothing_behind(bad: Bad) -> None:
    Path("taken").mkdir()
    assert "cannot write" in bad("schedule", job(), "--svg", "taken")
    assert not list(Path().glob(".*.tmp"))
