"""The command line itself: it answers at once, says what there is, and knows what to do with words it does not know."""

import re
import subprocess
import sys
import time

import pytest

from equigrad import __version__
from equigrad.cli import COMMANDS, main, split_overrides
from equigrad.errors import UserError
from tests.jobs import environment


def python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment(), timeout=60)


# ---- quick answers


def test_help_answers_in_under_half_a_second() -> None:
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        assert python("-m", "equigrad", "--help").returncode == 0
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 0.5  # the quietest of five: other tests may be running beside this one


@pytest.mark.parametrize(
    "words",
    [
        *("--help", "train --help", "eval --help", "info --help", "train --dry-run"),
        "schedule docs/division.toml --layout.cp 8",
    ],
)
def test_what_computes_nothing_does_not_load_torch(words: str) -> None:
    code = (
        "import sys; from equigrad.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'transformers', 'datasets', 'wandb'} & set(sys.modules)), file=sys.stderr)"
    )
    result = python("-c", code, *words.split())
    assert result.stderr.strip() == "[]", result.stderr


def test_help_loads_not_even_the_configuration() -> None:
    result = python("-X", "importtime", "-m", "equigrad", "--help")
    loaded = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "equigrad.cli" in loaded
    assert not {"pydantic", "numpy", "rich", "torch"} & loaded


# ---- help


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_every_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    printed = capsys.readouterr().out
    for command, meaning in ((name, chosen.text) for name, chosen in COMMANDS.items()):
        assert re.search(rf"^  {command} +{re.escape(meaning)}$", printed, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main([command, "--help"])
    except SystemExit as end:  # argparse
        code = end.code
    printed = capsys.readouterr().out
    assert code == 0
    assert f"usage: equigrad {command}" in printed
    assert COMMANDS[command].text in " ".join(printed.split())


def test_the_help_of_train_lists_keys_with_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    printed = capsys.readouterr().out
    assert "--layout.dp_shard {int}  (default: 1)" in printed
    assert "--run DIR" in printed


def test_the_help_of_eval_tells_of_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["eval", "--help"])
    assert "--data.held_out_sources FILE" in capsys.readouterr().out


@pytest.mark.parametrize("width", [60, 150])
def test_the_help_of_train_fits_the_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["train", "--help"]) == 0
    longest = max(map(len, capsys.readouterr().out.splitlines()))
    assert width - 20 < longest < width


@pytest.mark.parametrize("word", ["--version", "-V"])
def test_version(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 0
    assert capsys.readouterr().out == f"equigrad {__version__}\n"


def test_the_module_is_the_command() -> None:
    assert python("-m", "equigrad", "--version").stdout == f"equigrad {__version__}\n"


def test_the_exit_code_is_that_of_main() -> None:
    result = python("-m", "equigrad", "nonsense")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("equigrad: error: ")


# ---- words


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "unknown command 'trian'; did you mean 'train'?"),
        (["xyzzy"], f"unknown command 'xyzzy'; commands: {', '.join(COMMANDS)}"),
        (["train", "--steps", "3"], "unknown option --steps; did you mean 'train.steps'?"),
        (["train", "--resum"], "unknown option --resum"),
        (["train", "a.toml", "b.toml"], "unrecognized arguments: b.toml"),
        (["train", "--train.steps"], "--train.steps needs a value"),
        (["eval"], "the following arguments are required: model; see `equigrad eval --help`"),
        (["generate", "m", "--top-p", "much"], "argument --top-p: invalid float value: 'much'"),
        (["tokenizer", "eat", "x", "--out", "y"], "invalid choice: 'eat'"),
        (["export", "a", "b", "--dtype", "int3"], "invalid choice: 'int3'"),
    ],
)
def test_words_that_make_no_sense_are_named(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"equigrad: error: {message}") or message in printed.err
    assert len(printed.err.splitlines()) == 1


def test_overrides_may_stand_anywhere_among_the_words() -> None:
    words = ["--optim.lr", "1", "job.toml", "--seed=3", "--run", "x", "--name", "n", "--resume", "--train.steps=2"]
    own, overrides = split_overrides(words)
    assert own == ["job.toml", "--run", "x", "--resume"]
    assert overrides == ["--optim.lr", "1", "--seed=3", "--name", "n", "--train.steps=2"]


def test_the_dashes_that_torchrun_needs_may_arrive_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--", "--version"]) == 0
    assert main(["--"]) == 0


def test_a_negative_value_is_a_value() -> None:
    assert split_overrides(["--seed", "-1"]) == ([], ["--seed", "-1"])


def test_a_user_error_is_one_line_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> int:
        raise UserError("the cheese is missing")

    monkeypatch.setattr("equigrad.commands.info.main", fail)
    assert main(["info", "x"]) == 2
    assert capsys.readouterr().err == "equigrad: error: the cheese is missing\n"


def test_a_fault_of_the_program_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equigrad.commands.info.main", lambda _: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        main(["info", "x"])


def test_an_interrupt_exits_as_the_shell_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("equigrad.commands.info.main", interrupt)
    assert main(["info", "x"]) == 130


def test_a_closed_pipe_is_no_traceback() -> None:
    command = f"{sys.executable} -m equigrad train --help | head -1"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, env=environment(), timeout=60)
    assert result.stdout.startswith("usage: equigrad train")
    assert "Traceback" not in result.stderr


def test_a_single_process_starts_without_the_slow_parts_of_torch() -> None:
    """The compiler and distributed tensors cost seconds to import; start-up to the first step is under six."""
    code = (
        "import sys, torch, equigrad.trainer, equigrad.commands.session\n"
        "from equigrad.build import build_model\nfrom equigrad.parallel.world import start\n"
        "from tests.jobs import tiny_job\njob = tiny_job()\nmodel = build_model(job, start(job.layout))\n"
        "model.initialize(0)\n"
        "slow = {'torch._dynamo', 'torch.distributed.tensor', 'sympy', 'transformers'} & set(sys.modules)\n"
        "assert not slow, slow\n"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "words", [["generate", "run", "--prompt", "\udcff"], ["train", "--data.sources", "\udcff.txt"]]
)
def test_words_that_are_not_text_are_told(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert "is not UTF-8" in capsys.readouterr().err


def test_a_terminal_that_knows_ascii_only_shows_what_it_can() -> None:
    program = "import equigrad.cli; equigrad.cli.main(['--version']); print('\\u2013 \\U0001f40b')"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment({"PYTHONIOENCODING": "ascii"})
    )
    assert done.returncode == 0, done.stderr
    assert "\\u2013" in done.stdout
