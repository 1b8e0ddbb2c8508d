"""Whatever a user gives wrong gets one clear message and exit code 2, and never a traceback.

In this process where that is possible, because it is faster; real processes where ranks, limits or signals take part.
"""

import gzip
import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from equigrad.cli import main
from equigrad.config import Job
from tests.jobs import command, environment, tiny_job, write_job

Bad = Callable[..., str]

TEXT = "".join(f"This is line {n} of a text, whose square is {n * n}.\n" for n in range(200))


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test stands in an empty folder with one good text file."""
    monkeypatch.chdir(tmp_path)
    Path("good.txt").write_text(TEXT)


@pytest.fixture
def bad(capfd: pytest.CaptureFixture[str]) -> Bad:
    """Runs a command that must fail on its input; returns the message."""

    def run(*words: str | Path) -> str:
        capfd.readouterr()
        code = main([str(word) for word in words])
        return message(code, capfd.readouterr().err)

    return run


def message(code: int, printed: str) -> str:
    """The one message of a command that ended with ``code``; fails unless it is what a user should see."""
    assert code == 2, printed
    assert "Traceback" not in printed
    assert printed.startswith("equigrad: error: ")
    assert printed.count("equigrad: error: ") == 1
    return printed.removeprefix("equigrad: error: ").strip()


def job(**changes: object) -> str:
    """A tiny job on the good text, with changes, as a file in the current folder."""
    values = {"data__sources": "good.txt", "data__held_out_every": 0, "train__steps": 2, "observe__sample_tokens": 0}
    return str(write_job(tiny_job(**values | changes), Path("job.toml")))


def job_from(weights: Path, **model: object) -> str:
    """A job that starts from given weights and says nothing of their shape but ``model``."""
    lines = [f"{key} = {value}" for key, value in model.items()]
    text = ["data.sources = 'good.txt'", "[model]", f"weights = '{weights}'", *lines]
    Path("weights.toml").write_text("\n".join(text))
    return "weights.toml"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two steps; tests take copies of it."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "good.txt").write_text(TEXT)
    small = tiny_job(
        data__sources=str(folder / "good.txt"),
        data__held_out_every=0,
        data__held_out_sources=str(folder / "good.txt"),
        train__steps=2,
        observe__sample_tokens=0,
        observe__report=False,
    )
    assert main(["train", str(write_job(small, folder / "job.toml")), "--run", str(folder / "run")]) == 0
    return folder / "run"


@pytest.fixture
def run(trained: Path) -> Path:
    shutil.copytree(trained, "run")
    return Path("run")


@pytest.fixture
def model(run: Path) -> Path:
    """The run's model as a Hugging Face folder."""
    assert main(["export", "run", "model"]) == 0
    return Path("model")


# ---- data that is missing, empty or malformed


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("missing.txt", "missing.txt: no such file"),
        ("none/*.jsonl", "none/*.jsonl: no file matches"),
        (".", "is a folder; name its files"),
        ("builtin:mobydick", "there are builtin:moby-dick, builtin:sotu"),
        ("job.toml", "cannot tell what it holds by its name; it should end in .txt, .jsonl, .jsonl.gz, .parquet"),
    ],
)
def test_a_missing_source_is_named(path: str, complaint: str, bad: Bad) -> None:
    assert complaint in bad("train", job(data__sources=path))


@pytest.mark.parametrize("name", ["empty.txt", "empty.jsonl", "empty.jsonl.gz"])
def test_an_empty_source_is_named(name: str, bad: Bad) -> None:
    Path(name).write_bytes(gzip.compress(b"") if name.endswith(".gz") else b"")
    assert bad("train", job(data__sources=name)).startswith(name)


def test_texts_that_are_all_empty_are_named(bad: Bad) -> None:
    Path("blank.jsonl").write_text('{"text": ""}\n\n{"text": ""}\n')
    assert "blank.jsonl: nothing to learn" in bad("train", job(data__sources="blank.jsonl"))


