"""Processes hang, die and talk nonsense; every request is answered exactly once, and in the end nothing is left."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from equigrad.rl.tasks.pool import Outcome, Pool
from equigrad.rl.tasks.protocol import Question, Verdict
from tests.jobs import environment
from tests.rl.tasks.given import WILD, talk, write

QUESTION = Question("?", {"tag": 5})


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = write(tmp_path_factory.mktemp("task") / "wild.py", WILD)
    return {"kind": "python", "name": f"{file}:Wild", "options": {"base": 100.0}, "long": False}


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """One process, which tests share: what one does to it must not reach the next."""
    with Pool(1, timeout_s=1.5, memory_mb=400) as found:
        yield found


def argument(completion: str) -> dict[str, Any]:
    return talk(QUESTION, completion).to_json()


def ask(pool: Pool, spec: dict[str, Any], completion: str) -> Outcome:
    return pool.submit(spec, "verify", argument(completion)).result(30)


def gone(pid: int) -> bool:
    """Whether a process has ended; one that was adopted may be a zombie for as long as its new parent likes."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def until(condition: Any, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("completion", "fault"),
    [
        ("spin", "no answer within 1.5 s; the process was killed"),
        ("quit", "the process ended with exit code 3"),
        ("kill", "the process was ended by SIGKILL"),
        ("segfault", "the process was ended by SIGSEGV"),
        ("close", "the process "),
        ("talk", "the process sent what is no answer, and was killed"),
    ],
)
def test_a_process_that_is_lost_fails_its_own_request_and_no_other(
    pool: Pool, spec: dict[str, Any], completion: str, fault: str
) -> None:
    (before, lost, after) = (pool.submit(spec, "verify", argument(c)) for c in ("ok 1", completion, "ok 2"))
    assert before.result(30).value["reward"] == 101
    assert lost.result(30).value is None
    assert fault in str(lost.result().fault)
    assert after.result(30).value["reward"] == 102


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("raise", "the verifier raised ValueError: no good ("),
        ("exit", "the verifier raised SystemExit: enough ("),
        ("garbage", "no finite number for a reward: {'none'"),
        ("nan", "no finite number for a reward: nan"),
        ("huge", "no finite number for a reward"),
        ("evil", "no finite number for a reward: a Evil whose repr raises ValueError"),
        ("memory", "the verifier raised MemoryError ("),
    ],
)
def test_what_a_verifier_raises_or_returns_wrongly_is_a_failed_verdict(
    pool: Pool, spec: dict[str, Any], completion: str, reason: str
) -> None:
    found = Verdict(**ask(pool, spec, completion).value)
    assert found.failed
    assert reason in found.reason
    assert ask(pool, spec, "ok 3").value["reward"] == 103


def test_what_a_task_prints_and_long_reasons_disturb_nothing(pool: Pool, spec: dict[str, Any]) -> None:
    assert ask(pool, spec, "print").value["reward"] == 100
    long = ask(pool, spec, "long").value
    assert long["reward"] == 1
    assert len(long["reason"]) < 10_000


def test_a_process_that_has_grown_is_replaced_before_it_fails_others(pool: Pool, spec: dict[str, Any]) -> None:
    """Each call keeps 150 MiB of 400."""
    pids = {ask(pool, spec, "leak").value["reward"] for _ in range(6)}
    assert len(pids) >= 3


def test_a_process_that_dies_while_idle_fails_nothing(pool: Pool, spec: dict[str, Any]) -> None:
    pid = int(ask(pool, spec, "where").value["reason"])
    assert pool.pids() == [pid]
    os.kill(pid, signal.SIGKILL)
    until(lambda: gone(pid))
    found = ask(pool, spec, "where")
    assert found.fault is None
    assert int(found.value["reason"]) != pid


def test_what_a_verifier_has_started_ends_with_it(pool: Pool, spec: dict[str, Any]) -> None:
    child = int(ask(pool, spec, "children").value["reason"])
    assert not gone(child)
    ask(pool, spec, "quit")
    until(lambda: gone(child))


