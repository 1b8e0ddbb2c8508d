"""``python tests/golden.py OUT [--compile | --triton]``: a few steps of a tiny job in exact numerics, as JSON.

``tests/golden.json`` is what it gave once; a change of that file is a change of exact arithmetic, and belongs into the
changelog.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from equigrad.checkpoint.digest import digest
from equigrad.numerics.exact.fused import run_fused
from equigrad.parallel.stop import StopRequest
from tests.jobs import make_trainer, tiny_job
from tests.parallel.outcomes import EXPERTS

# Attention with a window and sinks and a recurrent layer would double what there is to compile; other tests have them.
JOB: dict[str, Any] = {
    "numerics__kind": "exact", "train__steps": 4, "model__qk_norm": True, "model__initializer_range": 0.05,
    "model__experts": EXPERTS,
}  # fmt: skip


def trajectory(steps: int = 4, **changes: Any) -> list[dict[str, str]]:
    """Of each step the loss, the norm, and the digest of all state."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(tiny_job(**JOB, **changes), Path(folder))
        for _ in range(steps):
            if "--triton" in sys.argv:
                run_fused("triton")
            record, _ = trainer.update(trainer.stream.next_batch(), StopRequest())
            figures = {key: float(record[key]).hex() for key in ("loss", "grad_norm", "balance_loss", "lr")}
            found.append(figures | {"state": digest(trainer.state())})
    return found


def interpreted() -> list[dict[str, str]]:
    """The first steps with the kernels for GPUs, which TRITON_INTERPRET lets run on a CPU. It takes its time for each
    tile and call, whatever their size: so tiles are large, and a step is one row."""
    from equigrad.numerics.exact.kernels import launch

    launch.ELEMENTS, launch.ACROSS = 1 << 16, 1 << 8
    return trajectory(2, batch__row_tokens=512)


if __name__ == "__main__":
    steps = interpreted() if "--triton" in sys.argv else trajectory(numerics__compile="--compile" in sys.argv)
    Path(sys.argv[1]).write_text(json.dumps(steps, indent=1) + "\n")
