"""The report says what the run folder holds, of any run, in one file that loads nothing."""

import html
import json
import math
import re
from pathlib import Path

import pytest

from equigrad.errors import UserError
from equigrad.observe.report import write_report
from tests.observe.runs import (
    DIGEST,
    SUMMARY,
    group_record,
    policy_figures,
    step_record,
    write_rollouts,
    write_run,
)


def text_of(folder: Path) -> str:
    """The report's visible text."""
    page = write_report(folder).read_text(encoding="utf-8")
    body = re.sub(r"<(style|script).*?</\1>", "", page, flags=re.DOTALL)
    return html.unescape(" ".join(re.sub(r"<[^>]*>", " ", body).split()))


def data_of(folder: Path) -> dict[str, dict[str, list[float | str | None]]]:
    page = (folder / "report.html").read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert found is not None
    return json.loads(found[1])


def test_figures_job_and_sample_are_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path / "whale", 200, 50, sample={"prompt": "Call me", "text": " Ishmael."})
    text = text_of(run)
    for words in (
        "whale equigrad report",
        "Held-out loss 3.012 perplexity 20.3",
        "Bits per byte 1.988",
        "Tokens 1.64M",
        "Tokens per second 12k 41% of peak",
        "Wall time 2m16s",
        "Steps 200 of 200",
        f"Parameter digest {DIGEST[:12]} {DIGEST}",
        "Call me Ishmael.",
        'name = "whale"',
    ):
        assert words in text
    assert "not finished" not in text


def test_the_page_needs_nothing_from_outside(tmp_path: Path) -> None:
    page = write_report(write_run(tmp_path / "run", 20, 10)).read_text(encoding="utf-8")
    assert not re.search(r"https?:|//\w+\.|@import|url\(", page)
    assert "default-src 'none'" in page


def test_what_a_model_or_a_job_says_cannot_become_markup(tmp_path: Path) -> None:
    nasty = "</pre></script><script>alert(1)</script>\x00\x1b[31m\u202e\ud800 鯨🐋 & \"'"
    run = write_run(tmp_path / "run", 5, sample={"prompt": nasty, "text": nasty})
    (run / "job.toml").write_text('name = "<img src=x>"\n')
    page = write_report(run).read_text(encoding="utf-8")
    assert "<script>alert" not in page
    assert "<img" not in page
    assert "\x00" not in page
    assert "␀␛[31m\u202e\\ud800 鯨🐋" in page


def test_a_long_run_is_small_and_keeps_its_spikes(tmp_path: Path) -> None:
    total = 100_000
    changes = {40_000: {"loss": 77.0}, 70_001: {"grad_norm": 99.0}, 90_000: {"loss": math.nan, "grad_norm": math.inf}}
    records = [step_record(step, total, **changes.get(step, {})) for step in range(1, total + 1)]
    lines = (json.dumps({k: r[k] for k in ("kind", "step", "loss", "lr", "grad_norm")}) for r in records)
    # Python writes NaN, which the log itself would not; the values are what matters here.
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert write_report(tmp_path).stat().st_size < 1_000_000
    steps = data_of(tmp_path)["steps"]
    at = {step: row for row, step in enumerate(steps["step"])}
    assert steps["loss"][at[40_000]] == 77
    assert steps["grad_norm"][at[70_001]] == 99
    assert (steps["loss"][at[90_000]], steps["grad_norm"][at[90_000]]) == ("nan", "inf")


def test_values_that_are_not_finite_are_marked_and_told(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 50, 10, {20: {"loss": math.nan}, 21: {"loss": math.inf, "grad_norm": -math.inf}})
    assert "2 logged steps have values that are not finite" in text_of(run)
    page = (run / "report.html").read_text(encoding="utf-8")
    gaps = re.findall(r'class="gaps" d="([^"]*)"', page)
    assert [path.count("M") for path in gaps] == [2, 2, 1, 1]  # loss and gradient norm, each linear and logarithmic
    assert "NaN" not in json.dumps(data_of(run))


