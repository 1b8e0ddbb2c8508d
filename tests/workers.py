"""Real gloo processes for tests, started once per session: send them a function, get back what each rank returned."""

import gc
import multiprocessing as mp
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


def _serve(rank: int, size: int, store: str, pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    torch.set_num_threads(1)
    calls = 0
    while (message := pipe.recv_bytes()) != b"stop":
        # New groups for every call: threads of gloo wake a hundred times a second as long as their group lives.
        calls += 1
        meeting = f"file://{store}{calls}"
        dist.init_process_group("gloo", meeting, rank=rank, world_size=size, timeout=timedelta(seconds=60))
        pipe.send_bytes(_answer(message))
        with suppress(RuntimeError):  # of ranks that are no more
            dist.barrier()
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # which keeps meshes, and these their groups
        gc.collect()
        if calls == 1:
            gc.freeze()  # what was imported, so that the next collection is short


def _answer(message: bytes) -> bytes:
    try:
        function, args, kwargs = pickle.loads(message)
        reply = ("value", function(*args, **kwargs))
    except BaseException:
        reply = ("error", traceback.format_exc())
    return pickle.dumps(reply)


class Workers:
    """A pool of ``size`` ranks. ``run(f, *args)`` calls ``f`` on every rank; ``f`` is a module-level function."""

    def __init__(self, size: int) -> None:
        # Ranks are forked from a process that has loaded everything and done nothing, once for all pools.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed.checkpoint", "torch.distributed.fsdp", "tests.jobs"])
        self.size, self._folder, self.alive = size, tempfile.TemporaryDirectory(), True
        store = str(Path(self._folder.name) / "store")
        self._pipes, self._processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 120, **kwargs: Any) -> list[Any]:
        """The results in rank order. A rank that raises, dies or is silent for ``timeout`` seconds fails the call."""
        message = pickle.dumps((function, args, kwargs))
        for pipe in self._pipes:
            pipe.send_bytes(message)
        replies, silent, deadline = [], [], time.monotonic() + timeout
        for rank, pipe in enumerate(self._pipes):
            if pipe.poll(max(deadline - time.monotonic(), 0.1)):
                replies.append(pickle.loads(pipe.recv_bytes()))
            else:
                silent.append(rank)
                replies.append(("error", f"did not answer within {timeout} s"))
        errors = [f"rank {rank}:\n{text}" for rank, (kind, text) in enumerate(replies) if kind == "error"]
        if silent:
            self.kill()  # what they still have to say would be taken for the answer to something else
        if errors:
            raise AssertionError("\n".join(errors))
        return [value for _, value in replies]

    def kill(self) -> None:
        """End the ranks at once. The pool is of no more use."""
        self.alive = False
        for process in self._processes:
            process.kill()

    def close(self) -> None:
        for pipe in self._pipes:
            try:
                pipe.send_bytes(b"stop")
            except OSError:
                continue
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()
