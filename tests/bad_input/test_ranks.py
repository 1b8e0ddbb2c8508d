"""The same with several processes: one message, however many ranks found the fault."""

import subprocess
import sys
from pathlib import Path

from tests.bad_input.given import Bad, checkpoint, job, message, truncate
from tests.jobs import command, environment


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


def test_two_ranks_tell_of_a_held_out_set_without_anything_to_learn_once() -> None:
    Path("mute.jsonl").write_text('{"messages": [{"role": "user", "content": "Hello?"}]}\n')
    found = on_two_ranks(job(data__held_out_sources="mute.jsonl"))
    assert found.startswith("mute.jsonl: nothing to learn")
