"""Does a run's steps again, from a checkpoint or from the beginning, and compares them with its trajectory.

The run may be anybody's. Of its folder JSON, TOML and safetensors are read and nothing else; nothing is written there,
no code comes from there, and what it might have left in a cache of tokenised text is not used.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from equigrad import __version__
from equigrad.audit.recorder import data_digests, line_of
from equigrad.audit.trajectory import (
    NAME,
    SECTIONS,
    Contradiction,
    Line,
    Unverifiable,
    changes,
    check_lasting,
    check_settings,
    compare,
    difference,
    has_tensors,
    job_with,
    lines,
)
from equigrad.checkpoint.digest import tree_of_files
from equigrad.checkpoint.folder import latest, list_checkpoints, step_of
from equigrad.checkpoint.manifest import MANIFEST, newer_format, read_manifest, verify
from equigrad.config import Job
from equigrad.data.stream import Stream
from equigrad.data.vocabulary import build_tokenizer
from equigrad.errors import UserError
from equigrad.parallel.ranks import gather
from equigrad.parallel.stop import StopRequest
from equigrad.parallel.world import World
from equigrad.prepare import give_state
from equigrad.run import Run
from equigrad.trainer import Trainer

_COUNTED = ("tokens", "skipped", "skipped_in_a_row")
"""Counters of a checkpoint that steps determine; the others are times."""


@dataclass(frozen=True)
class Plan:
    """What is to be done again.

    steps:      first and last step that are asked for
    base:       the step to start from: of ``checkpoint``, or the run's first, whose state comes from the seed
    job:        of ``job.toml``
    segments:   settings, and the last step for which they hold; one after another
    changed:    steps after which settings changed, and which
    subject:    by what reports know the run (``report.subject``), as its lines were when they were checked
    others:     versions of equigrad that made the run and are not this one
    """

    run: Run
    steps: tuple[int, int]
    base: int
    checkpoint: Path | None
    job: Job
    segments: tuple[tuple[dict[str, Any], int], ...]
    changed: tuple[tuple[int, tuple[str, ...]], ...] = ()
    subject: dict[str, Any] = field(default_factory=dict)
    others: tuple[str, ...] = ()

    def jobs(self, layout: dict[str, Any]) -> list[Job]:
        """The job of each segment on the layout."""
        with _as_others_do(self.others):
            return [job_with(self.job, settings, layout) for settings, _ in self.segments]


@dataclass
class Progress:
    """How far a replay has come: steps whose lines were found again, and those of them with their tensors."""

    confirmed: list[int] = field(default_factory=list)
    tensors: list[int] = field(default_factory=list)

    def add(self, line: Line) -> None:
        """The line of a step was found again."""
        self.confirmed.append(line["step"])
        self.tensors += [line["step"]] if has_tensors(line) else []


def plan(run: Run, steps: tuple[int, int] | None) -> Plan:
    """Check the whole trajectory and find where to start. ``steps`` None: all of them.

    Raises: Contradiction, Unverifiable; UserError for files that cannot be read.
    """
    saved = list_checkpoints(run.folder / "checkpoints")  # before the lines: a run writes a line first
    jobs: list[tuple[int, dict[str, Any]]] = []
    versions: set[str] = set()
    known: list[int] = []
    digested: set[int] = set()
    chain, digest = "", ""
    for line, _ in lines(run.folder / NAME):
        chain = line["chain"]
        digest = line["job"] if line["kind"] == "step" else digest
        if line["kind"] == "job":
            jobs.append((line["step"], line["settings"]))
            versions.add(str(line["version"]))
        else:
            known.append(line["step"])
            digested |= {line["step"]} if has_tensors(line) else set()
    if not known:
        raise Unverifiable(f"{NAME} has no step yet")
    begin, end = known[0], known[-1]
    first, last = steps or (begin, end)
    if first < begin or last > end:
        raise Unverifiable(f"steps {first}..{last} are not in the trajectory, which has {begin}..{end}")
    later = [path.name for path in saved if step_of(path) > end]
    if last == end and later:
        raise Unverifiable(f"{later[0]} is of a later step than the trajectory's last, {end}: nothing tells of it")
    if run.job_file.exists() and not run.job_file.is_file():  # a pipe would never end
        raise Unverifiable(f"{run.job_file.name} is not a file")
    job, others = run.job(), tuple(sorted(versions - {__version__}))
    with _as_others_do(others), _while_it_is_so(run, chain):
        for (_, before), (step, after) in pairwise(jobs):
            check_lasting(before, after, step)
        try:
            # A run that was killed between the two has told of settings under which it has done nothing.
            for number in range(len(jobs) - 1, -1, -1):
                try:
                    check_settings(job, jobs[number][1])
                    break
                except Contradiction:
                    if jobs[number][0] != end or not number:
                        raise
        except Contradiction as error:
            if begin == end:
                raise Unverifiable(f"{error.field}: the run has done no step under the settings of {NAME}") from None
            if later or not job.audit.enabled:  # it went on without a trajectory, and may have done so with others
                raise Unverifiable(f"{error.field}: the run went on with steps that {NAME} does not tell of") from None
            raise
    if remote := [s.path for s in (*job.data.sources, *job.data.held_out_sources) if s.path.startswith("hf:")]:
        raise Unverifiable(f"{remote[0]} is not opened for a run of others: the library that reads it may run code")
    base, checkpoint = _base(saved, begin, first, digested)
    borders = [step for step, _ in jobs[1:]] + [last]
    held = [(settings, min(border, last)) for (_, settings), border in zip(jobs, borders, strict=True)]
    segments = [(settings, stop) for settings, stop in held if stop > base]
    # One that ends where the one before ends holds for no step.
    segments = [s for n, s in enumerate(segments) if not n or s[1] > segments[n - 1][1]]
    segments = segments or [(jobs[0][1], last)]
    held_from = sorted(dict(jobs).items())  # of several after one step the last
    changed = [(step, tuple(changes(a, b))) for (_, a), (step, b) in pairwise(held_from) if base <= step < last]
    changed = [(step, keys) for step, keys in changed if keys]
    subject = {"chain": chain, "job": digest, "first": begin, "last": end}
    return Plan(run, (first, last), base, checkpoint, job, tuple(segments), tuple(changed), subject, others)


@contextmanager
def _as_others_do(versions: tuple[str, ...]) -> Iterator[None]:
    """What another version of equigrad did, this one may do otherwise: then a difference proves nothing."""
    try:
        yield
    except Contradiction as error:
        if not versions:
            raise
        made = " and ".join(versions)
        raise Unverifiable(
            f"the run was made by equigrad {made}, and this is {__version__}, which may compute otherwise"
            f" ({error.field}: {error.why})"
        ) from None


def check_checkpoints(plan: Plan) -> None:
    """That all checkpoints from the base to the last step hold what the trajectory tells of them.

    Those of lines without digests are compared when their steps have been done again.
    Raises: Contradiction, Unverifiable.
    """
    with _while_it_is_so(plan.run, plan.subject["chain"]):
        _check_checkpoints(plan.run, (plan.base, plan.steps[1]))


def _check_checkpoints(run: Run, steps: tuple[int, int]) -> None:
    saved = _checkpoints(run, steps)
    for line, _ in lines(run.folder / NAME):
        path = saved.get(line["step"]) if line["kind"] == "step" else None
        if path is None:
            continue
        with _while_it_is_there(path):
            _check_files(path)
            if has_tensors(line) and (where := compare(line, line | _tensors(path, line))):
                raise Contradiction(line["step"], where, f"{path.name} is not the state of the trajectory")
            try:
                verify(path)
            except UserError as error:
                _not_of_this_machine(error)
                raise Contradiction(line["step"], "checkpoint", str(error)) from None


@contextmanager
def _while_it_is_so(run: Run, chain: str) -> Iterator[None]:
    """A run that is resumed takes lines back and writes others: what is found meanwhile says nothing. ``chain``: of the
    last line that was looked at."""
    try:
        yield
    except Contradiction:
        _check_unchanged(run, chain)
        raise
    _check_unchanged(run, chain)


def _check_unchanged(run: Run, chain: str) -> None:
    try:
        if any(line["chain"] == chain for line, _ in lines(run.folder / NAME)):
            return
    except (Contradiction, Unverifiable, OSError):
        pass
    raise Unverifiable(f"{NAME} was changed while it was audited: audit it again")


@contextmanager
def _while_it_is_there(path: Path) -> Iterator[None]:
    """A run that goes on removes what it does not keep: what is found meanwhile says nothing."""
    try:
        yield
    except (Contradiction, Unverifiable):
        if (path / MANIFEST).exists():
            raise


def _checkpoints(run: Run, steps: tuple[int, int]) -> dict[int, Path]:
    """Those of some steps."""
    paths = {step_of(path): path for path in list_checkpoints(run.folder / "checkpoints")}
    return {step: path for step, path in paths.items() if steps[0] <= step <= steps[1]}


def _tensors(path: Path, line: Line) -> Line:
    """The digests of a checkpoint's tensors."""
    try:
        return {section: tree_of_files(path, prefix)._asdict() for section, prefix in SECTIONS.items()}
    except Exception as error:  # of what is damaged, anything can be expected
        _not_of_this_machine(error)
        raise Contradiction(line["step"], _damaged(path, line) or "checkpoint", f"{path.name}: {error}") from None


