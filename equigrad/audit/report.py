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
from typing import Any, Literal

from equigrad import __version__
from equigrad.audit.trajectory import NAME, sha
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
    """

    verdict: Verdict
    why: str = ""
    step: int | None = None
    field: str | None = None
    start: dict[str, Any] | None = None
    confirmed: tuple[int, int] | None = None
    tensors: int = 0


def subject(folder: Path) -> dict[str, Any] | None:
    """By what a run is known: its trajectory's last chain and job, first and last step. None where they cannot be
    read. Nothing of it is checked."""
    try:
        with (folder / NAME).open("rb") as file:
            text = next(file)
            ends = deque([text], 1)
            ends.extend(line for line in file if line.endswith(b"\n"))  # of what may be a long file, the last line
        first, last = json.loads(text), json.loads(ends[0])
        return {"chain": last["chain"], "job": last["job"], "first": first["step"], "last": last["step"]}
    except (OSError, StopIteration, ValueError, TypeError, KeyError, RecursionError):
        return None


def report(folder: Path, steps: tuple[int, int] | None, layout: str, outcome: Outcome, torch: str) -> dict[str, Any]:
    """The report of an audit."""
    machine = {"system": platform.platform(), "processor": platform.processor() or platform.machine(),
               "python": platform.python_version(), "torch": torch, "equigrad": __version__}  # fmt: skip
    said = {"format": FORMAT, "kind": "audit", "run": subject(folder), "steps": steps and list(steps),
            "layout": layout, "machine": machine}  # fmt: skip
    return sealed(said | json.loads(json.dumps(asdict(outcome))))


def sealed(body: dict[str, Any]) -> dict[str, Any]:
    """With its digest."""
    return body | {"digest": sha(body)}


def read(path: Path) -> dict[str, Any]:
    """A report. ``UserError`` where it is none, or was changed after it had been written."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        version, kind = body["format"], body["kind"]
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, RecursionError):
        raise UserError(f"{path} is not a report of an audit") from None
    if isinstance(version, int) and version > FORMAT:
        raise UserError(f"{path} has format {version}, of a newer equigrad; this one reads {FORMAT}")
    if kind != "audit":
        raise UserError(f"{path} is a report of kind {kind!r}; give the audits themselves")
    try:
        intact = sha({key: value for key, value in body.items() if key != "digest"}) == body["digest"]
        if intact and body["verdict"] in EXIT and (body["run"] is None or {*body["run"]} == _KNOWN_BY):
            _confirmed(body)
            return dict(body)
    except (ValueError, TypeError, KeyError):
        pass
    raise UserError(f"{path} was changed after it had been written: its digest is not its own")


_KNOWN_BY = {"chain", "job", "first", "last"}


def _confirmed(body: dict[str, Any]) -> range:
    first, last = body["confirmed"] or (1, 0)
    return range(first, last + 1)


def merge(paths: Sequence[Path]) -> dict[str, Any]:
    """What reports of one run say together: of which steps how many confirm it, and every contradiction.

    The same report counts once. ``UserError`` for reports of several runs.
    """
    reports = {body["digest"]: (path, body) for path in paths for body in (read(path),)}
    (origin, first), *rest = reports.values()
    if first["run"] is None:
        raise UserError(f"{origin} does not say which run it is of")
    for path, body in rest:
        if body["run"] != first["run"]:
            raise UserError(f"{path} is of another run than {origin}, or of another length of it")
    run = first["run"]
    counts = dict.fromkeys(range(run["first"], run["last"] + 1), 0)
    for _, body in reports.values():
        for step in _confirmed(body):
            if step in counts:
                counts[step] += 1
    contradictions = [
        {"report": digest, **{key: body[key] for key in ("step", "field", "why", "layout")}}
        for digest, (_, body) in reports.items()
        if body["verdict"] == "contradicted"
    ]
    missing = [steps for *steps, count in _runs(counts) if not count]
    verdict: Verdict = "contradicted" if contradictions else "unverifiable" if missing else "confirmed"
    return sealed(
        {"format": FORMAT, "kind": "merged", "run": run, "reports": list(reports), "verdict": verdict,
         "coverage": [{"steps": steps, "confirmed_by": count} for *steps, count in _runs(counts)],
         "not_covered": missing, "contradictions": contradictions}
    )  # fmt: skip


def _runs(counts: dict[int, int]) -> list[tuple[int, int, int]]:
    """Ranges of steps that as many reports confirm: first, last, how many."""
    found: list[tuple[int, int, int]] = []
    for step, count in counts.items():
        if found and found[-1][2] == count:
            found[-1] = (found[-1][0], step, count)
        else:
            found.append((step, step, count))
    return found
