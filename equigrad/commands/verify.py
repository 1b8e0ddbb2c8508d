"""``equigrad verify``: a job's first steps on several layouts, packings or numbers of threads, against one process."""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from equigrad.audit.cases import Case, run_case, work
from equigrad.audit.layouts import parse_layout
from equigrad.config import Job, dump_toml, load_job
from equigrad.errors import UserError
from equigrad.files import check_target, write_json
from equigrad.parallel.environment import process_env
from equigrad.resolve import check_layout, resolve_weights


def main(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Run every case one after another, show a table, and say whether all of them are one process's."""
    if arguments.case is not None:
        from equigrad.parallel.launch import run_worker

        env, case = process_env(), Case.read(arguments.case)
        if env is None:
            raise UserError("--case is for the processes that `equigrad verify` starts, and this is none of them")
        return run_worker(env.rank, lambda: work(case, Path(arguments.job), arguments.steps))
    if arguments.steps < 1:
        raise UserError(f"--steps is {arguments.steps}; at least one step is compared")
    if arguments.json:
        check_target(Path(arguments.json))
    job = resolve_weights(load_job(Path(arguments.job), overrides))
    kind = arguments.numerics or job.numerics.kind
    if job.rl is not None and kind == "native":
        raise UserError(
            "in native numerics what is sampled depends on rounding, so two ways to do a step of reinforcement learning"
            " train on other tokens: verify it with --numerics exact"
        )
    with tempfile.TemporaryDirectory(prefix="equigrad-verify-") as name:
        return _verify(job, kind, arguments, Path(name))


def _verify(job: Job, kind: str, arguments: argparse.Namespace, folder: Path) -> int:
    file = folder / "job.toml"
    file.write_text(dump_toml(job), encoding="utf-8")
    alone = _layout_keys({})
    reference = Case("one", alone | {"numerics.kind": "exact"}, str(folder / "one"))
    follows = reference.folder if kind == "native" else None
    cases = [
        Case(name, alone | keys | {"numerics.kind": kind}, str(folder / f"case-{number}"), follows)
        for number, (name, keys) in enumerate(_variants(arguments, kind))
    ]
    for case in (reference, *cases):
        check_layout(case.job(file))
    steps = "1 step" if arguments.steps == 1 else f"{arguments.steps} steps"
    print(f"{steps} of {arguments.job} in {kind} numerics, against exact numerics on one process", flush=True)
    if code := run_case(reference, file, arguments.steps):
        return 2 if code == 2 else 1  # the user's to mend
    rows: list[dict[str, Any]] = []
    failed = 0
    width = max(len(case.name) for case in cases)
    for case in cases:
        alone_too = cases[0] if rows and rows[0]["ok"] and kind == "native" else None
        size = case.job(file).layout.world_size
        print(f"{case.name:<{width}}  {size:>2} process{'es' if size > 1 else '  '}  ", end="", flush=True)
        row = _row(case, reference, file, arguments.steps, kind, job.numerics.dtype, alone_too)
        failed += not row["ok"]
        rows.append(row)
        print(_line(row, kind), flush=True)
    # What rounding does on one process was not asked for, but where that fails nothing else can be trusted.
    asked = len(rows) - (kind == "native" and rows[0]["ok"])
    print(f"{asked - failed} of {asked} {'equal' if kind == 'exact' else 'within rounding'}")
    if arguments.json:
        write_json(Path(arguments.json), {"numerics": kind, "steps": arguments.steps, "cases": rows})
    return 1 if failed else 0


def _variants(arguments: argparse.Namespace, kind: str) -> list[tuple[str, dict[str, Any]]]:
    """The names of the cases, and the keys that they set."""
    found: list[tuple[str, dict[str, Any]]] = []
    for text in _split(arguments.layouts):
        found.append((text, _layout_keys(parse_layout(text))))
    for text in _split(arguments.packings):
        found.append((f"packing {text}", {"batch.packing": text}))
    for text in _split(arguments.microbatches):
        found.append((f"rows of {text}", {"batch.row_tokens": _number(text, "--microbatches")}))
    for text in _split(arguments.threads):
        found.append((f"threads {text}", {"layout.threads": _number(text, "--threads")}))
    if not found:
        raise UserError("nothing to verify: give --layouts dp2,tp2, --packings, --microbatches or --threads")
    # How far rounding alone goes is worth knowing where the others are judged by it.
    return [("one", {}), *found] if kind == "native" else found


def _layout_keys(layout: dict[str, Any]) -> dict[str, Any]:
    """Those of the layout, and what it leaves out as in one process."""
    degrees = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "pp_stages")
    return {f"layout.{key}": 1 for key in degrees} | {f"layout.{key}": value for key, value in layout.items()}


def _split(words: str | None) -> list[str]:
    return [word for word in (words or "").split(",") if word]


def _number(text: str, option: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"{option}: {text!r} is no number of at least 1")
    return int(text)


def _row(
    case: Case, reference: Case, file: Path, steps: int, kind: str, dtype: str, native: Case | None
) -> dict[str, Any]:
    from equigrad.audit.verify import compare_bits, compare_values

    processes = case.job(file).layout.world_size
    if code := run_case(case, file, steps):
        return {"case": case.name, "processes": processes, "ok": False, "error": f"it ended with exit code {code}"}
    exact = kind == "exact"
    found = compare_bits(reference, case, steps) if exact else compare_values(reference, case, steps, dtype, native)
    return {"case": case.name, "processes": processes} | asdict(found)


def _line(row: dict[str, Any], kind: str) -> str:
    if "error" in row:
        return f"FAILED: {row['error']}"
    if kind == "exact":
        return "equal" if row["ok"] else f"DIFFERENT from step {row['step']}: {row['what']}: {row['detail']}"
    deviations = ", ".join(f"{what} {value:.1e}" for what, value in row["deviation"].items())
    if row["ok"]:
        return f"rounding: {deviations}"
    where = f"{deviations}; step {row['step']}, {row['what']}: {row['detail']}"
    if row["processes"] == 1 and row["case"] == "one":
        return f"MORE THAN ROUNDING, without any layout, so that none can be judged by it: {where}"
    return f"A BUG, not rounding: {where}"