def _not_of_this_machine(error: BaseException | None) -> None:
    """Raises: Unverifiable where an error tells of the auditor's machine: no room, no right to read, a disk that
    fails."""
    while error is not None:
        if getattr(error, "of_machine", False):  # of another rank's
            raise Unverifiable(str(error)) from None
        no_room = isinstance(error, MemoryError) or "allocate memory" in str(error)
        if no_room or (isinstance(error, OSError) and not isinstance(error, FileNotFoundError)):
            raise Unverifiable(f"{type(error).__name__}: {error}") from None
        error = error.__cause__ or error.__context__


def _base(saved: list[Path], begin: int, first: int, digested: set[int]) -> tuple[int, Path | None]:
    """The latest state before ``first`` that the trajectory knows."""
    for path in reversed(saved):
        # Of step 0 whoever made the run could have saved anything: that state comes from the seed.
        if step_of(path) > 0 and begin <= step_of(path) <= max(first - 1, begin) and step_of(path) in digested:
            with _while_it_is_there(path):
                _check_files(path)
                return step_of(path), path
    if begin > 0:
        raise Unverifiable(
            f"the trajectory begins at step {begin}, and there is no checkpoint from before step {first}"
        )
    return 0, None


def _check_files(path: Path) -> None:
    """That the checkpoint is there, may be read, and lies in its own folder."""
    step = step_of(path)
    if version := newer_format(path):
        raise Unverifiable(f"{path.name} has format {version}, of a newer equigrad")
    try:
        manifest = read_manifest(path)
    except UserError as error:
        _not_of_this_machine(error)
        raise Contradiction(step, "checkpoint", str(error)) from None
    said = manifest.meta.get("step")
    if (manifest.step, type(said), said) != (step, int, step):
        raise Contradiction(step, "checkpoint", f"{path.name} says that it is of step {manifest.step}, {said!r}")
    for name in manifest.tensors:
        if not name.startswith(tuple(SECTIONS.values())):
            raise Contradiction(step, f"checkpoint: {name}", f"{path.name} has a tensor of which no trajectory tells")
    for name in manifest.files:
        if not (path / name).is_file():
            raise Unverifiable(f"{path.name}/{name} is missing")
        if not os.access(path / name, os.R_OK):
            raise Unverifiable(f"{path.name}/{name} may not be read by whoever audits")
        if (path / name).resolve().parent != path.resolve():
            raise Contradiction(step, "checkpoint", f"{path.name}/{name} leads out of the checkpoint")


