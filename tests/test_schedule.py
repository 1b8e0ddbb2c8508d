"""``equigrad schedule``: the drawn step is the one that training would make, for any layout, in one process."""

import json
from pathlib import Path
from typing import Any

import pytest

from equigrad.cli import main
from equigrad.data.stream import Stream
from equigrad.data.tokenizers import byte_tokenizer
from equigrad.schedule.division import schedule_samples
from tests.jobs import tiny_job, write_job


def draw(folder: Path, *words: str, **changes: Any) -> dict[str, Any]:
    file, to = write_job(tiny_job(**changes), folder / "job.toml"), folder / "step.json"
    assert main(["schedule", str(file), "--json", str(to), *words]) == 0
    found: dict[str, Any] = json.loads(to.read_text())
    return found


TWO = [{"path": "builtin:moby-dick", "modality": "sea"}, {"path": "builtin:sotu", "modality": "land"}]


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("sources", [["builtin:moby-dick"], TWO], ids=["one modality", "two modalities"])
def test_the_drawn_step_is_the_one_that_is_trained(sources: list[Any], step: int, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"layout__dp_shard": 3, "data__sources": sources}
    job = tiny_job(**changes)
    found = draw(tmp_path, "--step", str(step), **changes)
    stream = Stream(job.data, job.batch, job.seed, byte_tokenizer())
    for _ in range(step):
        batch = stream.next_batch()
    schedule = schedule_samples(batch.samples, job.model, 3, job.batch.row_tokens, job.batch.packing)
    rows = {(row["round"], row["lane"]): tuple(row["samples"]) for row in found["rows"]}
    assert rows == {(r, lane): row for r, rows in enumerate(schedule.rounds) for lane, row in enumerate(rows)}
    assert [sample["length"] for sample in found["samples"]] == [sample.length for sample in batch.samples]
    kinds = {sample["modality"] for sample in found["samples"]}
    assert kinds == ({"text"} if len(sources) == 1 else {"sea", "land"})
    for number in {row["round"] for row in found["rows"]}:
        held = [i for row in found["rows"] if row["round"] == number for i in row["samples"]]
        assert len({found["samples"][i]["modality"] for i in held}) == 1
    assert found["tokens"] == found["executed_tokens"] == batch.tokens
    assert found["loss_tokens"] == batch.loss_tokens


def test_overrides_draw_another_layout_and_every_rank_has_its_place(tmp_path: Path) -> None:
    layout = {"dp_replicate": 2, "dp_shard": 2, "cp": 3, "tp": 2, "pp": 2}
    found = draw(tmp_path, *(word for name, n in layout.items() for word in (f"--layout.{name}", str(n))))
    first = [row for row in found["rows"] if row["round"] == 0]
    ranks = [rank for row in first for context in row["context"] for rank in context["ranks"]]
    assert sorted(ranks) == list(range(48))
    assert len(found["pipeline"]) == 2
    assert 0 < found["bubble"] < 1
    assert [stage["blocks"] for stage in found["stages"]] == [[0, 1], [1, 2]]


def test_a_drawing_is_written_where_it_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw(tmp_path, "--svg", str(tmp_path / "new" / "step.svg"), layout__cp=2)
    assert (tmp_path / "new" / "step.svg").read_text().startswith("<svg ")
    printed = capsys.readouterr().out
    assert printed.startswith("tiny, step 1: ")
    assert "cp 1 " in printed


def test_a_terminal_that_knows_ascii_only_gets_ascii(tmp_path: Path) -> None:
    from tests.jobs import command

    file = write_job(tiny_job(layout__pp=2), tmp_path / "job.toml")
    done = command("schedule", file, env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert "F0" in done.stdout
    assert "\\u" not in done.stdout