@pytest.mark.parametrize("packed", [False, True], ids=["jsonl", "jsonl.gz"])
@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b'{"text": "b"', "not valid JSON"),
        (b"text", "not valid JSON"),
        (b'["text"]', "must hold an object"),
        (b'{"txt": "b"}', "no key 'text'; the keys are 'txt'"),
        (b'{"text": 3}', "'text' must be a string, not int"),
        (b'{"text": "\xff"}', "not UTF-8"),
        (b'{"text": "\\ud800"}', "surrogate"),
    ],
)
def test_a_malformed_line_is_named_by_file_and_number(line: bytes, complaint: str, packed: bool, bad: Bad) -> None:
    name = "bad.jsonl.gz" if packed else "bad.jsonl"
    content = b'{"text": "a"}\n\n' + line + b"\n"
    Path(name).write_bytes(gzip.compress(content) if packed else content)
    found = bad("train", job(data__sources=name))
    assert found.startswith(f"{name}:3: ")
    assert complaint in found


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"messages": []}', "must be a list of at least one"),
        ('{"messages": [{"role": "user"}, {"content": "b"}]}', 'message 2: "role" must be a string'),
        ('{"messages": [{"role": "user", "content": 3}]}', 'message 1: "content" must be a string'),
        ('{"prompt": "a"}', "no key 'messages'"),
    ],
)
def test_a_malformed_chat_is_named_by_file_and_number(line: str, complaint: str, bad: Bad) -> None:
    good = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'
    Path("chats.jsonl").write_text(f"{good}\n{line}\n")
    found = bad("train", job(data__sources="chats.jsonl"))
    assert found.startswith("chats.jsonl:2: ")
    assert complaint in found


