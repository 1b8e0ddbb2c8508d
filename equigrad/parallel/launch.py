"""Starts local workers through torch's elastic agent, and tells one clear story when one of them fails.

A failing worker writes what happened into a report; the launcher shows the report of the worker that failed first and
ends the others within seconds. Under torchrun or SLURM this launcher is not used; there ``failure`` does the same.
"""

import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from equigrad.errors import UserError
from equigrad.files import in_one_piece
from equigrad.parallel.environment import LAUNCH_FOLDER
from equigrad.parallel.stop import STOP_SIGNALS

INTERRUPTED = 130
"""Exit code of who was stopped at once, as shells have it."""
_STOP = "stop-asked"
# How long surviving workers may take to end after another one failed.
_GRACE_SECONDS = 5
# How long a rank that is not the cause waits for another one to tell it, where there is no launcher: where rank 0 tells
# for all, and where there may be no other.
_SHARED_SECONDS, _CAUSE_SECONDS = 10, 3


class Death(NamedTuple):
    """How a worker ended, and when: seconds since the epoch, whole ones."""

    code: int
    time: int


def launch(workers: int, arguments: Sequence[str], stops: bool = True) -> int:
    """Run ``equigrad ARGUMENTS`` as ``workers`` local processes and return the exit code for the shell.

    stops: whether workers that are asked to stop save and end by themselves. Where they just end, so does whoever
           waits for them: ``KeyboardInterrupt``
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, PContext, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.launcher").setLevel(logging.CRITICAL)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // workers)))
    # After a failure torch gives the others 30 seconds of its own, whatever ``shutdown_timeout`` says.
    PContext.close.__defaults__ = (None, _GRACE_SECONDS)
    with tempfile.TemporaryDirectory(prefix="equigrad-launch-") as folder:
        os.environ[LAUNCH_FOLDER] = folder
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=workers,
            run_id=f"equigrad-{os.getpid()}",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            # Torch would handle it also where it is ignored, as under nohup.
            signals_to_handle="" if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else "SIGHUP",
            shutdown_timeout=_GRACE_SECONDS,
        )
        handlers = {s: signal.signal(s, lambda number, _: _forward(Path(folder))) for s in STOP_SIGNALS}
        try:
            failures: dict[int, Any] = {}
            try:
                elastic_launch(config, sys.executable)("-m", "equigrad", *arguments)
            except ChildFailedError as error:
                failures = error.failures
            except SignalException as error:
                if not stops:
                    raise KeyboardInterrupt from None
                return 128 + int(error.sigval)
            if not stops and (Path(folder) / _STOP).exists():
                raise KeyboardInterrupt
            if not failures:
                return 0
            deaths = {rank: Death(f.exitcode, f.timestamp) for rank, f in failures.items()}
            return _explain(Path(folder), deaths)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            del os.environ[LAUNCH_FOLDER]


def _forward(folder: Path) -> None:
    """Pass a request to stop on to the workers, which then save and end by themselves. Those that are still starting
    find it in the folder."""
    (folder / _STOP).touch()
    for file in folder.glob("pid-*"):
        with contextlib.suppress(OSError, ValueError):
            os.kill(int(file.read_text()), signal.SIGTERM)


def _explain(folder: Path, deaths: dict[int, Death]) -> int:
    """Show the failure that came first, once. Returns 2 if the user can mend it, else 1."""
    if (folder / _STOP).exists() and all(death.code == -signal.SIGTERM for death in deaths.values()):
        print("stopped before the first step; nothing was saved")
        return 0
    reports = [json.loads(file.read_text()) for file in folder.glob("report-*.json")]
    # Whoever lost its peers is a victim; a worker killed by a signal left no report and is the cause.
    causes = sorted((r for r in reports if not r["lost_peers"]), key=lambda r: r["time"])
    reported = {r["rank"] for r in reports}
    # Who did not answer until the launcher killed it is no cause known here.
    late = min(death.time for death in deaths.values()) + _GRACE_SECONDS - 1
    silent = [rank for rank, death in sorted(deaths.items()) if death.code == -signal.SIGKILL and death.time >= late]
    answered = {rank: death.code for rank, death in sorted(deaths.items()) if rank not in silent}
    ended = (0, -signal.SIGTERM, INTERRUPTED)
    killed = [rank for rank, code in answered.items() if rank not in reported and code not in ended]
    if not causes and not killed and INTERRUPTED in answered.values():
        print("equigrad: interrupted", file=sys.stderr)
        return INTERRUPTED
    if not causes and not killed:
        causes = sorted(reports, key=lambda r: r["time"])
    if silent:
        print(f"equigrad: ranks {silent} did not answer and were ended", file=sys.stderr)
    if causes:
        first = causes[0]
        if first["user_error"]:
            print(f"equigrad: error: {first['text']}", file=sys.stderr)
            return 2
        print(f"equigrad: rank {first['rank']} failed:\n{first['text']}", file=sys.stderr)
    else:
        for rank in killed or sorted(deaths)[:1]:
            code = deaths[rank].code
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            print(f"equigrad: rank {rank} {how}; the run has ended", file=sys.stderr)
    return 1


def run_worker(rank: int, body: Callable[[], int]) -> int:
    """Run one rank's work. Errors go into the launcher's report; without a launcher they are shown here, and told to
    the other ranks, which then end as well.

    Returns the exit code.
    """
    folder = os.environ.get(LAUNCH_FOLDER)
    if folder:
        (Path(folder) / f"pid-{rank}").write_text(str(os.getpid()))
        if (Path(folder) / _STOP).exists():
            os.kill(os.getpid(), signal.SIGTERM)
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    try:
        return body()
    except KeyboardInterrupt:
        if not folder:
            raise
        code = INTERRUPTED  # the launcher tells that, once
    except Exception as error:
        code = _failed(rank, error, Path(folder) if folder else None)
    # The others may hang in a collective: leave at once, without the clean-up that would wait for them.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _failed(rank: int, error: Exception, folder: Path | None) -> int:
    """Tell of this rank's error; the exit code."""
    from equigrad.parallel.failure import Cause, watching
    from equigrad.parallel.ranks import SharedUserError

    users, shared = isinstance(error, UserError), isinstance(error, SharedUserError)
    lost = not users and _lost_peers(error)
    text = str(error) if users else "".join(traceback.format_exception(error))
    if folder is not None:
        _report(folder, rank, text, users, lost)
        return 2 if users else 1
    watch = watching()
    # Another rank tells, and its telling ends this process; torchrun would end that one if this one left first.
    if shared and rank:
        time.sleep(_SHARED_SECONDS)
        return 2
    if lost:
        time.sleep(_CAUSE_SECONDS if watch is not None else 0)
        text = f"it lost its peers: {str(error).splitlines()[0]}"
    cause = Cause(rank, text, users, shared)
    print(cause.shown_on(rank), file=sys.stderr, flush=True)
    if watch is not None:
        watch.tell(cause)
    return cause.code


def _end_with(parent: int) -> None:
    """Ask this worker to save and end once its launcher is gone: nobody would ever stop it."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGTERM)


def _report(folder: Path, rank: int, text: str, user_error: bool, lost_peers: bool) -> None:
    record = {"rank": rank, "time": time.time(), "text": text, "user_error": user_error, "lost_peers": lost_peers}
    with in_one_piece(folder / f"report-{rank}.json") as aside:
        aside.write_text(json.dumps(record))


def _lost_peers(error: Exception) -> bool:
    """Whether an error only says that another process is gone."""
    import torch.distributed as dist

    from equigrad.parallel.ranks import PeerError

    text = str(error)
    signs = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", "NCCL")
    return isinstance(error, dist.DistError | PeerError) or any(sign in text for sign in signs)
