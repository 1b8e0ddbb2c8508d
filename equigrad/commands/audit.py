"""``equigrad audit``: do steps of a run again and say whether they are what its trajectory says; add reports up."""

import argparse
import json
import re
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equigrad.audit.layouts import parse_layout
from equigrad.audit.report import EXIT, Outcome, merge, report, subject
from equigrad.audit.trajectory import Contradiction, Unverifiable
from equigrad.errors import UserError
from equigrad.files import check_target, write_json
from equigrad.parallel.environment import process_env
from equigrad.resolve import check_layout
from equigrad.run import Run

if TYPE_CHECKING:
    from equigrad.audit.replay import Plan, Progress

_OUTCOME = "outcome.json"


def main(arguments: argparse.Namespace) -> int:
    """Audit a run, or add reports up. Returns 0 only where all is confirmed, 1 if contradicted, 3 if unverifiable."""
    if arguments.merge is not None:
        if arguments.run is not None:
            raise UserError("give a run to audit, or reports to --merge, not both")
        return _merge([Path(file) for file in arguments.merge], arguments.json)
    if arguments.run is None:
        raise UserError("name the run folder to audit, or the reports to --merge")
    run = Run(Path(arguments.run))
    if not run.folder.is_dir():
        raise UserError(f"no folder at {run.folder}: expected a run")
    if arguments.json:
        check_target(Path(arguments.json), untouched=run.folder)
    steps, layout = _steps(arguments.steps), parse_layout(arguments.layout)
    env = process_env()
    if env is not None and env.world_size > 1:
        from equigrad.parallel.launch import run_worker

        return run_worker(env.rank, lambda: _work(run, steps, layout, arguments))
    return _audit(run, steps, layout, arguments)


