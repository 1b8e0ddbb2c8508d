"""``trajectory.jsonl``: what a run says of each of its steps, line by line, so that others can check it.

Every line is canonical JSON (sorted keys, no spaces) with ``format`` and ``chain``: SHA-256 of the chain of the line
before (of nothing, for the first) and of this line without its chain. Two kinds:

    {"kind": "job", "step": 0, "job": SHA-256 of settings, "settings": {...}, "version": of equigrad}
        what holds for the steps after ``step``, until there is another such line
    {"kind": "step", "step": 5, "job": ..., "data": [SHA-256 of each source's tokens], "batch": SHA-256 of the samples,
     "loss": "0x1.8p+1", "grad_norm": "0x1.4p-1", "parameters": {"nodes": {name: SHA-256}, "root": SHA-256},
     "optimizer": ..., "grids": ..., "routing": ..., "progress": {...}}
        a step, and the state after it. The first has no batch, loss and norm; steps that are not due have no tensors,
        of none of the four kinds

Only what no layout may change is in it: neither times, nor generators of random numbers, which training does not draw
from and of which each rank has its own. Torch-free; knows neither models nor how a line comes about.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from equigrad.config import Job
from equigrad.config.load import make_job
from equigrad.config.optim import USES

FORMAT = 1
NAME = "trajectory.jsonl"
SECTIONS = {"parameters": "model.", "optimizer": "optim.", "grids": "grids.", "routing": "routing."}
"""Groups of tensors, and how their names begin in checkpoints; in a line that is left out."""

Line = dict[str, Any]
_COMMON = ("format", "kind", "step", "job", "chain")
_OWN = {
    "job": ("settings", "version"),
    # In the order in which a difference is looked for: causes before effects.
    "step": ("data", "batch", "loss", "grad_norm", *SECTIONS, "progress"),
}
_STATE = ("data", *SECTIONS, "progress")
_OF_A_STEP = ("batch", "loss", "grad_norm")
_OF_ROLES = ("embedding_lr", "head_lr", "vector_lr")
_LASTING = ("seed", "model", "lora", "data")
"""Sections of settings that hold for a whole run."""
_MAY_CHANGE = {"model": ("mtp_loss_coef",), "experts": ("router_aux_loss_coef",)}
_LONGEST = 1 << 28
"""Bytes of a line: a million tensors have fewer. Whoever made the file may have left out all line ends."""


class Contradiction(Exception):
    """A run is not what it says: where (step, field and what lies in it), and why."""

    def __init__(self, step: int | None, field: str, why: str) -> None:
        super().__init__(why)
        self.step, self.field, self.why = step, field, why


class Unverifiable(Exception):
    """Nothing is known to be wrong, but neither can it be confirmed."""


def canonical(value: Any) -> bytes:
    """JSON in one form: sorted keys, no spaces, floats as Python writes them. ``ValueError`` for NaN and infinity."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def sha(value: Any) -> str:
    """SHA-256 of the canonical JSON, hexadecimal."""
    return hashlib.sha256(canonical(value)).hexdigest()


def linked(previous: str, line: Line) -> Line:
    """``line`` with its chain, after a line with the chain ``previous`` ("" before the first)."""
    bare = {key: value for key, value in line.items() if key != "chain"}
    return bare | {"chain": hashlib.sha256(previous.encode() + canonical(bare)).hexdigest()}


