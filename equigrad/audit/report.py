"""Reports of audits: what was audited, where, and with which verdict; and what several of them say together.

A report carries the SHA-256 of its canonical JSON without it. That finds damage and careless changes; it is no
signature, and who made a report is for others to say. Torch-free.
"""

import json
import platform
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from equigrad import __version__
from equigrad.audit.trajectory import NAME, canonical, sha
from equigrad.errors import UserError

FORMAT = 1
Verdict = Literal["confirmed", "contradicted", "unverifiable"]
EXIT: dict[Verdict, int] = {"confirmed": 0, "contradicted": 1, "unverifiable": 3}


@dataclass
class Outcome:
    """What became of an audit.

    step, field: where the run is contradicted, as far as that is known
    start:       from where steps were done again: {"step": 20, "from": "checkpoint"}
    confirmed:   first and last step whose lines were found again
    tensors:     how many of these lines have digests of tensors
    changed:     steps after which the run went on with other settings, and which: [[20, ["optim.lr"]]]
    """

    verdict: Verdict
    why: str = ""
    step: int | None = None
    field: str | None = None
    start: dict[str, Any] | None = None
    confirmed: tuple[int, int] | None = None
    tensors: int = 0
    changed: tuple[Any, ...] | list[Any] = ()


def subject(folder: Path) -> dict[str, Any] | None:
    """By what a run is known: its trajectory's last chain, the job of its last step, first and last step. None where
    they cannot be read. Nothing of it is checked."""
    if not (folder / NAME).is_file():
        return None
    try:
        with (folder / NAME).open("rb") as file:
            text = next(file)
            ends, steps = deque([text], 1), deque([text], 1)
            for line in file:  # of what may be a long file, the last line, and the last of a step
                if line.endswith(b"\n"):
                    ends.append(line)
                    steps.extend([line] if b'"kind":"step"' in line else [])
        first, last, step = json.loads(text), json.loads(ends[0]), json.loads(steps[0])
        return {"chain": last["chain"], "job": step["job"], "first": first["step"], "last": step["step"]}
    except (OSError, StopIteration, ValueError, TypeError, KeyError, RecursionError):
        return None


def report(
    run: dict[str, Any] | None, steps: tuple[int, int] | None, layout: str, outcome: Outcome, torch: str
) -> dict[str, Any]:
    """The report of an audit. ``run``: by what the run is known."""
    machine = {"system": platform.platform(), "processor": platform.processor() or platform.machine(),
               "python": platform.python_version(), "torch": torch, "equigrad": __version__}  # fmt: skip
    said = {"format": FORMAT, "kind": "audit", "run": run, "steps": steps and list(steps),
            "layout": layout, "machine": machine}  # fmt: skip
    told = json.loads(json.dumps(asdict(outcome)))
    for key in ("why", "field"):  # what strangers wrote may be no text that can be written
        told[key] = told[key] and told[key].encode("utf-8", "replace").decode()
    return sealed(said | told)


def sealed(body: dict[str, Any]) -> dict[str, Any]:
    """With its digest."""
    return body | {"digest": sha(body)}


