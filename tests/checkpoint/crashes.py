"""Saves that are killed, run as a program of its own: ``python -m tests.checkpoint.crashes FOLDER WHAT``.

Every attempt is a fork, killed by SIGKILL before its n-th change of the file system, for n = 1, 2, ... until it gets
through. After each, the program looks at what is left, starts anew, and prints what it saw as a line of JSON.
"""

import json
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import equigrad.checkpoint.storage  # a second to import: once, not in every fork
from equigrad.checkpoint import manifest, tensorfile
from equigrad.checkpoint.folder import latest
from equigrad.checkpoint.manifest import verify
from equigrad.checkpoint.state import Checkpointer, read_tensors
from equigrad.config.checkpoint import Checkpoint
from equigrad.errors import UserError
from equigrad.parallel.placement import Placed, place_all

CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


def state(value: int, size: int = 3) -> dict[str, Placed]:
    return place_all([(f"model.{name}", torch.full((size,), value)) for name in "abc"])


def saver(folder: Path, asynchronous: bool = False) -> Checkpointer:
    return Checkpointer(folder, Checkpoint(keep_last=1, asynchronous=asynchronous))


def attempt(action: Callable[[], None], after: float = 0) -> bool:
    """Runs the action in a fork, killed ``after`` seconds if any; returns whether it got through."""
    if not (child := os.fork()):
        action()
        os._exit(0)
    if after:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), f"the fork failed: {status}"
    return status == 0


def die_before_change(number: int) -> None:
    """Kills this process before its change of that number: a file or folder made, renamed or removed, or one of our
    writes, of which the manifest's then leaves a half."""
    left = number

    def count() -> None:
        nonlocal left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, arguments: tuple) -> None:
        if event in CHANGES or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            count()

    def fsync(descriptor: int, original: Callable[[int], None] = os.fsync) -> None:
        count()
        original(descriptor)

    def dump(body: object, file: object) -> None:
        text = json.dumps(body)
        file.write(text[: len(text) // 2])
        file.flush()
        count()
        file.write(text[len(text) // 2 :])

    def write_tensors(
        path: Path, boxes: dict, value: Callable, original: Callable = tensorfile.write_tensors
    ) -> object:
        return original(path, boxes, lambda name: (count(), value(name))[1])

    os.fsync, manifest.json.dump = fsync, dump
    equigrad.checkpoint.storage.write_tensors = write_tensors
    sys.addaudithook(hook)


def look(folder: Path) -> dict:
    """What an attempt left: the value in the latest checkpoint; the same after a new start; names seen then; and that
    a new save works."""
    verify(latest(folder))
    found = {name: tensor.tolist() for name, tensor in read_tensors(latest(folder))}
    assert found["a"] == found["b"] == found["c"]
    again = saver(folder)
    verify(latest(folder))
    _, restarted = next(read_tensors(latest(folder)))
    names = sorted(path.name for path in folder.iterdir())
    again.save(9, state(9), {})
    again.close()
    return {
        "value": found["a"][0],
        "restarted": restarted[0].item(),
        "names": names,
        "saved": [path.name for path in folder.iterdir()],
    }


def every_change(folder: Path) -> None:
    """Step 1 is there; the attempt saves step 2 (and removes step 1), then step 2 again."""
    for number in range(1, 200):
        here = folder / str(number)
        saver(here).save(1, state(1), {})

        def save_twice(number: int = number, here: Path = here) -> None:
            die_before_change(number)
            again = saver(here)
            again.save(2, state(2), {})
            again.save(2, state(3), {})

        through = attempt(save_twice)
        print(json.dumps(look(here)))
        shutil.rmtree(here)
        if through:
            return


def at_random(folder: Path) -> None:
    """Asynchronous saves one after another, killed from outside at any time."""
    draw = random.Random(3)
    saver(folder).save(0, state(0), {})
    for _ in range(8):

        def save_on() -> None:
            again = saver(folder, asynchronous=True)
            for step in range(10, 10_000):
                again.save(step, state(step, 200_000), {})

        attempt(save_on, after=draw.uniform(0.05, 0.3))
        print(json.dumps(look(folder)))
        shutil.rmtree(folder / "step-00000009", ignore_errors=True)
        if latest(folder) is None:
            saver(folder).save(0, state(0), {})


def limited(folder: Path) -> None:
    """A file system that takes no more than 1 MiB of a file, in the middle of a save."""
    saver(folder).save(1, state(1), {})
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.RLIM_INFINITY))
    again = saver(folder)
    try:
        again.save(2, state(2, 200_000), {})
    except UserError as error:
        print(json.dumps({"error": str(error), "names": [path.name for path in folder.iterdir()]}))
    print(json.dumps(look(folder)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"every_change": every_change, "at_random": at_random, "limited": limited}[sys.argv[2]](Path(sys.argv[1]))
