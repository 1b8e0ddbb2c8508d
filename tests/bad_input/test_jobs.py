"""Jobs, words and environments that say what cannot be."""

import shutil
import sys
from pathlib import Path

import pytest

from equigrad.cli import main
from tests.bad_input.given import Bad, job, job_from, message
from tests.jobs import command


def test_a_missing_job_file_is_named(bad: Bad) -> None:
    assert bad("train", "nothing.toml") == "no job file at nothing.toml"


def test_a_job_file_that_is_not_toml_is_named_with_the_line(bad: Bad) -> None:
    Path("bad.toml").write_text("[train]\nsteps =\n")
    assert bad("train", "bad.toml").startswith("bad.toml: not valid TOML")
    Path("bad.toml").write_text("[train]\nsteps =\n")
    assert "line 2" in bad("train", "bad.toml")


@pytest.mark.parametrize("text", [f"seed = {'9' * 5000}", f"a = {'[' * 100_000}"], ids=["digits", "brackets"])
def test_a_job_file_that_is_too_much_for_a_parser_is_named(text: str, bad: Bad) -> None:
    Path("bad.toml").write_text(text)
    assert bad("train", "bad.toml").startswith("bad.toml: not valid TOML")


def test_what_no_cluster_has_is_refused(bad: Bad) -> None:
    assert "layout.cp" in bad("schedule", job(), "--layout.cp", "1000000000")


def test_a_modality_is_a_plain_name(bad: Bad) -> None:
    sources = r'[{path = "good.txt", modality = "a\n\u001b[31m"}]'
    assert "modality" in bad("schedule", job(), "--data.sources", sources)


def test_an_option_gets_its_plural(bad: Bad) -> None:
    assert "did you mean --layouts?" in bad("verify", job(), "--layout", "dp2")


def test_an_unknown_key_gets_the_nearest_one(bad: Bad) -> None:
    Path("bad.toml").write_text("[optim]\nlearning = 1\nlrr = 3\n")
    found = bad("train", "bad.toml")
    assert "bad.toml: unknown key 'optim.lrr'; did you mean 'optim.lr'?" in found
    assert "'train.steps'" in bad("train", job(), "--train.step", "3")
    assert "did you mean 'layout.cp'?" in bad("train", job(), "--layout.cq", "2")


def test_a_wrong_type_is_named(bad: Bad) -> None:
    assert "command line: train.steps" in bad("train", job(), "--train.steps", "many")


def test_expert_parallelism_without_experts_is_refused(bad: Bad) -> None:
    assert "the model has none" in bad("train", job(), "--layout.ep", "2", "--layout.dp_shard", "2")


def test_stages_without_a_pipeline_are_refused(bad: Bad) -> None:
    assert "pp_stages 2 needs a pipeline" in bad("train", job(), "--layout.pp_stages", "2")


def test_a_layout_that_does_not_fit_the_processes_is_refused() -> None:
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    done = command("train", job(layout__dp_shard=2), env=ranks)
    found = message(done.returncode, done.stderr)
    assert "dp_shard 2" in found
    assert "does not fit the 1 process" in found


def test_an_environment_that_makes_no_sense_is_refused(bad: Bad, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "first")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for words in (["train", job()], ["eval", run], ["generate", run]):
        assert "RANK is 'first'; it must be a whole number" in bad(*words)
    monkeypatch.setenv("RANK", "2")  # a process that waits for ranks that never come tells nothing at all
    assert "rank 2 of 2 processes" in bad("train", job(layout__dp_shard=2))


