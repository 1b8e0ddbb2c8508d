from pathlib import Path

import pytest

from equigrad.checkpoint.folder import latest, list_checkpoints, prepare, prune, step_of
from equigrad.errors import UserError


def make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir()
        (folder / name / "manifest.json").write_text(name)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_only_complete_checkpoints_are_listed_in_the_order_of_steps(tmp_path):
    make(tmp_path, "step-100000000", "step-00000020", "step-00000003", ".step-00000030.tmp-1", "step-x", "best")
    (tmp_path / "step-00000040").mkdir()
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [3, 20, 100_000_000]
    assert latest(tmp_path).name == "step-100000000"


def test_a_folder_that_is_not_there_has_no_checkpoints(tmp_path):
    assert latest(tmp_path / "none") is None


def test_a_checkpoint_set_aside_is_listed_until_its_replacement_is_there(tmp_path):
    make(tmp_path, "step-00000003.old")
    assert latest(tmp_path).name == "step-00000003.old"
    make(tmp_path, "step-00000003")
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000003"]


def test_a_new_start_removes_rubbish_and_nothing_else(tmp_path):
    make(tmp_path, ".step-00000003.tmp-1", "step-00000001.old", "step-00000002", "step-00000002.old", "best", ".hidden")
    prepare(tmp_path)
    assert names(tmp_path) == [".hidden", "best", "step-00000001", "step-00000002"]
    assert (tmp_path / "step-00000002" / "manifest.json").read_text() == "step-00000002"


@pytest.mark.parametrize(
    ("saved", "keep_last", "keep_every", "kept"),
    [
        (6, 1, 0, [6, 7]),
        (6, 2, 0, [5, 6, 7]),
        (6, 9, 0, [1, 2, 3, 4, 5, 6, 7]),
        (6, 1, 2, [2, 4, 6, 7]),
        (7, 1, 3, [3, 6, 7]),
        (2, 1, 0, [2, 3, 4, 5, 6, 7]),
    ],
)
def test_the_last_and_every_nth_stay_and_later_histories_are_left_alone(tmp_path, saved, keep_last, keep_every, kept):
    make(tmp_path, *(f"step-{step:08d}" for step in range(1, 8)))
    prune(tmp_path, saved, keep_last, keep_every)
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == kept
    assert len(names(tmp_path)) == len(kept)


def test_names_that_are_no_checkpoints_have_no_step():
    with pytest.raises(UserError, match="best is not named like a checkpoint"):
        step_of(Path("best"))