def test_a_request_larger_than_any_buffer_arrives(pool: Pool, spec: dict[str, Any]) -> None:
    found = ask(pool, spec, "ok " + " " * 2_000_000 + "7")
    assert found.value["reward"] == 107


def test_a_task_that_cannot_be_made_is_a_fault_of_every_request(pool: Pool, spec: dict[str, Any]) -> None:
    for changes, fault in (
        ({"name": spec["name"].replace("wild", "tame")}, "no such file"),
        ({"options": {"no_such": 1}}, "TypeError"),
        ({"name": spec["name"].replace("Wild", "Evil")}, "derives from equigrad.rl.tasks.Task"),
    ):
        for _ in range(2):
            assert fault in str(pool.submit(spec | changes, "verify", argument("ok 1")).result(30).fault)


def test_two_hundred_requests_of_three_processes_are_answered_exactly_once_each(spec: dict[str, Any]) -> None:
    """While some die by themselves, some hang, and somebody else kills at random."""
    answered: dict[int, list[Outcome]] = {n: [] for n in range(200)}
    bad = {17: "quit", 40: "hang", 71: "kill", 90: "talk", 133: "segfault", 160: "raise"}
    with Pool(3, timeout_s=2.0, memory_mb=0) as pool:
        for n in range(200):
            completion = bad.get(n, f"ok {n}")
            future = pool.submit(spec, "verify", argument(completion))
            future.add_done_callback(lambda done, n=n: answered[n].append(done.result()))  # type: ignore[misc]
        until(lambda: sum(map(len, answered.values())) > 60, 60)
        os.kill(pool.pids()[0], signal.SIGKILL)
        until(lambda: all(answered.values()), 60)
        pids = pool.pids()
    assert all(len(outcomes) == 1 for outcomes in answered.values())
    lost = {n for n, (outcome,) in answered.items() if outcome.fault is not None}
    assert len(lost - set(bad)) <= 1  # whatever the killed one was at, if anything
    assert lost >= set(bad) - {160}
    for n in set(answered) - lost - {160}:
        assert answered[n][0].value["reward"] == 100 + n
    assert all(gone(pid) for pid in pids)


def test_closing_ends_everything_at_once_and_answers_what_was_asked(spec: dict[str, Any]) -> None:
    threads = threading.active_count()
    pool = Pool(2, timeout_s=60.0, memory_mb=0)
    assert ask(pool, spec, "ok 1").fault is None
    futures = [pool.submit(spec, "verify", argument("hang")) for _ in range(5)]
    until(lambda: futures[1].running())
    pids, start = pool.pids(), time.monotonic()
    pool.close()
    assert time.monotonic() - start < 5
    assert [future.result(0).fault for future in futures] == ["the pool was closed"] * 5
    assert all(gone(pid) for pid in pids)
    assert threading.active_count() == threads
    pool.close()  # once more does no harm
    with pytest.raises(ValueError, match="the pool is closed"):
        pool.submit(spec, "verify", argument("ok 1"))


def test_a_process_whose_parent_is_killed_ends_too(spec: dict[str, Any]) -> None:
    """At once where it waits; a second after its time where it hangs."""
    code = f"""
import time
from equigrad.rl.tasks.pool import Pool
pool = Pool(2, 1.5, 0)
spec, waiting, hanging = {spec!r}, {argument("ok 1")!r}, {argument("spin")!r}
pool.submit(spec, "verify", waiting).result()
pool.submit(spec, "verify", hanging)
while len(pool.pids()) < 2:
    pool.submit(spec, "verify", waiting).result()
time.sleep(0.3)
print(*pool.pids(), flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], env=environment(), stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = list(map(int, parent.stdout.readline().split()))
        parent.kill()
    assert len(pids) == 2
    until(lambda: all(map(gone, pids)), 10)