@pytest.mark.parametrize("name", ["cut.jsonl.gz", "not.jsonl.gz", "not.parquet"])
def test_a_damaged_file_is_named(name: str, bad: Bad) -> None:
    lines = "".join(json.dumps({"text": line}) + "\n" for line in TEXT.splitlines())
    packed = gzip.compress(lines.encode())
    Path(name).write_bytes(packed[: len(packed) // 2] if name.startswith("cut") else b"plain words")
    assert bad("train", job(data__sources=name)).startswith(f"{name} is damaged")


def test_a_text_that_is_not_utf8_is_named_with_its_place(bad: Bad) -> None:
    Path("latin.txt").write_bytes(b"caf\xe9 au lait")
    assert "latin.txt: not UTF-8 at byte 4" in bad("train", job(data__sources="latin.txt"))


def test_data_that_is_all_held_out_is_named(bad: Bad) -> None:
    assert "good.txt has no training samples" in bad("train", job(data__held_out_every=1))


def test_a_run_that_failed_on_its_data_leaves_its_folder_free(bad: Bad) -> None:
    bad("train", job(data__sources="missing.txt"), "--run", "new")
    assert main(["train", job(), "--run", "new"]) == 0


# ---- jobs that say what cannot be


def test_a_missing_job_file_is_named(bad: Bad) -> None:
    assert bad("train", "nothing.toml") == "no job file at nothing.toml"


def test_a_job_file_that_is_not_toml_is_named_with_the_line(bad: Bad) -> None:
    Path("bad.toml").write_text("[train]\nsteps =\n")
    assert bad("train", "bad.toml").startswith("bad.toml: not valid TOML")
    Path("bad.toml").write_text("[train]\nsteps =\n")
    assert "line 2" in bad("train", "bad.toml")


def test_an_unknown_key_gets_the_nearest_one(bad: Bad) -> None:
    Path("bad.toml").write_text("[optim]\nlearning = 1\nlrr = 3\n")
    found = bad("train", "bad.toml")
    assert "bad.toml: unknown key 'optim.lrr'; did you mean 'optim.lr'?" in found
    assert "'train.steps'" in bad("train", job(), "--train.step", "3")


def test_a_wrong_type_is_named(bad: Bad) -> None:
    assert "command line: train.steps" in bad("train", job(), "--train.steps", "many")


def test_parallelism_that_is_not_there_is_refused(bad: Bad) -> None:
    assert "leave pp at 1" in bad("train", job(), "--layout.pp", "2")


def test_expert_parallelism_without_experts_is_refused(bad: Bad) -> None:
    assert "the model has none" in bad("train", job(), "--layout.ep", "2", "--layout.dp_shard", "2")


@pytest.mark.parametrize(("started", "shards"), [(1, 2), (3, 2)])
def test_a_layout_that_does_not_fit_the_processes_is_refused(started: int, shards: int) -> None:
    ranks = {"RANK": "0", "WORLD_SIZE": str(started), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(started)}
    done = command("train", job(layout__dp_shard=shards), env=ranks)
    found = message(done.returncode, done.stderr)
    assert f"dp_shard {shards}" in found
    assert f"does not fit the {started} process" in found


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


def test_an_extra_that_is_not_installed_is_named(bad: Bad, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert "pip install 'equigrad[wandb]'" in bad("train", job(observe__wandb_project="p"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    Path("a.parquet").touch()
    assert "pip install 'equigrad[data]'" in bad("train", job(data__sources="a.parquet"), "--run", "other")


# ---- checkpoints


def checkpoint(run: Path) -> Path:
    return run / "checkpoints" / "step-00000002"


def test_a_resumed_run_of_another_architecture_is_refused(bad: Bad, run: Path) -> None:
    text = (run / "job.toml").read_text()
    (run / "job.toml").write_text(text.replace("intermediate_size = 48", "intermediate_size = 64"))
    found = bad("train", "--run", run, "--resume", "--train.steps", "4")
    assert "checkpoint of another architecture" in found
    assert "mlp.down_proj.weight (float32 [32, 48] in it, float32 [32, 64] here)" in found
    for words in (["eval", run], ["generate", run], ["train", job_from(run), "--run", "new"]):
        assert "checkpoint of another architecture" in bad(*words)


def test_a_resumed_run_cannot_change_what_its_state_means(bad: Bad, run: Path) -> None:
    for key, value in (("model.hidden_size", "64"), ("data.context", "40"), ("seed", "4"), ("data.shuffle", "false")):
        assert f"cannot change {key}" in bad("train", "--run", run, "--resume", f"--{key}", value)


def test_a_resumed_run_with_other_data_is_refused(bad: Bad, run: Path) -> None:
    text = (run / "job.toml").read_text()
    old = next(line for line in text.splitlines() if line.startswith("sources"))
    (run / "job.toml").write_text(text.replace(old, 'sources = ["good.txt"]'))
    Path("good.txt").write_text(TEXT + "more")
    assert "the data is not what the run was trained on" in bad("train", "--run", run, "--resume", "--train.steps", "4")


def test_given_weights_of_another_shape_are_refused(bad: Bad, run: Path, model: Path) -> None:
    for weights in (run, model):
        found = bad("train", job_from(weights, hidden_size=64))
        assert f"model.hidden_size is 64, but {weights} has 32" in found


def test_a_model_folder_whose_config_is_not_that_of_its_weights_is_refused(bad: Bad, model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    assert "has shape (32, 48), the model needs (32, 64)" in bad("generate", model)
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    assert "the weights do not fit its config.json (missing: model.layers.2." in bad("import", model, "new")
    (model / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    assert "model_type is 'gpt2'; the families that can be imported are llama, qwen2, qwen3" in bad("info", model)
    (model / "config.json").write_text("{")
    assert "config.json: cannot be read" in bad("info", model)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "name", "complaint"),
    [
        (truncate, "rank-00000.safetensors", "is damaged: it has"),
        (flip, "rank-00000.safetensors", "is damaged: its bytes are not those that were written"),
        (Path.unlink, "rank-00000.safetensors", "is missing from the checkpoint"),
        (truncate, "manifest.json", "is damaged: not valid JSON"),
        (flip, "manifest.json", "is damaged"),
    ],
    ids=["truncated", "flipped", "missing", "manifest truncated", "manifest flipped"],
)
def test_a_damaged_checkpoint_is_named_by_every_command(
    harm: Callable[[Path], None], name: str, complaint: str, bad: Bad, run: Path
) -> None:
    harm(checkpoint(run) / name)
    for words in (
        ["train", "--run", run, "--resume", "--train.steps", "4"],
        ["eval", run],
        ["generate", run],
        ["info", run],
        ["info", checkpoint(run)],
        ["train", job_from(run), "--run", "new"],
    ):
        found = bad(*words)
        assert name in found
        assert complaint in found


def test_a_truncated_checkpoint_is_not_exported(bad: Bad, run: Path) -> None:
    truncate(checkpoint(run) / "rank-00000.safetensors")
    assert "is damaged" in bad("export", run, "model")
    assert not Path("model").exists()


def test_truncated_weights_of_a_model_folder_are_named(bad: Bad, model: Path) -> None:
    truncate(model / "model.safetensors")
    for words in (["generate", model], ["import", model, "new"], ["info", model]):
        assert "model.safetensors: damaged" in bad(*words)


def test_a_checkpoint_of_a_newer_format_is_refused(bad: Bad, run: Path) -> None:
    manifest = checkpoint(run) / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 99}))
    assert "has format 99, of a newer equigrad" in bad("info", run)


# ---- folders


def test_an_existing_run_is_not_overwritten(bad: Bad, run: Path) -> None:
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    assert "already holds a run; --resume continues it" in bad("train", job(), "--run", run)
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before


def test_a_folder_that_is_not_empty_is_not_written_into(bad: Bad, model: Path) -> None:
    for words in (
        ["train", job(), "--run", model],
        ["import", model, model],
        ["export", "run", model],
        ["train", job(), "--run", "good.txt"],
        ["export", "run", "good.txt"],
    ):
        assert "exists and is not an empty folder" in bad(*words)
    assert "exists already" in bad("tokenizer", "train", "good.txt", "--out", model)


def test_a_folder_that_cannot_be_written_is_named(bad: Bad, run: Path, model: Path) -> None:
    for words in (
        ["train", job(), "--run", "good.txt/run"],
        ["train", job(data__cache="good.txt/cache"), "--run", "new"],
        ["export", run, "good.txt/model"],
        ["import", model, "good.txt/run"],
        ["tokenizer", "train", "good.txt", "--out", "good.txt/tokenizer"],
        ["info", run, "--json", "good.txt/info.json"],
        ["eval", run, "--json", "good.txt/eval.json"],
        ["generate", run, "--max-tokens", "1", "--json", "good.txt/out.json"],
    ):
        found = bad(*words)
        assert found.startswith("cannot write")
        assert "good.txt/" in found


def test_a_file_where_the_checkpoints_should_go_is_named(bad: Bad, run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").write_text("in the way")
    found = bad("train", "--run", run, "--resume", "--train.steps", "4")
    assert "run/checkpoints" in found


def test_a_full_disk_is_named_and_the_last_good_checkpoint_stays(run: Path) -> None:
    """A limit on the size of files stands for the disk: writing fails in the same way, half way through."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    words = [sys.executable, "-m", "equigrad", "train", "--run", str(run), "--resume", "--train.steps", "4"]
    done = subprocess.run(words, preexec_fn=limit, capture_output=True, text=True, env=environment(), timeout=100)
    found = message(done.returncode, done.stderr)
    assert "the checkpoint of step 4 could not be saved; earlier ones are intact" in found
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000002"]
    assert main(["info", str(run)]) == 0


@pytest.mark.parametrize("command_", ["eval", "generate", "info", "export", "import"])
def test_a_folder_that_is_not_there_or_holds_nothing_of_ours_is_named(command_: str, bad: Bad) -> None:
    more = ["out"] if command_ in ("export", "import") else []
    assert "no folder at nothing" in bad(command_, "nothing", *more)
    Path("empty").mkdir()
    assert "neither config.json (a model), job.toml (a run) nor manifest.json" in bad(command_, "empty", *more)


def test_a_report_of_what_is_no_run_is_refused(bad: Bad) -> None:
    assert "is not a run folder: it has no job.toml" in bad("report", "nothing")


def test_a_run_whose_own_files_are_broken_is_named(bad: Bad, run: Path) -> None:
    (run / "summary.json").write_text("{")
    assert "summary.json" in bad("info", run)
    assert "summary.json" in bad("report", run)
    (run / "summary.json").unlink()
    (run / "tokenizer" / "tokenizer.json").write_text("{")
    assert "tokenizer.json is not a tokenizer.json" in bad("generate", run)
    (run / "job.toml").write_text("[train")
    for name in ("info", "report", "eval", "generate"):
        assert "job.toml: not valid TOML" in bad(name, run)


def test_a_run_that_has_no_checkpoint_is_named(bad: Bad, run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    for words in (["eval", run], ["generate", run], ["export", run, "model"]):
        assert "is a run without a checkpoint yet" in bad(*words)


def test_a_model_without_a_tokenizer_cannot_read_text(bad: Bad, model: Path) -> None:
    (model / "tokenizer.json").unlink()
    assert "model has no tokenizer.json" in bad("generate", model)


def test_an_evaluation_of_nothing_is_refused(bad: Bad, model: Path) -> None:
    assert "nothing is held out: data.held_out_every is 0, of 139 documents" in bad("eval", model)


@pytest.mark.parametrize(
    "words",
    [("--temperature", "-1"), ("--top-p", "0"), ("--top-p", "1.5"), ("--max-tokens", "-1"), ("--prompt-file", "no")],
)
def test_a_sampling_that_makes_no_sense_is_refused(words: tuple[str, str], bad: Bad, run: Path) -> None:
    bad("generate", run, *words)


def test_a_vocabulary_too_small_for_bytes_is_refused(bad: Bad) -> None:
    found = bad("tokenizer", "train", "good.txt", "--vocab-size", "258", "--out", "t")
    assert "--vocab-size must be at least 259" in found


# ---- the same with several processes: one message, however many ranks found the fault


def on_two_ranks(file: str, *words: str | Path) -> str:
    done = command("train", file, "--layout.dp_shard", "2", *words, timeout=100)
    return message(done.returncode, done.stderr)


def test_two_ranks_tell_of_a_malformed_line_once() -> None:
    Path("bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    assert on_two_ranks(job(data__sources="bad.jsonl")).startswith("bad.jsonl:2: not valid JSON")


def test_two_ranks_tell_of_a_vocabulary_mismatch_once() -> None:
    assert "the tokenizer has 257 tokens" in on_two_ranks(job(model__vocab_size=100))


def test_two_ranks_tell_of_a_damaged_checkpoint_once(run: Path) -> None:
    truncate(checkpoint(run) / "rank-00000.safetensors")
    done = command("train", "--run", run, "--resume", "--train.steps", "4", "--layout.dp_shard", "2", timeout=100)
    assert "is damaged" in message(done.returncode, done.stderr)


def test_what_is_wrong_with_words_and_folders_is_told_before_ranks_start(bad: Bad, run: Path) -> None:
    two = ["--layout.dp_shard", "2"]
    assert "already holds a run" in bad("train", job(), "--run", run, *two)
    assert "cannot write" in bad("train", job(), "--run", "good.txt/run", *two)
    assert "unknown key" in bad("train", job(), "--train.stps", "3", *two)


def test_torchrun_ranks_tell_of_a_wrong_layout_once() -> None:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "equigrad", "train", job()]
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, env=environment(), timeout=100, check=False
    )
    assert done.returncode != 0
    assert done.stderr.count("equigrad: error: layout ") == 1
    assert "does not fit the 2 processes" in done.stderr


def test_the_tiny_job_is_good() -> None:
    """The counterpart of all tests above: without a fault the same job runs."""
    assert isinstance(tiny_job(), Job)
    assert main(["train", job()]) == 0