def settings(job: Job) -> dict[str, Any]:
    """What of a resolved job decides its numbers: no names and paths, no layout, nothing that is only shown or kept.

    In exact numerics neither how samples are packed, nor what is compiled or recomputed.
    """
    exact = job.numerics.kind == "exact"
    left_out: dict[str, Any] = dict.fromkeys(("name", "layout", "observe", "checkpoint", "audit"), True)
    left_out["train"] = {"steps", "eval_every", "eval_tokens"}
    left_out["data"] = {"cache": True, "held_out_sources": True, "tokenizer": True,
                        "sources": {"__all__": {"path"} | ({"modality"} if exact else set())}}  # fmt: skip
    left_out["model"] = {"weights"}
    if exact:
        left_out |= {"memory": True, "numerics": {"compile"}, "batch": {"row_tokens", "packing"}}
    found = job.model_dump(mode="json", exclude=left_out)
    if job.rl is None:  # as it was before jobs had that section
        del found["rl"]
    found["optim"]["schedule_steps"] = job.optim.schedule_steps or max(1, job.train.steps)
    # What the rule does not read decides nothing, nor do rates of roles where they are none of their own.
    unused = set().union(*USES.values()) - USES[job.optim.name] | {"preset"}
    unused |= {key for key in _OF_ROLES if found["optim"][key] == 1.0}
    found["optim"] = {key: value for key, value in found["optim"].items() if key not in unused}
    for source in found["data"]["sources"]:  # as it was before sources had one
        if source.get("modality") == "text":
            del source["modality"]
    return found


def job_with(job: Job, wanted: dict[str, Any], layout: dict[str, Any]) -> Job:
    """The job under other ``settings``, on another layout; what they leave out is the job's own.

    Raises: Contradiction where that has still other settings, as data cannot change within a run.
    """
    tree = job.model_dump(exclude_none=True)
    tree["optim"] |= dict.fromkeys(_OF_ROLES, 1.0)  # what settings leave out
    for section, values in wanted.items():
        if section in ("seed", "lora"):
            tree[section] = values
        elif section != "data":
            tree.setdefault(section, {}).update(values)
    tree |= {"layout": layout, "checkpoint": {"asynchronous": False}, "observe": {}, "audit": {}}
    tree["data"].pop("cache", None)  # whoever wrote the run may have filled it
    if layout.get("pp_schedule") == "zero_bubble":
        tree["numerics"]["compile"] = False
    found = make_job(_given(tree), NAME)
    check_settings(found, wanted)
    return found


def check_settings(job: Job, wanted: dict[str, Any]) -> None:
    """Raises: Contradiction where the job of ``job.toml`` has other settings."""
    if (where := difference(wanted, settings(job))) is not None:
        raise Contradiction(None, f"job.toml: {'.'.join(where)}", "job.toml is not the job of the trajectory")


def check_lasting(before: dict[str, Any], after: dict[str, Any], step: int) -> None:
    """Raises: Contradiction where a run goes on with settings that no run changes."""

    def lasting(of: dict[str, Any]) -> dict[str, Any]:
        kept = {section: of.get(section) for section in _LASTING}
        model = {key: value for key, value in of["model"].items() if key not in _MAY_CHANGE["model"]}
        if isinstance(model.get("experts"), dict):
            model["experts"] = {k: v for k, v in model["experts"].items() if k not in _MAY_CHANGE["experts"]}
        return kept | {"model": model, "numerics": {"kind": of["numerics"]["kind"]}}

    try:
        where = difference(lasting(before), lasting(after))
    except (KeyError, TypeError, AttributeError):
        raise Contradiction(step, "job", "these are not the settings of a job") from None
    if where is not None:
        raise Contradiction(step, f"job: {'.'.join(where)}", "a run does not change that on its way")


