"""What a trajectory costs: the line of a step, its digests of tensors and batch, against the step itself.

A shape of benchmarks/exact.py, in exact numerics as they run without a compiler and compiled, and in native ones. The
share is of the step without its line, where every line has its tensors: `audit.every = n` divides that by n.

    python benchmarks/audit.py
"""

import tempfile
import time
from pathlib import Path
from typing import Any

from common import arguments, full_length_samples, pin_threads, ratio, shape_trainer, show, spread, write

OPTIONS = arguments("audit", __doc__ or "", rounds=5, tokens=4096, context=512, hidden="512",
                    sides="exact, plain;exact, compiled;native")  # fmt: skip
pin_threads(OPTIONS.threads)

import torch  # noqa: E402

from equigrad.audit.recorder import line_of  # noqa: E402
from equigrad.parallel.stop import StopRequest  # noqa: E402
from equigrad.trainer import Trainer  # noqa: E402

SIDES: dict[str, dict[str, Any]] = {
    "exact, plain": {"kind": "exact"},
    "exact, compiled": {"kind": "exact", "compile": True},
    "native": {},
}


def _trainer(hidden: int, side: str, folder: Path) -> Trainer:
    return shape_trainer(hidden, OPTIONS.context, OPTIONS.tokens, OPTIONS.threads, SIDES[side], folder)


def measure(hidden: int, side: str, folder: Path) -> dict[str, Any]:
    """Seconds of steps and of their lines, taken in turns."""
    trainer, stop = _trainer(hidden, side, folder), StopRequest()
    seconds: dict[str, list[float]] = {"step": [], "line": [], "line without tensors": []}
    for turn in range(-2, OPTIONS.rounds):
        began = time.perf_counter()
        batch = trainer.stream.next_batch()
        record, _ = trainer.update(batch, stop)
        marks = [began, time.perf_counter()]
        for tensors in (True, False):
            line_of(trainer, tensors, record, batch)
            marks.append(time.perf_counter())
        if turn >= 0:
            for name, a, b in zip(seconds, marks, marks[1:], strict=False):
                seconds[name].append(b - a)
    trainer.checkpointer.close()
    size = sum(p.tensor.numel() * p.tensor.element_size() for p in trainer.state().values())
    shares = {name: ratio(own, seconds["step"]) for name, own in seconds.items() if name != "step"}
    for name, value in shares.items():
        show(f"hidden {hidden}, {side}: {name} / step", value, 4)
    return {"seconds": {n: spread(s) for n, s in seconds.items()}, "of_step": shares, "digested_mb": size / 1e6}


def main() -> None:
    result: dict[str, Any] = {"threads": OPTIONS.threads, "tokens_per_step": OPTIONS.tokens, "shapes": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        full_length_samples(folder, OPTIONS.context)
        for hidden in map(int, OPTIONS.hidden.split(",")):
            for side in OPTIONS.sides.split(";"):
                result["shapes"][f"hidden {hidden}, {side}"] = measure(hidden, side, folder)
                torch.compiler.reset()
    write(OPTIONS.json, result)


if __name__ == "__main__":
    main()
