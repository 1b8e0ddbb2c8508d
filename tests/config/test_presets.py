"""The presets in ``configs/`` load, print, and have the size that they say."""

import json
import re
from pathlib import Path

import pytest

from equigrad.cli import main
from equigrad.config import load_job
from equigrad.data.tokenizers import byte_tokenizer
from equigrad.models.huggingface import to_huggingface
from equigrad.models.specs import parameter_count
from equigrad.run import Run

CONFIGS = Path(__file__).parents[2] / "configs"
PRESETS = sorted(p.stem for p in CONFIGS.glob("*.toml"))
# The public models' own numbers, and ours for shapes that are ours.
COUNTS = {
    "1b": 1_235_814_400,
    "8b": 8_030_261_248,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "160m": 162_417_408,
}


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A model folder for presets that start from one: its shape and tokenizer are all that a dry run reads."""
    model = load_job(None).model.model_copy(update={"vocab_size": 300, "hidden_size": 48})
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(to_huggingface(model, None, None, "float32")))
    byte_tokenizer().save(folder)
    return folder


def test_the_presets_that_the_documentation_names_are_there() -> None:
    assert {"quickstart", "15m", "160m", "1b", "8b", "finetune"} <= set(PRESETS)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_called_like_its_file_and_says_what_it_is(preset: str) -> None:
    file = CONFIGS / f"{preset}.toml"
    assert load_job(file).name == preset
    assert file.read_text().startswith("# ")


@pytest.mark.parametrize("preset", COUNTS)
def test_parameter_counts_are_those_of_the_public_models(preset: str) -> None:
    file = CONFIGS / f"{preset}.toml"
    assert parameter_count(load_job(file).model) == COUNTS[preset]
    stated = re.search(r"^# ([\d,]{10,}) parameters", file.read_text())
    assert stated is None or int(stated[1].replace(",", "")) == COUNTS[preset]


def test_the_15m_preset_has_about_15_million_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(CONFIGS / "15m.toml"), "--dry-run"]) == 0
    count = re.search(r"^# parameters +([\d,]+)$", capsys.readouterr().out, re.MULTILINE)
    assert count is not None
    assert 15e6 < int(count[1].replace(",", "")) < 16e6


@pytest.mark.parametrize("preset", PRESETS)
def test_a_dry_run_prints_job_and_size_and_writes_nothing(
    preset: str, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    job = load_job(CONFIGS / f"{preset}.toml")
    given = ["--model.weights", str(weights)] if job.model.weights else []
    if preset == "finetune":
        given += ["--data.sources", str(CONFIGS / "finetune.jsonl")]
    assert main(["train", str(CONFIGS / f"{preset}.toml"), "--dry-run", *given]) == 0
    printed = capsys.readouterr().out
    for line in ("# parameters", "# tokens per step", "# steps", "# operations", "# processes", "# memory per rank"):
        assert f"\n{line} " in printed
    assert list(elsewhere.iterdir()) == []
    # What it prints is a job file: a dry run of it prints the same.
    again = elsewhere / "job.toml"
    again.write_text(printed)
    assert main(["train", str(again), "--dry-run"]) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_can_be_exported(preset: str) -> None:
    model = load_job(CONFIGS / f"{preset}.toml").model
    size = {"vocab_size": model.vocab_size or 1000}
    assert to_huggingface(model.model_copy(update=size), 0, 0, "float32")["model_type"] == model.family


def test_the_chats_of_the_fine_tuning_example_are_well_formed() -> None:
    from equigrad.config.data import Source
    from equigrad.data.sources import Chat, documents

    chats = list(documents(Source(path=str(CONFIGS / "finetune.jsonl"))))
    assert len(chats) >= 20
    assert all(isinstance(chat, Chat) and chat.messages[-1]["role"] == "assistant" for chat in chats)


def test_the_fine_tuning_example_goes_on_from_the_run_that_train_makes_by_default() -> None:
    assert load_job(CONFIGS / "finetune.toml").model.weights == str(Run(Path("runs") / load_job(None).name).folder)
