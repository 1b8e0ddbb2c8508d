import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def crashes(folder: Path, what: str) -> list[dict]:
    command = [sys.executable, "-m", "tests.checkpoint.crashes", str(folder), what]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def clean(names: list[str]) -> bool:
    return all(re.fullmatch(r"step-\d{8}", name) for name in names)


def test_killed_before_any_change_of_the_file_system_a_save_leaves_a_complete_checkpoint(tmp_path):
    seen = crashes(tmp_path, "every_change")
    values = [attempt["value"] for attempt in seen]
    assert values == sorted(values)
    assert set(values) == {1, 2, 3}
    assert all(attempt["restarted"] == attempt["value"] for attempt in seen)
    assert all(clean(attempt["names"]) and attempt["saved"] == ["step-00000009"] for attempt in seen)
    assert len(seen) > 40


def test_killed_at_any_time_an_asynchronous_save_leaves_a_complete_checkpoint(tmp_path):
    seen = crashes(tmp_path, "at_random")
    assert len(seen) == 8
    assert all(attempt["restarted"] == attempt["value"] and clean(attempt["names"]) for attempt in seen)


def test_a_file_system_that_refuses_in_mid_write_is_told_and_spares_the_last_checkpoint(tmp_path):
    refused, after = crashes(tmp_path, "limited")
    assert "the checkpoint of step 2 could not be saved; earlier ones are intact." in refused["error"]
    assert re.search(r"File too large: '.*rank-00000.safetensors'", refused["error"])
    assert refused["names"] == ["step-00000001"]
    assert after["value"] == 1
    assert after["saved"] == ["step-00000009"]
