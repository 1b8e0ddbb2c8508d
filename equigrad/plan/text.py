"""Plans as lines; and the cost model's own account of itself: errors of each table, states of capabilities, every
constant."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from equigrad.plan.calibration import calibration
from equigrad.plan.gates import MEAN, UNTESTED, WORST, Capability, doubts, evidence, state
from equigrad.plan.hardware import GIB, constants, hardware
from equigrad.plan.search import Found, Plan
from equigrad.plan.target import Target
from equigrad.plan.validation import Errors, Line
from equigrad.plan.workload import Recompute, Workload


def plan_lines(found: Found, where: Target) -> Iterator[str]:
    """The best few in a table, what each of them is made of, and what was left out."""
    rows = [["", "state", "layout", "pipeline", "row", "recompute", "seconds", "MFU", "tokens/day", "GiB", "limit"]]
    rows += [[str(n), *_cells(plan)] for n, plan in enumerate(found.plans, 1)]
    yield from columns(rows)
    for number, plan in enumerate(found.plans, 1):
        time, needs = plan.time.value, plan.memory.value
        yield ""
        yield f"{number}  seconds  {parts_shown(time.parts, 1, 0.0005)}"
        yield f"   GiB      {parts_shown(vars(needs), GIB, 0.05)}"
        yield f"   time     {plan.time.label}"
        yield f"   memory   {plan.memory.label}"
        if where.changed:
            yield f"   cluster  UNVALIDATED: not {where.machine} ({where.changed})"
    yield ""
    yield (
        f"{where.gpus:,} GPUs of {where.machine}, {where.memory / GIB:.1f} GiB of each may be used;"
        f" {found.degrees:,} ways to divide the work were searched"
    )
    yield from left_out_lines(found)


def left_out_lines(found: Found) -> Iterator[str]:
    """What may not be answered, by reason."""
    for why, number in sorted(found.left_out.items()):
        yield f"left out: {number:,} with {why}"
    if any(why.startswith("unvalidated") for why in found.left_out):
        yield "--unvalidated answers for unvalidated ones all the same, and says so"


def misfit_lines(found: Found, where: Target) -> Iterator[str]:
    """Where nothing fits: by how much, and which machines would do."""
    assert found.least is not None
    needs, work = found.least
    share = where.memory / where.known.device(where.known.machine(where.machine).device).memory.value
    yield (
        f"no layout fits: the leanest needs {needs / GIB:.1f} GiB on a GPU, and {where.memory / GIB:.1f} GiB of"
        f" {where.machine} may be used: {(needs - where.memory) / GIB:.1f} GiB too much ({_layout(work)},"
        f" batch.row_tokens {work.micro_batch * work.sequence}, recomputing {_recompute(work)})"
    )
    enough = [name for name, machine in where.known.machines.items()
              if where.known.device(machine.device).memory.value * share >= needs]  # fmt: skip
    if enough:
        yield f"it would fit on as many GPUs of {', '.join(enough)}"
    yield "more GPUs, a shorter data.context, or a smaller model need less of each"


def _cells(plan: Plan) -> list[str]:
    work, state = plan.work, plan.state if plan.state == "validated" else plan.state.upper()
    return [
        state, _layout(work), _pipeline(work), f"{work.micro_batch * work.sequence} x {work.micro_batches}",
        _recompute(work), f"{plan.seconds:.3f}", f"{plan.mfu:.1%}", f"{plan.tokens_per_day:.3g}",
        f"{plan.memory.value.total / GIB:.1f}", plan.time.value.limit,
    ]  # fmt: skip


def _layout(work: Workload) -> str:
    layout = work.layout
    words = [layout.degrees or "one process"]
    if layout.cp > 1:
        words.append(layout.cp_strategy)
    words += ["keeps gathered"] * (not layout.reshard_after_forward)
    words += ["reduces every round"] * layout.reduce_every_round
    return ", ".join(words)


def _pipeline(work: Workload) -> str:
    layout = work.layout
    return "-" if layout.pp == 1 else f"{layout.pp_schedule}, {layout.pp_stages} stages a rank"


def _recompute(work: Workload) -> str:
    return recompute_shown(work.recompute, work.recompute_every)


def recompute_shown(recompute: Recompute, every: int) -> str:
    """What is computed again."""
    if recompute == "none":
        return "nothing"
    return "every block" if every == 1 else f"1 block of {every}"


def parts_shown(parts: Mapping[str, float], unit: float, least: float) -> str:
    """Those of at least so much, the largest first."""
    shown = sorted(((value / unit, name) for name, value in parts.items() if value / unit >= least), reverse=True)
    return ", ".join(f"{name} {value:.3g}" for value, name in shown)


def error_lines(lines: Iterable[Line]) -> Iterator[str]:
    """A table of errors by published table."""
    rows = [["table", "quantity", "part", "runs", "mean", "worst", "bias", "worst run"]]
    rows += [[line.table, line.quantity, line.part, *_numbers(line.errors)] for line in lines]
    yield from columns(rows)


def state_lines() -> Iterator[str]:
    """Every capability that published runs test, and whether it may be asked for."""
    rows = [["state", "capability", "runs", "mean", "worst", "bias", "worst run"]]
    found = [(state(which), str(which), errors) for which, errors in evidence().items()]
    found += [(state(which), f"{which}, on assumptions", errors) for which, errors in doubts().items()]
    rows += [[kind, name, *_numbers(errors)] for kind, name, errors in sorted(found)]
    yield from columns(rows)
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


def columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table, its columns as wide as their widest cells."""
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
