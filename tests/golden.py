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


def trajectory(steps: int = 4, kernels: bool = False, **changes: Any) -> list[dict[str, str]]:
    """Of each step the loss, the norm, and the digest of all state; ``kernels``: Triton's, which its interpreter runs
    on the CPU if TRITON_INTERPRET is set."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(tiny_job(**JOB, **changes), Path(folder))
        if kernels:
            run_fused("triton")
        for _ in range(steps):
            record, _ = trainer.update(trainer.stream.next_batch(), StopRequest())
            figures = {key: float(record[key]).hex() for key in ("loss", "grad_norm", "balance_loss", "lr")}
            found.append(figures | {"state": digest(trainer.state())})
    return found


if __name__ == "__main__":
    steps = trajectory(kernels="--triton" in sys.argv, numerics__compile="--compile" in sys.argv)
    Path(sys.argv[1]).write_text(json.dumps(steps, indent=1) + "\n")