def replay(plan: Plan, layout: dict[str, Any], world: World, work: Path, progress: Progress) -> None:
    """Do the plan on the ranks of ``world``; called on all of them, and ends alike on all of them.

    work: a folder of the audit's own, the same for all ranks
    Raises: Contradiction at the first difference; Unverifiable where there is one that proves nothing.
    """
    with _as_others_do(plan.others), _while_it_is_so(plan.run, plan.subject["chain"]):
        _replay(plan, layout, world, work, progress)


def _replay(plan: Plan, layout: dict[str, Any], world: World, work: Path, progress: Progress) -> None:
    # Of a run that goes on, ranks may not see the same ones.
    said, saved = _steps(plan), gather(_checkpoints(plan.run, (plan.base, plan.steps[1])))[0]
    checkpoint = plan.checkpoint
    for number, (job, (_, stop)) in enumerate(zip(plan.jobs(layout), plan.segments, strict=True)):
        trainer = _open(job, plan.run, world, work)
        if number == 0:
            _start(trainer, plan, line := next(said))
            _compare_checkpoint(trainer, line, saved.get(trainer.step))
            # There is nothing more in this line. How a checkpoint came about, nobody has looked at.
            if line["batch"] is None and checkpoint is None:
                progress.add(line)
        else:
            give_state(trainer, checkpoint)
        while trainer.step < stop:
            _step(trainer, line := next(said))
            _compare_checkpoint(trainer, line, saved.get(trainer.step))
            progress.add(line)
        if stop < plan.steps[1]:  # the run was resumed with other settings, by a checkpoint such as this
            trainer.save()
            checkpoint = latest(work / "checkpoints")
        trainer.checkpointer.close()
    if progress.confirmed[-1:] != [plan.steps[1]]:
        raise Unverifiable(f"only steps {progress.confirmed} were done again")


