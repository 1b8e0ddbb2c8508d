"""``equigrad plan``: what the cost model is made of, and how far it is from published runs."""

import argparse
from pathlib import Path
from typing import Any

from equigrad.errors import UserError
from equigrad.files import write_json
from equigrad.plan.text import constant_lines, error_lines, state_lines
from equigrad.plan.validation import Line, by_table


def main(arguments: argparse.Namespace) -> int:
    """Print what is asked for; ``--json`` writes the errors of tables as well."""
    if not (arguments.validate or arguments.constants):
        raise UserError("nothing to do: give --validate or --constants")
    if arguments.constants:
        print(*constant_lines(), sep="\n")
    if arguments.validate:
        lines = list(by_table())
        print(*error_lines(lines), "", *state_lines(), sep="\n")
        if arguments.json:
            write_json(Path(arguments.json), [record(line) for line in lines])
    return 0


def record(line: Line) -> dict[str, Any]:
    """One line as JSON values."""
    return {"table": line.table, "quantity": line.quantity, "part": line.part} | line.errors._asdict()
