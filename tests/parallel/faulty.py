"""``equigrad WORDS`` as one rank, with a fault planted: ``FAULT=rank:place``, place being ``step`` or ``row``.

Such a rank raises in its second step: before its rows, or after its first row, while the other ranks wait for it in a
collective or in a pipeline's receive.
"""

import os
import sys
from typing import Any

from equigrad.cli import main


def plant(place: str) -> None:
    from equigrad import execution

    owner: Any = execution.Execution if place == "step" else execution._Work
    name = "train" if place == "step" else "forward"
    whole, calls = getattr(owner, name), []

    def faulty(*arguments: Any) -> Any:
        calls.append(None)
        if len(calls) > (1 if place == "step" else 6):
            raise ValueError("a fault was planted here")
        return whole(*arguments)

    setattr(owner, name, faulty)


if __name__ == "__main__":
    at, _, where = os.environ["FAULT"].partition(":")
    if os.environ["RANK"] == at:
        plant(where)
    sys.exit(main(sys.argv[1:]))