def _steps(text: str | None) -> tuple[int, int] | None:
    """``40..45`` or ``40``."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,15})(?:\.\.(\d{1,15}))?", text)
    if found is None or int(found[2] or found[1]) < int(found[1]):
        raise UserError(f"--steps {text!r} is neither a step nor a range of steps such as 40..45")
    return int(found[1]), int(found[2] or found[1])


def _audit(run: Run, steps: tuple[int, int] | None, layout: dict[str, Any], arguments: argparse.Namespace) -> int:
    """In this process, or in workers of its own where the layout has more."""
    from equigrad.audit import replay
    from equigrad.parallel.launch import launch
    from equigrad.parallel.world import start

    progress = replay.Progress()
    plan, outcome = _tried(lambda: _planned(run, steps), progress, None)
    if plan is not None:
        jobs, outcome = _tried(lambda: plan.jobs({}), progress, plan)
        if jobs is not None:
            check_layout(plan.job.model_copy(update={"layout": type(plan.job.layout)(**layout)}))
            jobs, outcome = _tried(lambda: plan.jobs(layout), progress, plan)
        if jobs is not None:
            with tempfile.TemporaryDirectory(prefix="equigrad-audit-") as folder:
                work, size = Path(folder), jobs[0].layout.world_size
                if size == 1:
                    world = start(jobs[0].layout)
                    _, outcome = _tried(lambda: replay.replay(plan, layout, world, work, progress), progress, plan)
                else:
                    words = ["audit", arguments.run, "--layout", arguments.layout, "--work", folder]
                    words += ["--steps", arguments.steps] if arguments.steps else []
                    code = launch(size, words, stops=False)
                    outcome = _of_workers(work / _OUTCOME, code)
    return _tell(run, plan, steps, arguments, outcome)


def _work(run: Run, steps: tuple[int, int] | None, layout: dict[str, Any], arguments: argparse.Namespace) -> int:
    """One of several ranks. What ends all of them alike is an outcome; anything else ends them as errors do."""
    from equigrad.audit import replay
    from equigrad.config.layout import Layout
    from equigrad.parallel.ranks import SharedUserError, gather
    from equigrad.parallel.world import start

    alike = (Contradiction, Unverifiable, SharedUserError)
    world, progress = start(Layout(**layout)), replay.Progress()
    own = tempfile.TemporaryDirectory(prefix="equigrad-audit-") if not arguments.work and world.is_main else None
    with own or nullcontext() as folder:
        work = Path(gather(str(arguments.work or folder))[0])
        planned = replay.plan if arguments.work else _planned  # the launcher has looked at the checkpoints
        # Of a run that goes on, ranks may not see the same: what the first one sees counts.
        plan, outcome = gather(_tried(lambda: planned(run, steps), progress, None, alike))[0]
        if plan is not None:
            _, outcome = _tried(lambda: replay.replay(plan, layout, world, work, progress), progress, plan, alike)
        if arguments.work and world.is_main:
            write_json(work / _OUTCOME, asdict(outcome))
        world.close()
    if arguments.work:
        return 0
    return _tell(run, plan, steps, arguments, outcome) if world.is_main else EXIT[outcome.verdict]


def _planned(run: Run, steps: tuple[int, int] | None) -> "Plan":
    from equigrad.audit import replay

    plan = replay.plan(run, steps)
    replay.check_checkpoints(plan)
    return plan


def _tried(
    action: Callable[[], Any],
    progress: "Progress",
    plan: "Plan | None",
    caught: tuple[type[Exception], ...] = (Exception,),
) -> tuple[Any, Outcome]:
    """What the action returns (None where it failed), and the outcome if the audit ended with it."""
    value, outcome = None, Outcome("confirmed")
    try:
        value = action()
    except caught as error:
        if isinstance(error, Contradiction):
            outcome = Outcome("contradicted", error.why, error.step, error.field)
        else:  # whatever it was, it is no confirmation
            known = isinstance(error, Unverifiable | UserError)
            outcome = Outcome("unverifiable", str(error) if known else f"{type(error).__name__}: {error}")
    if plan is not None:
        begun = "initial state" if plan.job.model.weights is None else "imported weights"
        outcome.start = {"step": plan.base, "from": begun if plan.checkpoint is None else "checkpoint"}
        outcome.changed = [[step, list(keys)] for step, keys in plan.changed]
    if progress.confirmed:
        outcome.confirmed = progress.confirmed[0], progress.confirmed[-1]
        outcome.tensors = len(progress.tensors)
    return value, outcome


def _of_workers(file: Path, code: int) -> Outcome:
    if code == 0 and file.exists():
        return Outcome(**json.loads(file.read_text(encoding="utf-8")))
    return Outcome("unverifiable", f"the workers ended with exit code {code} and without an answer")


def _tell(
    run: Run, plan: "Plan | None", steps: tuple[int, int] | None, arguments: argparse.Namespace, outcome: Outcome
) -> int:
    """Print the outcome and write the report. Returns the exit code."""
    from torch import __version__ as torch_version

    steps = plan.steps if plan else steps
    asked = "all steps" if steps is None else f"steps {steps[0]}..{steps[1]}"
    print(f"{outcome.verdict}: {asked} of {run.folder}, on layout {arguments.layout}")
    if outcome.verdict == "contradicted":
        where = "" if outcome.step is None else f"step {outcome.step}, "
        print(_shown(f"first difference  {where}{outcome.field}"))
    if outcome.why:
        print(_shown(f"why               {outcome.why}"))
    if outcome.confirmed is not None and outcome.start is not None:
        first, last = outcome.confirmed
        print(f"found again       steps {first}..{last}, {outcome.tensors} of them with their tensors")
        print(f"started from      the {outcome.start['from']} of step {outcome.start['step']}")
    for step, keys in outcome.changed:
        print(_shown(f"other settings    after step {step}: {', '.join(keys)}"))
    if arguments.json:
        known = plan.subject if plan else subject(run.folder)
        write_json(Path(arguments.json), report(known, steps, arguments.layout, outcome, str(torch_version)))
    return EXIT[outcome.verdict]


def _shown(text: str) -> str:
    """What strangers wrote, on one line and without what would steer a terminal."""
    return "".join(c if c.isprintable() else " " if c == "\n" else "?" for c in text)


def _merge(files: list[Path], out: str | None) -> int:
    merged = merge(files)
    run = merged["run"]
    print(f"{merged['verdict']}: steps {run['first']}..{run['last']}, {len(merged['reports'])} report(s)")
    for part in merged["coverage"]:
        first, last = part["steps"]
        print(f"steps {first}..{last}  confirmed by {part['confirmed_by']}" if part["confirmed_by"] else
              f"steps {first}..{last}  not covered")  # fmt: skip
    for step, keys in merged["changed"]:
        print(_shown(f"other settings after step {step}: {', '.join(keys)}"))
    if "imported weights" in merged["started_from"]:
        print("the run began from imported weights")
    for found in merged["contradictions"]:
        where = "" if found["step"] is None else f"step {found['step']}, "
        print(_shown(f"contradicted on {found['layout']}: {where}{found['field']}: {found['why']}"))
    if out:
        write_json(Path(out), merged)
    return EXIT[merged["verdict"]]