def changes(before: Any, after: Any, prefix: str = "") -> Iterator[str]:
    """Dotted keys in which settings differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted({**before, **after}):
            yield from changes(before.get(key), after.get(key), f"{prefix}.{key}" if prefix else key)
    elif before != after:
        yield prefix


def _given(tree: Any) -> Any:
    """Without the keys that have no value."""
    return {k: _given(v) for k, v in tree.items() if v is not None} if isinstance(tree, dict) else tree


def lines(path: Path) -> Iterator[tuple[Line, int]]:
    """The lines, each with the byte at which it ends, checked as they come: form, order and chain.

    What follows the last line end is what a killed run was writing, and is passed over.
    Raises: Contradiction for a line that was changed, Unverifiable for a missing file or a newer format.
    """
    if not path.exists():
        raise Unverifiable(f"there is no {path.name}: a run has one where audit.enabled is set")
    if not path.is_file():  # a pipe would never end
        raise Unverifiable(f"{path.name} is not a file")
    try:
        file = path.open("rb")
    except OSError as error:
        raise Unverifiable(f"{path.name} cannot be read: {error.strerror}") from None
    end, chain, job, after, begun = 0, "", "", [("job", -1)], False
    with file:
        for number, text in enumerate(iter(lambda: file.readline(_LONGEST), b""), 1):
            if len(text) == _LONGEST:
                raise Unverifiable(f"line {number} of {NAME} is longer than {_LONGEST} bytes")
            if not text.endswith(b"\n"):
                return
            end += len(text)
            line = _parsed(text, number, after[0][1])
            step, kind, where = line["step"], line["kind"], f"line {number} of {NAME}"
            if step < 0:
                raise Contradiction(0, "step", f"{where} is of step {step}")
            if linked(chain, line)["chain"] != line["chain"]:
                why = "does not go on from the line before: one of them was changed, moved or taken away"
                raise Contradiction(step, "chain", f"{where} {why}")
            if (kind, step) not in after and (number > 1 or kind != "job"):
                raise Contradiction(step, "step", f"{where} is a {kind} of step {step}, where {after[0]} should be")
            if line["job"] != (sha(line["settings"]) if kind == "job" else job):
                raise Contradiction(step, "job", f"{where} has the digest of another job")
            if kind == "step":
                if any((line[key] is None) == begun for key in _OF_A_STEP):
                    why = "does not tell of its step" if begun else "tells of a step before the first state"
                    raise Contradiction(step, "batch", f"{where} {why}")
                missing = [section for section in SECTIONS if line[section] is None]
                if missing and (not begun or len(missing) < len(SECTIONS)):
                    raise Contradiction(step, missing[0], f"{where} has no digests of these tensors")
                begun = True
            yield line, end
            chain, job = line["chain"], line["job"]
            after = [("step", step)] if number == 1 else [("step", step + 1), ("job", step)]


def _parsed(text: bytes, number: int, step: int) -> Line:
    try:
        line: Line = json.loads(text)
        if isinstance(line["format"], int) and line["format"] > FORMAT:
            raise Unverifiable(f"{NAME} has format {line['format']}, of a newer equigrad; this one reads {FORMAT}")
        whole = canonical(line) + b"\n" == text and line.keys() == {*_COMMON, *_OWN[line["kind"]]}
        if whole and line["format"] == FORMAT and type(line["format"]) is type(line["step"]) is int:
            return line
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        pass
    raise Contradiction(max(step, 0), "line", f"line {number} of {NAME} is not a line as a run writes it")


def difference(said: Any, found: Any) -> tuple[str, ...] | None:
    """The keys that lead to the first difference of two JSON values, () where they differ as a whole; None: equal."""
    if isinstance(said, dict) and isinstance(found, dict):
        for key in sorted({**said, **found}):
            if key not in said or key not in found:
                return (key,)
            if (below := difference(said[key], found[key])) is not None:
                return (key, *below)
        return None
    if isinstance(said, list) and isinstance(found, list) and len(said) == len(found):
        for place, pair in enumerate(zip(said, found, strict=True)):
            if (below := difference(*pair)) is not None:
                return (str(place), *below)
        return None
    return None if said == found and type(said) is type(found) else ()  # 1, 1.0 and true are equal in Python


def compare(said: Line, found: Line, state: bool = False) -> str:
    """The first field, and the tensor or value in it, in which two lines of a step differ; "" where they agree.

    Tensors are compared where ``said`` has them. ``state``: only what a checkpoint determines.
    """
    for field in _STATE if state else ("job", *_OWN["step"]):
        if field in SECTIONS and said[field] is None:
            continue
        if (where := difference(said[field], found[field])) is not None:
            return ": ".join([field, *([".".join(where).removeprefix("nodes.")] if where else [])])
    return ""


def has_tensors(line: Line) -> bool:
    """Whether the tensors of the step are digested."""
    return line["parameters"] is not None
