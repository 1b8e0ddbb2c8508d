"""Reports say what was audited, find damage, and add up."""

import json
from pathlib import Path
from typing import Any

import pytest

from equigrad.audit.report import sealed
from tests.audit.runs import audit, change_line


def report(run: Path, file: Path, *words: str, code: int = 0) -> Path:
    found, told = audit(run, *words, "--json", file)
    assert found == code, told
    return file


def altered(file: Path, out: Path, **changes: Any) -> Path:
    """A report such as another machine would have made."""
    body = json.loads(file.read_text()) | changes
    del body["digest"]
    out.write_text(json.dumps(sealed(body)))
    return out


@pytest.fixture(scope="module")
def parts(audited: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Reports of steps 0 to 4 and of steps 5 and 6."""
    folder = tmp_path_factory.mktemp("reports")
    first = report(audited, folder / "first.json", "--steps", "0..4")
    return first, report(audited, folder / "second.json", "--steps", "5..6")


def test_all_steps_together_are_confirmed(parts: tuple[Path, Path], tmp_path: Path) -> None:
    again = altered(parts[1], tmp_path / "again.json", layout="tp2")
    code, told = audit("--merge", *parts, again, "--json", tmp_path / "merged.json")
    assert code == 0, told
    merged = json.loads((tmp_path / "merged.json").read_text())
    assert merged["coverage"] == [{"steps": [0, 4], "confirmed_by": 1}, {"steps": [5, 6], "confirmed_by": 2}]
    assert merged["not_covered"] == merged["contradictions"] == []
    assert merged == sealed({key: value for key, value in merged.items() if key != "digest"})


def test_steps_that_nobody_confirmed_are_told(parts: tuple[Path, Path], tmp_path: Path) -> None:
    code, told = audit("--merge", parts[1], "--json", tmp_path / "merged.json")
    assert (code, "steps 0..4  not covered" in told) == (3, True)
    assert json.loads((tmp_path / "merged.json").read_text())["not_covered"] == [[0, 4]]


@pytest.mark.parametrize(
    "changes",
    [
        {"confirmed": [0, 10**12]},
        {"confirmed": [6, 5]},
        {"confirmed": ["0", 6]},
        {"confirmed": [0, 3e300]},
        {"run": {"first": "x"}},
        {"run": {"last": 3e300}},
        {"run": {"last": 10**15}},
        {"field": 7},
        {"step": "four"},
        {"why": None},
        {"format": "1"},
        {"format": True},
        {"start": {}},
        {"start": []},
        {"start": {"step": 0}},
        {"start": {"step": 0, "from": ["checkpoint"]}},
        {"changed": None},
        {"changed": [5]},
        {"changed": [[2]]},
        {"changed": [[2, [1]]]},
        {"machine": 5},
    ],
    ids=str,
)
def test_a_report_of_another_form_is_refused_and_a_large_one_keeps_nobody_waiting(
    changes: dict[str, Any], parts: tuple[Path, Path], tmp_path: Path
) -> None:
    if "run" in changes:
        changes = {"run": json.loads(parts[0].read_text())["run"] | changes["run"]}
    strange = altered(parts[0], tmp_path / "strange.json", verdict="contradicted", **changes)
    if changes.get("run", {}).get("last") == 10**15:
        assert audit("--merge", strange)[0] == 1
    else:
        assert audit("--merge", strange)[0] == 2


def test_the_same_report_counts_once(parts: tuple[Path, Path]) -> None:
    assert "steps 5..6  confirmed by 1" in audit("--merge", parts[1], parts[1])[1]


def test_an_unverifiable_report_confirms_nothing(parts: tuple[Path, Path], audited: Path, tmp_path: Path) -> None:
    none = report(audited, tmp_path / "none.json", "--steps", "9", code=3)
    assert audit("--merge", parts[0], none)[0] == 3
    assert audit("--merge", *parts, none)[0] == 0


def test_a_contradiction_is_kept(parts: tuple[Path, Path], copy: Path, tmp_path: Path) -> None:
    change_line(copy, 3, lambda line: line.update(loss="0x1.0p+2"), hidden=False)
    wrong = report(copy, tmp_path / "wrong.json", code=1)
    code, told = audit("--merge", *parts, wrong)
    assert (code, "contradicted on one: step 3, chain" in told) == (1, True)


def test_reports_of_other_runs_are_refused(
    parts: tuple[Path, Path], copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_line(copy, 3, lambda line: line.update(loss="0x1.0p+2"), hidden=True)
    other = report(copy, tmp_path / "other.json", code=1)
    assert audit("--merge", *parts, other)[0] == 2
    assert f"{other} is of another run than {parts[0]}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "value"),
    [("verdict", "confirmed"), ("confirmed", [0, 6]), ("layout", "tp8"), ("digest", "0" * 64), ("run", None)],
)
def test_a_report_that_was_changed_is_refused(
    parts: tuple[Path, Path], tmp_path: Path, key: str, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    body = json.loads(parts[1].read_text())
    body["verdict"] = "unverifiable" if key == "verdict" else body["verdict"]
    body = sealed({k: v for k, v in body.items() if k != "digest"}) | {key: value}
    (tmp_path / "changed.json").write_text(json.dumps(body))
    assert audit("--merge", parts[0], tmp_path / "changed.json")[0] == 2
    assert "was changed after it had been written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[]", "is not a report"),
        ("{", "is not a report"),
        ('{"format": 2, "kind": "audit"}', "of a newer equigrad"),
        ('{"format": 1, "kind": "merged"}', "give the audits themselves"),
        ('{"format": 1, "kind": "audit"}', "was changed"),
    ],
)
def test_what_is_no_report_is_refused(tmp_path: Path, text: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file.json").write_text(text)
    assert audit("--merge", tmp_path / "file.json")[0] == 2
    assert why in capsys.readouterr().err


def test_a_merged_report_and_a_missing_one_are_refused(parts: tuple[Path, Path], tmp_path: Path) -> None:
    audit("--merge", *parts, "--json", tmp_path / "merged.json")
    assert audit("--merge", tmp_path / "merged.json")[0] == audit("--merge", tmp_path / "none.json")[0] == 2
