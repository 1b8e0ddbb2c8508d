"""The cost model against published runs: errors by table, calibrated and held out, and with each table left out.

Nothing is timed but the model itself: a prediction's seconds are reported, for a planner makes thousands of them.

    python benchmarks/plan.py
"""

import time

from common import arguments, spread, write

OPTIONS = arguments("plan", __doc__ or "", rounds=3)

from equigrad.commands.plan import record  # noqa: E402
from equigrad.plan.memory import memory  # noqa: E402
from equigrad.plan.published import runs  # noqa: E402
from equigrad.plan.step import step  # noqa: E402
from equigrad.plan.text import error_lines, state_lines, states  # noqa: E402
from equigrad.plan.validation import by_table, leave_one_table_out  # noqa: E402

LEFT_OUT = (
    "llm-foundry A100",
    "llm-foundry H100",
    "Megatron SC21",
    "Megatron 2022",
)
"""Dense models in half precision whose rows leave nothing to assume."""


def main() -> None:
    lines = [*by_table(), *leave_one_table_out(LEFT_OUT)]
    print(*error_lines(lines), "", *state_lines(), "", sep="\n")
    took = []
    for _ in range(OPTIONS.rounds):
        began = time.perf_counter()
        for run in runs():
            step(run.work, run.machine)
            memory(run.work)
        took.append((time.perf_counter() - began) / len(runs()))
    print(f"one prediction of time and memory: {1e3 * spread(took)['median']:.2f} ms")
    write(
        OPTIONS.json,
        {
            "errors": [record(line) for line in lines],
            "states": {name: [str(which) for which in found] for name, found in states().items()},
            "seconds_a_prediction": spread(took),
        },
    )


if __name__ == "__main__":
    main()
