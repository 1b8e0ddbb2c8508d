"""``equigrad verify`` with real processes: what is equal, what is rounding, and faults that are planted in them."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from equigrad.audit.cases import Case
from equigrad.cli import main
from tests.jobs import command, tiny_job, write_job

# A rank of a layout computes something slightly other than it should; the reference, which is alone, does not.
FAULTS = {
    # Its loss over its own tokens, as if there were no others.
    "a local normaliser": """
    import equigrad.objectives.objective as e
    whole = e.language_model
    e.language_model = lambda loss, ops, normaliser: whole(loss, ops, len(loss) or 1)
""",
    # The gradients of what tensor ranks share are not added up.
    "a missing all-reduce": """
    import equigrad.trainer as t
    t.add_up = lambda gradients, axis: None
""",
    # Rates are too high by a quarter.
    "a wrong learning rate": """
    import equigrad.trainer as t
    whole = t.learning_rate
    t.learning_rate = lambda *a: whole(*a) * 1.25
""",
    # Second moments decay as those of another publication.
    "another decay": """
    import equigrad.optim.adamw as a
    whole = a.adamw
    a.adamw = lambda *tensors, beta2, **numbers: whole(*tensors, beta2=0.99, **numbers)
""",
    # Positions of one rank are one too far.
    "a rotary offset": """
    import equigrad.rows as r
    from dataclasses import replace
    whole = r.to_tensors
    def shifted(*a):
        found = whole(*a)
        wrong = found.row.positions + 1
        return replace(found, row=replace(found.row, positions=wrong))
    if os.environ['RANK'] == '1': r.to_tensors = shifted
""",
}


def planted(folder: Path, fault: str) -> dict[str, str]:
    """An environment in which the workers of a layout have the fault."""
    folder.mkdir()
    condition = "if os.environ.get('WORLD_SIZE', '1') != '1':"
    (folder / "sitecustomize.py").write_text(f"import os\n{condition}\n    pass{FAULTS[fault]}")
    return {"PYTHONPATH": str(folder)}


def verify(folder: Path, *words: str, env: dict[str, str] | None = None, **changes: Any) -> tuple[int, Any, str]:
    """Exit code, the cases of the JSON file, and what was printed."""
    job = write_job(tiny_job(**{"numerics__kind": "exact"} | changes), folder / "job.toml")
    done = command("verify", job, "--steps", "2", "--json", folder / "out.json", *words, env=env)
    out = folder / "out.json"
    return done.returncode, json.loads(out.read_text())["cases"] if out.exists() else None, done.stdout + done.stderr


def test_exact_numerics_are_equal_on_layouts_packings_and_threads(tmp_path: Path) -> None:
    words = ("--layouts", "cp2+tp2", "--packings", "first_fit", "--microbatches", "48,500", "--threads", "2")
    code, cases, text = verify(tmp_path, *words)
    assert code == 0, text
    assert [case["case"] for case in cases] == [
        "cp2+tp2", "packing first_fit", "rows of 48", "rows of 500", "threads 2"
    ]  # fmt: skip
    assert all(case["ok"] for case in cases)
    assert "5 of 5 equal" in text


def test_native_numerics_deviate_by_rounding(tmp_path: Path) -> None:
    code, cases, text = verify(tmp_path, "--layouts", "dp2", "--numerics", "native")
    assert code == 0, text
    assert [case["case"] for case in cases] == ["one", "dp2"]
    assert all(0 < case["deviation"]["gradient"] < 1e-4 for case in cases)


@pytest.mark.parametrize(
    ("fault", "layout"),
    [
        ("a local normaliser", "dp2"),
        ("a missing all-reduce", "tp2"),
        ("a rotary offset", "cp2"),
        ("a wrong learning rate", "dp2"),
        ("another decay", "dp2"),
    ],
)
def test_a_planted_bug_is_called_one(tmp_path: Path, fault: str, layout: str) -> None:
    env = planted(tmp_path / "planted", fault)
    code, cases, text = verify(tmp_path, "--layouts", layout, "--numerics", "native", env=env)
    assert code == 1, text
    assert [case["ok"] for case in cases] == [True, False]  # one process has no such fault
    assert "A BUG, not rounding" in text
    assert (cases[1]["deviation"]["gradient"] < 1e-3) == (
        fault in ("a wrong learning rate", "another decay")
    )  # which is not in it


def test_exact_numerics_say_where_a_difference_begins(tmp_path: Path) -> None:
    code, (case,), text = verify(
        tmp_path, "--layouts", "tp2", env=planted(tmp_path / "planted", "a missing all-reduce")
    )
    assert code == 1
    assert (case["ok"], case["step"]) == (False, 1)
    # Norms are what tensor ranks share; the first by name.
    assert case["what"] == "model.model.layers.0.input_layernorm.weight"
    assert "copies on ranks [1] differ" in case["detail"]
    assert "DIFFERENT from step 1" in text


def test_what_cannot_be_run_is_refused_or_fails(tmp_path: Path) -> None:
    for words, message in [
        (("--layouts", "tp3"), "tp"),
        (("--layouts", "xp3"), "xp3"),
        ((), "nothing to verify"),
        (("--threads", "none"), "--threads"),
        (("--microbatches", "7"), "row_tokens"),
        (("--layouts", "dp2", "--steps", "0"), "--steps"),
    ]:
        code, _, text = verify(tmp_path, *words)
        assert code == 2, text
        assert message in text


def test_what_is_zero_but_for_rounding_is_no_bug(tmp_path: Path) -> None:
    """In a context of one token gradients of keys are rounding alone, and AdamW makes whole updates of them."""
    small = {"batch__tokens": 3, "data__context": 1, "batch__row_tokens": 1}
    code, _, text = verify(tmp_path, "--layouts", "dp3", "--numerics", "native", **small)
    assert code == 0, text


def test_a_step_that_is_left_out_everywhere_is_equal(tmp_path: Path) -> None:
    hot = {"optim__lr": 1e30, "optim__warmup_steps": 0, "train__non_finite": "skip"}
    code, _, text = verify(tmp_path, "--layouts", "dp2", "--steps", "4", **hot)
    assert (code, "1 of 1 equal" in text) == (0, True), text


def test_an_error_that_is_the_users_keeps_its_code(tmp_path: Path) -> None:
    code, _, text = verify(tmp_path, "--threads", "1", "--data.sources", '["/dev/null"]')
    assert (code, "/dev/null" in text) == (2, True)


@pytest.mark.parametrize("case", ["garbage", "5", "{}", '{"name": "one"}', '{"name": "one", "keys": 5, "folder": "x"}'])
def test_what_is_no_case_is_told(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(tiny_job(), tmp_path / "job.toml")
    assert main(["verify", str(job), "--case", case]) == 2
    assert "is no case" in (told := capsys.readouterr().err)
    assert "--layouts" in told


def test_a_case_is_for_processes_that_were_started_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    case = json.dumps(asdict(Case("one", {}, str(tmp_path))))
    assert main(["verify", str(write_job(tiny_job(), tmp_path / "job.toml")), "--case", case]) == 2
    assert "this is none of them" in capsys.readouterr().err