def read(path: Path) -> dict[str, Any]:
    """A report. ``UserError`` where it is none, or was changed after it had been written."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is not a file")
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        version, kind = body["format"], body["kind"]
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, RecursionError):
        raise UserError(f"{path} is not a report of an audit") from None
    if type(version) is not int:
        raise UserError(f"{path} is not a report of an audit")
    if version > FORMAT:
        raise UserError(f"{path} has format {version}, of a newer equigrad; this one reads {FORMAT}")
    if kind != "audit":
        raise UserError(f"{path} is a report of kind {kind!r}; give the audits themselves")
    try:
        intact = sha({key: value for key, value in body.items() if key != "digest"}) == body["digest"]
        if intact and _adds_up(_Report.model_validate_json(canonical(body))):
            return dict(body)
    except (ValueError, KeyError, RecursionError):
        pass
    raise UserError(f"{path} was changed after it had been written: its digest is not its own")


_Number = Annotated[int, Field(ge=0)]


class _Form(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _Subject(_Form):
    chain: str
    job: str
    first: _Number
    last: _Number


class _Start(_Form):
    step: _Number
    begun: Literal["initial state", "imported weights", "checkpoint"] = Field(alias="from")


class _Report(_Form):
    """The form in which an audit writes its report."""

    format: int = Field(ge=1, le=FORMAT)
    kind: Literal["audit"]
    run: _Subject | None
    steps: tuple[_Number, _Number] | None
    layout: str
    machine: dict[str, str]
    verdict: Verdict
    why: str
    step: _Number | None
    field: str | None
    start: _Start | None
    confirmed: tuple[_Number, _Number] | None
    tensors: _Number
    changed: list[tuple[_Number, list[str]]]
    digest: str


def _adds_up(report: _Report) -> bool:
    """Whether what the report says of its steps can be so."""
    run = report.run
    if run is not None and run.first > run.last:
        return False
    if report.confirmed is not None:
        first, last = report.confirmed
        begun = max(run.first if run else 0, report.start.step if report.start else 0)
        end = min(run.last if run else last, report.steps[1] if report.steps else last)
        if not begun <= first <= last <= end or report.tensors > last - first + 1:
            return False
    differs = report.field is not None or report.step is not None
    return report.verdict != "confirmed" or (report.start is not None and not differs)


def merge(paths: Sequence[Path]) -> dict[str, Any]:
    """What reports of one run say together: of which steps how many confirm it, and every contradiction.

    An audit that did not come to its end confirms nothing here: what it has met may concern what it had done. The same
    report counts once. ``UserError`` for reports of several runs.
    """
    reports = {body["digest"]: (path, body) for path in paths for body in (read(path),)}
    (origin, first), *rest = reports.values()
    if first["run"] is None:
        raise UserError(f"{origin} does not say which run it is of")
    for path, body in rest:
        if body["run"] != first["run"]:
            raise UserError(f"{path} is of another run than {origin}, or of another length of it")
    run = first["run"]
    ended = [body for _, body in reports.values() if body["verdict"] == "confirmed" and body["confirmed"]]
    coverage = _coverage(run["first"], run["last"], [body["confirmed"] for body in ended])
    contradictions = [
        {"report": digest, **{key: body[key] for key in ("step", "field", "why", "layout")}}
        for digest, (_, body) in reports.items()
        if body["verdict"] == "contradicted"
    ]
    missing = [steps for *steps, count in coverage if not count]
    changed = {json.dumps(change): change for body in ended for change in body["changed"]}
    begun = sorted({str(body["start"]["from"]) for body in ended})
    verdict: Verdict = "contradicted" if contradictions else "unverifiable" if missing else "confirmed"
    return sealed(
        {"format": FORMAT, "kind": "merged", "run": run, "reports": list(reports), "verdict": verdict,
         "coverage": [{"steps": steps, "confirmed_by": count} for *steps, count in coverage],
         "not_covered": missing, "contradictions": contradictions,
         "changed": [changed[key] for key in sorted(changed)], "started_from": begun}
    )  # fmt: skip


def _coverage(first: int, last: int, confirmed: Sequence[Sequence[int]]) -> list[tuple[int, int, int]]:
    """Ranges of steps that as many reports confirm: first, last, how many."""
    borders = sorted({first, *(n for start, stop in confirmed for n in (start, stop + 1) if first < n <= last)})
    found: list[tuple[int, int, int]] = []
    for start, after in zip(borders, [*borders[1:], last + 1], strict=True):
        count = sum(low <= start <= high for low, high in confirmed)
        if found and found[-1][2] == count:
            start = found.pop()[0]
        found.append((start, after - 1, count))
    return found
