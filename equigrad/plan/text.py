"""The cost model's own account of itself, as lines: errors of each table, states of capabilities, every constant."""

from collections.abc import Iterable, Iterator, Sequence

from equigrad.plan.calibration import calibration
from equigrad.plan.gates import MEAN, UNTESTED, WORST, Capability, doubts, evidence, state
from equigrad.plan.hardware import constants, hardware
from equigrad.plan.validation import Errors, Line


def error_lines(lines: Iterable[Line]) -> Iterator[str]:
    """A table of errors by published table."""
    rows = [["table", "quantity", "part", "runs", "mean", "worst", "bias", "worst run"]]
    rows += [[line.table, line.quantity, line.part, *_numbers(line.errors)] for line in lines]
    yield from _columns(rows)


def state_lines() -> Iterator[str]:
    """Every capability that published runs test, and whether it may be asked for."""
    rows = [["state", "capability", "runs", "mean", "worst", "bias", "worst run"]]
    found = [(state(which), str(which), errors) for which, errors in evidence().items()]
    found += [(state(which), f"{which}, on assumptions", errors) for which, errors in doubts().items()]
    rows += [[kind, name, *_numbers(errors)] for kind, name, errors in sorted(found)]
    yield from _columns(rows)
    yield from (f"withdrawn    {name}: {reason}" for name, reason in UNTESTED.items())
    yield f"bounds: mean {MEAN:.0%}, worst {WORST:.0%}, of held-out runs; what is not listed is unvalidated"


def constant_lines() -> Iterator[str]:
    """Every constant with its unit and source."""
    for name, constant in [*constants(hardware()), *constants(calibration(), "calibration")]:
        yield f"{name} = {constant.value:g} {constant.unit}  [{constant.source}]"
    for table in hardware().measured:
        yield f"measured.{table.name} = {len(table.mib)} points  [{table.source}]"


def states() -> dict[str, list[Capability]]:
    """Tested capabilities by state."""
    found: dict[str, list[Capability]] = {}
    for which in sorted(evidence() | doubts()):
        found.setdefault(state(which), []).append(which)
    return found


def _numbers(errors: Errors) -> list[str]:
    return [str(errors.runs), f"{errors.mean:.1%}", f"{errors.worst:.1%}", f"{errors.bias:+.1%}", errors.name]


def _columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
