"""``equigrad serve`` as a user has it: a process, a port, and a clean end."""

import json
import signal
import urllib.request
from pathlib import Path

import pytest

from equigrad.cli import main
from tests.jobs import command, inside, start_command, tiny_job, write_job


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serve")
    inside("train", write_job(tiny_job(train__steps=1), folder / "job.toml"), "--run", folder / "run")
    return folder / "run"


def test_a_run_is_served_until_it_is_asked_to_stop(run: Path) -> None:
    process = start_command("serve", run, "--port", "0", "--version", "7", "--name", "whale")
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("whale on http://127.0.0.1:")
    assert line.rstrip().endswith("version 7, native numerics; Ctrl-C ends it")
    url = line.split()[2].rstrip(",")
    body = json.dumps({"prompt": "Call me", "max_tokens": 4, "version": 7}).encode()
    answer = json.loads(urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", body)).read())
    assert len(answer["choices"][0]["equigrad"]["ids"]) == 4
    taken = command("serve", run, "--port", url.rpartition(":")[2])
    assert taken.returncode == 2
    assert "cannot listen on 127.0.0.1:" in taken.stderr
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err.splitlines()[-1]) == (0, "stopped")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--slots", "0"], "--slots is at least 1"),
        (["--port", "70000"], "--port from 0 to 65535"),
        (["--context", "100000"], "more than the model's"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    run: Path, words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(run), "--port", "0", *words]) == 2
    assert why in capsys.readouterr().err
