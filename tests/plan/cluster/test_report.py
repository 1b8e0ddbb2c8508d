"""The page of a simulated run: whole, self-contained, and the same whatever jobs are called."""

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from equigrad.plan.cluster.figures import figures, utilisation
from equigrad.plan.cluster.report import MOST_ROWS, write_report
from equigrad.plan.cluster.simulation import Outcome, simulate
from tests.plan.cluster.cases import job, servers

CLUSTER = servers(3, 3)


def page(folder: Path, outcome: Outcome, **words: object) -> str:
    write_report(folder / "report.html", "trace", "fcfs", outcome, CLUSTER, **words)  # type: ignore[arg-type]
    return (folder / "report.html").read_text(encoding="utf-8")


def drawings(text: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]


def test_every_job_and_server_is_there_and_nothing_from_outside(tmp_path: Path) -> None:
    text = page(tmp_path, simulate([job(n, n % 4 + 1, arrival=n) for n in range(9)], CLUSTER, placement="spread"))
    assert re.findall(r"<title>job (\d):", text) == list("012345678")
    assert "s-0</td>" in text
    assert "s-1</td>" in text
    assert not re.search(r"https?:|//\w+\.|@import|url\(|<script", text)
    assert "default-src 'none'" in text
    assert len(drawings(text)) == 3


def test_lines_start_and_end_where_jobs_do(tmp_path: Path) -> None:
    """Job 1 waits for 20 of 40 seconds, and then loads for 5."""
    text = page(tmp_path, simulate([job(0, 6), job(1, 6, 6, loading_s=5.0, network_s=1.5)], CLUSTER, sharing="none"))
    paths = [[p.get("d") for p in row.iter("path")] for row in drawings(text)[0].iter("g")]
    assert paths[1] == ["M0 1.5H2000", "M2000 1.5H2500", "M2500 1.5H4000"]


def test_what_happens_at_one_time_is_one_step(tmp_path: Path) -> None:
    """Jobs that start as they arrive do not wait, and what ends makes room for what starts."""
    outcome = simulate([job(0, 6), job(1, 6), job(2, 6)], CLUSTER, sharing="none")
    assert [d[-1].get("d") for d in ([*svg.iter("path")] for svg in drawings(page(tmp_path, outcome))[1:])] == [
        "M0 0 1333 0 1333 0 2667 0 2667 0 4000 0 4000 1000",  # six devices, until all ends at 60
        "M0 0 1333 0 1333 500 2667 500 2667 1000",  # two jobs wait until 20, and one until 40
    ]


def test_a_long_trace_is_thinned_and_says_so(tmp_path: Path) -> None:
    outcome = simulate([job(n, 1, 1, arrival=n) for n in range(2 * MOST_ROWS + 1)], CLUSTER)
    text = page(tmp_path, outcome)
    assert text.count('<g class="bars') <= MOST_ROWS
    assert "one of 3 drawn" in text
    assert len(text) < 500_000


def test_names_cannot_become_markup(tmp_path: Path) -> None:
    outcome = simulate([replace(job(0), name="<script>alert(1)</script>")], CLUSTER)
    assert "<script" not in page(tmp_path, outcome, notes=["<script>"])


def test_a_run_of_nothing_is_told(tmp_path: Path) -> None:
    outcome = simulate([job(0, 7)], CLUSTER)
    assert "No job has run." in page(tmp_path, outcome, notes=["deadlock"])
    assert [use.devices for use in utilisation(outcome, CLUSTER)] == [0.0, 0.0]


def test_figures_are_those_of_the_definitions() -> None:
    spans = [(n % 7, n % 7 + (n * 37) % 101 + 1.0) for n in range(60)]
    times = [end - arrival for arrival, end in spans]
    found = figures(spans)
    assert found.mean_s == pytest.approx(np.mean(times))
    assert found.p99_s == pytest.approx(np.percentile(times, 99))
    assert found.makespan_s == max(end for _, end in spans)
    assert figures([(2.0, 5.0)]).p99_s == 3.0


def test_use_is_what_jobs_held_and_sent() -> None:
    """Two of three devices of each server for the whole time; 1,000 MB in 20 s over 100 MB/s."""
    outcome = simulate([job(0, 4)], CLUSTER, placement="spread")
    assert [(use.devices, use.interface) for use in utilisation(outcome, CLUSTER)] == [(pytest.approx(2 / 3), 0.5)] * 2
