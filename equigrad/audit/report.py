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
    if isinstance(version, int) and version > FORMAT:
        raise UserError(f"{path} has format {version}, of a newer equigrad; this one reads {FORMAT}")
    if kind != "audit":
        raise UserError(f"{path} is a report of kind {kind!r}; give the audits themselves")
    try:
        intact = sha({key: value for key, value in body.items() if key != "digest"}) == body["digest"]
        if intact and _is_whole(body):
            return dict(body)
    except (ValueError, TypeError, KeyError):
        pass
    raise UserError(f"{path} was changed after it had been written: its digest is not its own")


_KNOWN_BY = {"chain", "job", "first", "last"}


def _is_whole(body: dict[str, Any]) -> bool:
    """Whether all that is added up has the form in which an audit writes it."""
    run, (first, last) = body["run"], body["confirmed"] or (0, 0)
    texts = [body["why"], body["layout"], body["field"] or ""]
    numbers = [first, last, body["step"] or 0]
    if run is not None:
        texts += [run["chain"], run["job"]]
        numbers += [run["first"], run["last"]]
        if {*run} != _KNOWN_BY or not run["first"] <= run["last"]:
            return False
        asked = body["steps"] or [run["first"], run["last"]]
        start = body["start"]["step"] if body["start"] else run["first"]
        if len(asked) != 2 or not all(type(n) is int and n >= 0 for n in (*asked, start)):
            return False
        if body["confirmed"] and not (max(run["first"], start) <= first and last <= min(run["last"], asked[1])):
            return False
        if type(body["tensors"]) is not int or not 0 <= body["tensors"] <= last - first + 1:
            return False
    if body["verdict"] == "confirmed" and (body["start"] is None or body["field"] or body["step"] is not None):
        return False
    return (
        body["verdict"] in EXIT
        and all(type(n) is int and n >= 0 for n in numbers)
        and all(isinstance(text, str) for text in texts)
        and first <= last
    )


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
