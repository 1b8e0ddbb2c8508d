"""How far the cost model is from what was measured, table by table. What may be asked for, ``plan.gates`` decides."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Literal, NamedTuple

from equigrad.plan.calibrate import fit
from equigrad.plan.calibration import Calibration
from equigrad.plan.hardware import constants, hardware
from equigrad.plan.memory import memory
from equigrad.plan.published import Run, runs
from equigrad.plan.step import step

Quantity = Literal["throughput", "memory"]
QUANTITIES: tuple[Quantity, ...] = ("throughput", "memory")


class Errors(NamedTuple):
    """Of predictions: mean and largest of |predicted / measured - 1|, the mean with its sign, the worst one's name."""

    runs: int
    mean: float
    worst: float
    bias: float
    name: str

    @classmethod
    def of(cls, errors: Iterable[tuple[Run, float]]) -> "Errors":
        """``ValueError`` where there are none."""
        found = list(errors)
        if not found:
            raise ValueError("no run to compare with")
        run, worst = max(found, key=lambda pair: abs(pair[1]))
        mean, bias = (sum(values) / len(found) for values in ([abs(e) for _, e in found], [e for _, e in found]))
        return cls(len(found), mean, abs(worst), bias, run.name)


def error(run: Run, quantity: Quantity, fitted: Calibration | None = None) -> float:
    """Predicted over measured, less 1. Throughput is tokens a second: its error is that of 1 / seconds."""
    if quantity == "throughput":
        return run.seconds / step(run.work, run.machine, fitted).seconds - 1
    assert run.memory is not None
    return memory(run.work).total / run.memory - 1


def measures(run: Run, quantity: Quantity) -> bool:
    """Whether a run says anything about a quantity."""
    return quantity == "throughput" or run.memory is not None


def assumed(run: Run, quantity: Quantity) -> bool:
    """Whether a comparison rests on what nobody published: of the run, or, in its time, of the machine."""
    known = hardware()
    machine = known.machine(run.machine)
    rates = [*constants(machine), *constants(known.device(machine.device))] if quantity == "throughput" else []
    return bool(run.assumed) or any(constant.assumed for _, constant in rates)


@cache
def run_errors(quantity: Quantity) -> tuple[tuple[Run, float], ...]:
    """Every run that was measured, with the error of the model as it is calibrated."""
    return tuple((run, error(run, quantity)) for run in runs() if measures(run, quantity))


class Line(NamedTuple):
    """One line of the validation table."""

    table: str
    quantity: Quantity
    part: str
    errors: Errors


def by_table() -> Iterator[Line]:
    """Errors of each table and part; what rests on assumptions is a part of its own."""
    for quantity in QUANTITIES:
        groups: dict[tuple[str, str], list[tuple[Run, float]]] = {}
        for run, wrong in run_errors(quantity):
            where = (run.table, "assumed" if assumed(run, quantity) else run.part)
            groups.setdefault(where, []).append((run, wrong))
        for (table, part), found in groups.items():
            yield Line(table, quantity, part, Errors.of(found))


def leave_one_table_out(tables: Sequence[str]) -> Iterator[Line]:
    """For each of some tables, the model fitted on all rows of the others alone, tested on all of its own."""
    for table in tables:
        others = [run for run in runs() if run.table in tables and run.table != table]
        own = [run for run in runs() if run.table == table]
        fitted = fit(others, f"all but {table}")
        yield Line(table, "throughput", "left out", Errors.of((run, error(run, "throughput", fitted)) for run in own))
