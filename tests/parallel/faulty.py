"""``equigrad WORDS`` as one rank, with a fault planted: ``FAULT=rank:place``, place: ``step``, ``row`` or ``kill``.

Such a rank raises (or dies of a signal) in its second step, before its rows or amid them, while the other ranks wait
for it in a collective or in a pipeline's receive.
"""

import os
import signal
import sys
from typing import Any

from equigrad.cli import main


def plant(place: str) -> None:
    from equigrad import execution

    owner: Any = execution._Work if place == "row" else execution.Execution
    name = "forward" if place == "row" else "train"
    whole, calls = getattr(owner, name), []

    def faulty(*arguments: Any) -> Any:
        calls.append(None)
        if len(calls) > (6 if place == "row" else 1):
            if place == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("a fault was planted here")
        return whole(*arguments)

    setattr(owner, name, faulty)


if __name__ == "__main__":
    at, _, where = os.environ["FAULT"].partition(":")
    if os.environ["RANK"] == at:
        plant(where)
    sys.exit(main(sys.argv[1:]))