def _steps(plan: Plan) -> Iterator[Line]:
    """The lines from ``base`` on."""
    for line, _ in lines(plan.run.folder / NAME):
        if line["kind"] == "step" and line["step"] >= plan.base:
            yield line


def _open(job: Job, run: Run, world: World, work: Path) -> Trainer:
    def opened() -> Stream:
        data = job.data.model_copy(update={"cache": str(work / "cache")})
        return Stream(data, job.batch, job.seed, build_tokenizer(data, run.tokenizer))

    first = world.run_where(world.local_rank == 0, opened)
    rest = world.run_where(world.local_rank != 0, opened)
    return Trainer(job, work, world, first or rest)


def _start(trainer: Trainer, plan: Plan, line: Line) -> None:
    """Give the trainer the state to start from, which must be the one that the trajectory tells of."""
    if where := compare(line | dict.fromkeys(SECTIONS), line | {"data": data_digests(trainer.stream)}):
        raise Contradiction(line["step"], where, "the text is another one")
    checkpoint = plan.checkpoint
    try:
        give_state(trainer, checkpoint)
    except (UserError, RuntimeError, KeyError, TypeError, ValueError, AttributeError) as error:
        if checkpoint is None:
            raise
        if not (checkpoint / MANIFEST).exists():
            raise Unverifiable(f"{checkpoint.name} was removed meanwhile, as a run does that goes on") from None
        _not_of_this_machine(error)
        damaged = _damaged(checkpoint, line)
        if damaged is None and isinstance(error, RuntimeError):
            raise
        raise Contradiction(line["step"], damaged or "checkpoint", f"{checkpoint.name}: {error}") from error
    if where := compare(line, line_of(trainer, has_tensors(line)), state=True):
        if checkpoint is None and trainer.job.model.weights is not None:
            raise Unverifiable(f"{trainer.job.model.weights} does not hold what the run began from ({where})")
        source = "the initial state" if checkpoint is None else checkpoint.name
        _differ(trainer, line["step"], where, f"{source} is not the state of the trajectory", checkpoint is None)


def _damaged(checkpoint: Path, line: Line) -> str | None:
    """The first tensor of a damaged checkpoint that is not what the line says, as far as its files can be read."""
    try:
        for section, prefix in SECTIONS.items():
            found = {section: tree_of_files(checkpoint, prefix)._asdict()}
            others = dict.fromkeys(name for name in SECTIONS if name != section)
            if where := compare(line | others, line | found):
                return where
    except Exception:  # of what is damaged, anything can be expected
        pass
    return None


def _compare_checkpoint(trainer: Trainer, line: Line, path: Path | None) -> None:
    """That the checkpoint of this step, if there is one, goes on from here as the trainer would; a collective."""
    if path is None:
        return
    now = None if has_tensors(line) else line_of(trainer, tensors=True)
    counters = {key: trainer.counters[key] for key in _COUNTED}
    said = {"step": trainer.step, "cursor": trainer.stream.cursor(), "updates": trainer.optimizer.updates}
    with _while_it_is_there(path):
        _check_files(path)
        meta = read_manifest(path).meta
        found = {key: meta.get(key) for key in said} | {"counters": meta.get("counters")}
        if isinstance(found["counters"], dict):  # others are times
            found["counters"] = {key: found["counters"].get(key) for key in counters}
        where = difference(json.loads(json.dumps(said | {"counters": counters})), found)
        if where is not None:
            why = f"{path.name} would not go on from where the step ended"
            raise Contradiction(trainer.step, f"checkpoint: {'.'.join(where)}", why)
        if now is not None and (differs := compare(now, now | _tensors(path, now))):
            why = f"{path.name} is not the state that the step leads to"
            _differ(trainer, trainer.step, differs, why, computed=True)


def _step(trainer: Trainer, line: Line) -> None:
    """Do one step, and compare."""
    batch = trainer.stream.next_batch()
    try:
        record, _ = trainer.update(batch, StopRequest())
    except UserError as error:
        _differ(trainer, line["step"], "loss", f"the step is refused: {error}", computed=True)
    where = compare(line, line_of(trainer, has_tensors(line), record, batch))
    if where:
        computed = where.split(":")[0] in ("loss", "grad_norm", *SECTIONS)
        _differ(trainer, line["step"], where, "done again, the step has another value", computed)


def _differ(trainer: Trainer, step: int, where: str, why: str, computed: bool = False) -> NoReturn:
    """A difference is a contradiction, unless it is one of results whose bits depend on machine and layout."""
    if computed and trainer.job.numerics.kind == "native":
        raise Unverifiable(
            f"step {step}, {where}: {why}; in native numerics bits depend on machine and layout, so that proves nothing"
        )
    raise Contradiction(step, where, why)
