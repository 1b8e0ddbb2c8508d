"""``equigrad simulate``: what it prints, what it writes, and how it ends."""

import json
from pathlib import Path
from typing import Any

import pytest

from equigrad.cli import main
from tests.plan.cluster.cases import CLUSTER, NETWORK, PROFILE, TRACE, write_files


def words(folder: Path, *more: str, **texts: str) -> list[str]:
    paths = write_files(folder, **texts)
    options = [word for name in ("cluster", "profile", "network") for word in (f"--{name}", str(paths[name]))]
    return ["simulate", str(paths["trace"]), *options, *more]


def outcome(folder: Path, *more: str, **texts: str) -> dict[str, Any]:
    to = folder / "out.json"
    assert main(words(folder, "--json", str(to), *more, **texts)) == 0
    found: dict[str, Any] = json.loads(to.read_text())
    return found


def test_a_trace_is_run_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = outcome(tmp_path)
    assert [(job["job_id"], job["start_s"], job["end_s"]) for job in found["jobs"]] == [
        ("a", 0.0, 110.0), ("b", 5.0, pytest.approx(100.0)), ("c", 5.0, pytest.approx(235.0)),
    ]  # fmt: skip
    assert found["jobs"][2]["workers"] == {"v100-1": 8}
    assert found["figures"]["makespan_s"] == pytest.approx(235.0)
    printed = capsys.readouterr().out
    assert "3 jobs · 32 devices on 4 servers · fcfs · colocate · maxmin" in printed
    assert "makespan" in printed


def test_a_measured_run_is_compared_with_the_simulation_and_both_baselines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = outcome(tmp_path, "--measured", str(tmp_path / "measured.csv"))
    rows = found["comparison"]
    assert list(rows) == ["measured", "maxmin", "none", "fixed-penalty"]
    assert rows["measured"]["makespan_s"] == 207.0  # c, from 7 on; a arrives at 0
    assert rows["measured"]["mean_s"] == pytest.approx((101 + 101 + 202) / 3)
    assert rows["none"]["errors"]["makespan_s"] == pytest.approx(235 / 207 - 1)
    assert rows["fixed-penalty"]["makespan_s"] == pytest.approx(5 + 30 + 1.1 * 200)
    assert found["job_error"] == pytest.approx((110 / 100 - 1 + 1 - 95 / 100 + 230 / 200 - 1) / 3)
    assert "(+13.5%)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "more",
    [["--scheduler", "backfill"], ["--placement", "spread"], ["--sharing", "proportional"], ["--phases", "mean"]],
)
def test_every_choice_runs(more: list[str], tmp_path: Path) -> None:
    assert len(outcome(tmp_path, *more)["jobs"]) == 3


def test_crossing_servers_costs_what_interfaces_cannot_carry(tmp_path: Path) -> None:
    """Job c sends 175 MB in a second; over interfaces of 100 MB/s that takes 1.75."""
    found = outcome(tmp_path, "--placement", "spread", cluster=CLUSTER.replace("463", "100"))
    assert found["jobs"][2]["end_s"] > 5 + 30 + 100 * 2.75 - 1e-6


def test_the_report_is_written(tmp_path: Path) -> None:
    assert main(words(tmp_path, "--report", str(tmp_path / "r.html"))) == 0
    assert "trace.csv" in (tmp_path / "r.html").read_text()


def test_jobs_that_wait_for_ever_are_an_error_that_names_them_and_what_ran_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to, page = tmp_path / "out.json", tmp_path / "r.html"
    small = CLUSTER.replace("count = 4", "count = 1").replace("devices = 8", "devices = 4")
    assert main(words(tmp_path, "--json", str(to), "--report", str(page), cluster=small)) == 2
    told = capsys.readouterr().err
    assert "deadlock at 110.0 s: nothing runs, nothing will arrive, and 1 of 3 jobs wait for ever" in told
    assert "trace.csv:4: gpu_workers: job c needs 8 devices at once; the cluster has 4" in told
    found = json.loads(to.read_text())
    assert found["waiting"] == ["c"]
    assert "deadlock" in found["deadlock"]
    assert "deadlock at 110.0 s" in page.read_text()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--phases", "some"], "invalid choice: 'some'"),
        (["--scheduler", "lottery"], "invalid choice: 'lottery'"),
        (["--json", "/"], "cannot write /"),
        (["--measured", "/none.csv"], "no measured run at /none.csv"),
    ],
)
def test_words_that_make_no_sense_are_named(
    more: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(tmp_path, *more)) == 2
    assert message in capsys.readouterr().err


def test_files_that_are_missing_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "none.csv", "--cluster", "none.toml"]) == 2
    assert "the following arguments are required: --profile, --network" in capsys.readouterr().err


def test_an_empty_trace_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(tmp_path, trace=TRACE.splitlines()[0] + "\n", profile=PROFILE, network=NETWORK)) == 2
    assert "no jobs" in capsys.readouterr().err
