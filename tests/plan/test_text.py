"""What ``equigrad plan`` prints: every constant with its source, every table, every state."""

import json
from pathlib import Path

import pytest

from equigrad.cli import main
from equigrad.plan.calibration import calibration
from equigrad.plan.gates import doubts, evidence, state
from equigrad.plan.hardware import constants, hardware
from equigrad.plan.published import runs
from equigrad.plan.validation import by_table


def test_every_constant_is_printed_with_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--constants"]) == 0
    printed = capsys.readouterr().out
    for name, constant in constants(hardware()):
        assert f"{name} = {constant.value:g} {constant.unit}  [{constant.source}]" in printed
    assert "calibration.product = " in printed


def test_the_validation_has_every_table_and_every_tested_capability(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "errors.json"
    assert main(["plan", "--validate", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    for table in {run.table for run in runs()}:
        assert table in printed
    for which in evidence() | doubts():
        assert any(line.startswith(state(which)) and str(which) in line for line in printed.splitlines())
    assert "withdrawn    step time with two-hop expert dispatch" in printed
    found = json.loads(file.read_text())
    assert sum(line["runs"] for line in found if line["quantity"] == "throughput") == len(runs())


def test_nothing_to_do_is_an_error_that_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan"]) == 2
    assert "--validate" in capsys.readouterr().err


PAGE = (Path(__file__).parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")


def test_the_page_has_the_errors_of_today() -> None:
    for line in by_table():
        e = line.errors
        row = f"| {line.quantity} | {line.part} | {e.runs} | {100 * e.mean:.1f} % | {100 * e.worst:.1f} % |"
        assert row in PAGE, f"{line.table}: {row}"


def test_the_page_has_the_capabilities_and_constants_of_today() -> None:
    validated = [errors for which, errors in evidence().items() if state(which) == "validated"]
    for errors in validated:
        assert f"| {errors.runs} | {100 * errors.mean:.1f} % | {100 * errors.worst:.1f} % |" in PAGE
    section = PAGE.partition("| validated |")[2].partition("\n\n")[0]
    assert section.count("\n|") == len(validated) + 1
    for _, constant in constants(calibration()):
        assert f"{constant.value:.3g}" in PAGE