def test_gpus_that_are_not_there_are_named(bad: Bad, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "layout.device is cuda" in bad("train", job(layout__device="cuda"))


def test_a_context_longer_than_the_model_allows_is_refused(bad: Bad, run: Path, model: Path) -> None:
    file = job()
    for words in (
        ["train", file, "--model.max_position_embeddings", "32"],
        ["train", file, "--data.context", "96", "--batch.row_tokens", "96", "--model.max_position_embeddings", "95"],
        ["eval", run, "--data.context", "3000", "--batch.row_tokens", "3000", "--batch.tokens", "3000"],
        ["generate", run, "--prompt", "a", "--max-tokens", "3000"],
    ):
        found = bad(*words)
        assert "longer than the model" in found
        assert "max_position_embeddings" in found
    # The limit of given weights is theirs.
    found = bad("train", job_from(model), "--data.context", "3000")
    assert "longer than the model in model allows: max_position_embeddings is 2048" in found


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(bad: Bad, run: Path, model: Path) -> None:
    assert "the tokenizer has 257 tokens, but model.vocab_size is 100" in bad("train", job(model__vocab_size=100))
    assert main(["tokenizer", "train", "good.txt", "--vocab-size", "300", "--out", "large"]) == 0
    shutil.copy("large/tokenizer.json", model)
    for words in (["generate", model, "--prompt", "a"], ["eval", model, "--data.held_out_sources", "good.txt"]):
        assert "tokens, but model.vocab_size is 257" in bad(*words)


def test_a_tokenizer_that_is_none_is_named(bad: Bad) -> None:
    given = {"data__tokenizer": {"kind": "file", "path": "good.txt"}, "model__vocab_size": None}
    assert "good.txt is not a tokenizer.json" in bad("train", job(**given))
    Path("good.txt").unlink()
    assert "no tokenizer at good.txt" in bad("train", job(**given))


@pytest.mark.parametrize(
    ("package", "extra", "asks"),
    [
        ("wandb", "wandb", {"observe__wandb_project": "p"}),
        ("tensorboard", "tensorboard", {"observe__tensorboard": True}),
        ("datasets", "data", {"data__sources": ["good.txt", "hf:some/name"]}),
        ("pyarrow", "data", {"data__held_out_sources": "a.parquet"}),
    ],
)
def test_an_extra_that_is_not_installed_is_named_before_any_work(
    package: str, extra: str, asks: dict[str, object], bad: Bad, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    file = job(**asks)
    for words in (["train", file, "--run", "new"], ["train", file, "--run", "new", "--layout.dp_shard", "2"]):
        assert f"the job asks for {package}, which is not installed: pip install 'equigrad[{extra}]'" in bad(*words)
    assert sorted(path.name for path in Path().iterdir()) == ["good.txt", "job.toml"]


@pytest.mark.parametrize(
    "words",
    [
        *(("--temperature", value) for value in ("-1", "-0.01", "nan", "inf", "-inf")),
        *(("--top-p", value) for value in ("0", "-0.5", "1.5", "nan", "inf")),
        ("--max-tokens", "-1"),
        ("--prompt-file", "no"),
    ],
)
def test_a_sampling_that_makes_no_sense_is_refused(words: tuple[str, str], bad: Bad, run: Path) -> None:
    bad("generate", run, *words)


def test_a_vocabulary_too_small_for_bytes_is_refused(bad: Bad) -> None:
    found = bad("tokenizer", "train", "good.txt", "--vocab-size", "258", "--out", "t")
    assert "--vocab-size must be at least 259" in found


def test_the_tiny_job_is_good() -> None:
    """The counterpart of all tests above: without a fault the same job runs."""
    assert main(["train", job()]) == 0


MISFITS = [
    ({"tp": 3}, "layout.tp 3 divides key and value heads, and the model has model.num_key_value_heads 2;"
     " layout.tp can be at most 2"),
    ({"pp": 3}, "layout.pp 3 x layout.pp_stages 1 = 3 stages need a block each, and the model has"
     " model.num_hidden_layers 2; with layout.pp_stages 1 layout.pp can be at most 2"),
    ({"pp": 2, "pp_stages": 2}, "with layout.pp 2 layout.pp_stages can be at most 1, with layout.pp_stages 2 layout.pp"
     " can be at most 1"),
    ({"pp_stages": 2}, "layout.pp_stages 2 needs a pipeline, and layout.pp is 1"),
    ({"ep": 2, "dp_shard": 2}, "layout.ep 2 divides experts, and the model has none; leave layout.ep at 1"),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "complaint"), MISFITS, ids=str)
def test_a_layout_that_does_not_suit_the_model_is_refused_with_what_would(
    layout: dict[str, int], complaint: str, bad: Bad, run: Path, model: Path
) -> None:
    """Whether the shape is the job's, comes from given weights, or is that of a run to go on with."""
    words = [word for key, value in layout.items() for word in (f"--layout.{key}", str(value))]
    for dry in ([], ["--dry-run"]):
        assert complaint in bad("train", job(), *words, *dry)
        assert complaint in bad("train", job_from(model), "--data.context", "48", *words, *dry)
    (run / "job.toml").write_text((run / "job.toml").read_text().replace("[model]", f"[model]\nweights = '{model}'"))
    assert complaint in bad("train", "--run", run, "--resume", "--train.steps", "4", *words)
    assert complaint in bad("eval", run, *words)
    assert complaint in bad("eval", model, "--data.held_out_sources", "good.txt", *words)


def test_everything_that_does_not_fit_is_told_at_once(bad: Bad) -> None:
    found = bad("train", job(), "--layout.tp", "4", "--layout.pp", "5", "--layout.ep", "2")
    assert [line.rpartition("layout.")[1] != "" for line in found.splitlines()] == [True] * 3


def test_a_schedule_that_cannot_be_drawn_is_refused(bad: Bad) -> None:
    assert "--step must be at least 1, not 0" in bad("schedule", job(), "--step", "0")
    assert "train.steps is 3: there is no step 4" in bad("schedule", job(train__steps=3), "--step", "4")
    assert "no job file at nothing.toml" in bad("schedule", "nothing.toml")
    assert "layout.tp can be at most 2" in bad("schedule", job(), "--layout.tp", "3")
    assert "cannot write /: not a file's name" in bad("schedule", job(), "--json", "/")
    assert "cannot write good.txt/a.svg" in bad("schedule", job(), "--svg", "good.txt/a.svg")


def test_compiled_blocks_and_deferred_weight_gradients_do_not_go_together(bad: Bad) -> None:
    words = ["--layout.pp", "2", "--layout.pp_schedule", "zero_bubble", "--numerics.compile", "true"]
    assert "does not go with layout.pp_schedule" in bad("train", job(), *words)