def test_a_run_that_has_not_finished_is_told_by_its_metrics(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 60, 25, summary=None)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')
    text = text_of(run)
    assert "The run has not finished" in text
    assert "Steps 60 of 60" in text
    assert "Held-out loss 3." in text
    assert "Parameter digest" not in text


@pytest.mark.parametrize("total", [0, 1, 2])
def test_very_short_runs(tmp_path: Path, total: int) -> None:
    text = text_of(write_run(tmp_path / "run", total, summary=None))
    assert ("No step has been logged yet." in text) == (total == 0)
    assert ("nothing logged" in text) == (total == 0)
    assert "held out" not in text


def test_an_empty_folder_and_a_summary_without_metrics(tmp_path: Path) -> None:
    assert "No step has been logged yet." in text_of(tmp_path)
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY | {"held_out_loss": None}))
    assert "Steps 200" in text_of(tmp_path)
    assert "Held-out loss" not in text_of(tmp_path)


@pytest.mark.parametrize(("name", "content"), [("summary.json", "[1"), ("sample.json", "3"), ("job.toml", "= 1")])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=name):
        write_report(tmp_path)


@pytest.mark.parametrize("value", ['"3.0"', "[3.0]", "{}"])
@pytest.mark.parametrize("key", ["loss", "tokens_per_second", "mfu", "total_tokens", "elapsed"])
def test_a_record_of_the_wrong_type_is_named(tmp_path: Path, key: str, value: str) -> None:
    run = write_run(tmp_path / "run", 3, summary=None)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(f'{{"kind": "step", "step": 4, "{key}": {value}}}\n')
    with pytest.raises(UserError, match=rf"metrics\.jsonl: step 4: {key} must be a number, not (str|list|dict)"):
        write_report(run)


@pytest.mark.parametrize("key", ["held_out_loss", "held_out_bits_per_byte"])
def test_an_evaluation_or_summary_of_the_wrong_type_is_named(tmp_path: Path, key: str) -> None:
    run = write_run(tmp_path / "run", 3, summary={key: "3.0"})
    with pytest.raises(UserError, match=rf"summary\.json: {key} must be a number, not str"):
        write_report(run)
    (run / "summary.json").unlink()
    with (run / "metrics.jsonl").open("a") as file:
        file.write(f'{{"kind": "eval", "step": 3, "{key}": "3.0"}}\n')
    with pytest.raises(UserError, match=rf"metrics\.jsonl: step 3: {key} must be a number, not str"):
        write_report(run)


def test_reinforcement_learning_has_charts_of_its_own_and_its_rollouts(tmp_path: Path) -> None:
    changes = {step: policy_figures(step, 20) for step in range(1, 21)}
    run = write_run(
        tmp_path / "run", 20, changes=changes, summary=SUMMARY | {"held_out_reward": 0.75, "held_out_solved": 0.7}
    )
    write_rollouts(run, [group_record(step) for step in range(1, 251)])
    text = text_of(run)
    for words in ("Reward", "Answers tokens", "Entropy", "Sampling against training", "Rollouts", "0.750 70.0% solved"):
        assert words in text
    assert data_of(run)["steps"]["reward"][-1] == 1.0
    page = (run / "report.html").read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="groups">(.*?)</script>', page)
    assert found is not None
    assert [group["step"] for group in json.loads(found[1])][:3] == [1, 3, 6]
    plain = write_run(tmp_path / "plain", 5)
    assert "Rollouts" not in text_of(plain)
    assert "Entropy" not in text_of(plain)


def test_what_a_model_answers_cannot_become_markup(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 3)
    write_rollouts(run, [group_record(1, token="</script><script>alert(1)</script>")])
    assert "<script>alert" not in write_report(run).read_text(encoding="utf-8")
