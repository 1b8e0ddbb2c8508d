"""Start-up: seconds from the start of the ``equigrad train`` process to the end of the first step, on the embedded
default: imports, training of the tokenizer, tokenisation, model, first forward, backward and update.

    python benchmarks/startup.py
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import arguments, pin_threads, show, spread, write

OPTIONS = arguments("startup", __doc__ or "", rounds=3)
pin_threads(OPTIONS.threads)


def first_step(cache: Path) -> float:
    """Seconds until the first record of a fresh run lies on the disk."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        began = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "equigrad", "train", "--run", str(run)],
            stdout=subprocess.DEVNULL,
            env=os.environ | {"EQUIGRAD_CACHE": str(cache)},
        )
        metrics = run / "metrics.jsonl"
        while not (metrics.exists() and metrics.stat().st_size):
            if process.poll() is not None:
                raise RuntimeError(f"equigrad train ended early with exit code {process.returncode}")
            time.sleep(0.01)
        seconds = time.perf_counter() - began
        process.kill()
        process.wait()
    return seconds


def main() -> None:
    with tempfile.TemporaryDirectory() as warm:
        first_step(Path(warm))  # files of Python and torch into the page cache
        cold = []
        for _ in range(OPTIONS.rounds):
            with tempfile.TemporaryDirectory() as fresh:
                cold.append(first_step(Path(fresh)))
        cached = [first_step(Path(warm)) for _ in range(OPTIONS.rounds)]
    result = {"threads": OPTIONS.threads, "empty_cache_seconds": spread(cold), "tokenised_seconds": spread(cached)}
    show("seconds to the end of the first step (goal 6)", result["empty_cache_seconds"], 2)
    show("the same, source tokenised before", result["tokenised_seconds"], 2)
    write(OPTIONS.json, result)


if __name__ == "__main__":
    main()
