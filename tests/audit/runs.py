"""Runs to audit, and what somebody might do to them."""

import hashlib
import io
import json
import struct
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from equigrad.audit.trajectory import canonical, linked, sha
from equigrad.checkpoint.manifest import MANIFEST, _seal
from equigrad.config import Job
from tests.jobs import tiny_job

Line = dict[str, Any]


def audited_job(folder: Path, **changes: Any) -> Job:
    """The tiny job in exact numerics, on text in ``folder``: six steps, a checkpoint after every other."""
    source = folder / "text.jsonl"
    if not source.exists():
        text = "It was the best of times, it was the worst of times, it was the age of wisdom. "
        source.write_text("".join(json.dumps({"text": text[i:] * 2}) + "\n" for i in range(60)))
    given: dict[str, Any] = {
        "numerics__kind": "exact", "audit__enabled": True, "checkpoint__every": 2, "checkpoint__keep_last": 9,
        "data__sources": [str(source)], "data__held_out_every": 20, "batch__tokens": 200, "train__steps": 6,
        "train__eval_every": 3, "optim__schedule_steps": 6, "observe__report": False, "observe__sample_tokens": 0,
    }  # fmt: skip
    return tiny_job(**given | changes)


def audit(*words: str | Path) -> tuple[int, str]:
    """Exit code and output of ``equigrad audit``, in this process."""
    from equigrad.cli import main

    with redirect_stdout(io.StringIO()) as out:
        code = main(["audit", *map(str, words)])
    return code, out.getvalue()


def trajectory(run: Path) -> list[Line]:
    return [json.loads(line) for line in (run / "trajectory.jsonl").read_text().splitlines()]


def write(run: Path, lines: list[Line]) -> None:
    (run / "trajectory.jsonl").write_bytes(b"".join(canonical(line) + b"\n" for line in lines))


def rechained(lines: list[Line]) -> list[Line]:
    """As one who knows the format makes it look untouched."""
    chain, job, found = "", lines[0]["job"], []
    for line in lines:
        if line["kind"] == "job":
            job = line["job"] = sha(line["settings"])
        line = linked(chain, line | {"job": job})
        found.append(line)
        chain = line["chain"]
    return found


def change_line(run: Path, step: int, change: Callable[[Line], None], *, hidden: bool) -> None:
    """``hidden``: the chain is made anew."""
    lines = trajectory(run)
    change(next(line for line in lines if line["kind"] == "step" and line["step"] == step))
    write(run, rechained(lines) if hidden else lines)


def flip_bit(run: Path, step: int, tensor: str, *, hidden: bool) -> None:
    """One bit of the tensor in the checkpoint. ``hidden``: the manifest's hashes are made anew."""
    checkpoint = run / "checkpoints" / f"step-{step:08d}"
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    file = checkpoint / manifest["tensors"][tensor]["boxes"][0]["file"]
    data = bytearray(file.read_bytes())
    (size,) = struct.unpack("<Q", data[:8])
    start, _ = json.loads(data[8 : 8 + size])[tensor]["data_offsets"]
    data[8 + size + start] ^= 1
    file.write_bytes(data)
    if hidden:
        change_manifest(run, step, lambda body: body["files"][file.name].update(sha256=_sha256(file)))


def rewrite(run: Path, step: int, change: Callable[[dict[str, Tensor]], None]) -> None:
    """The tensors in the file of a checkpoint, whose hash in the manifest is made anew."""
    file = run / "checkpoints" / f"step-{step:08d}" / "rank-00000.safetensors"
    change(tensors := load_file(file))
    save_file(tensors, file)
    change_manifest(
        run, step, lambda body: body["files"][file.name].update(sha256=_sha256(file), size=file.stat().st_size)
    )


def change_manifest(run: Path, step: int, change: Callable[[dict[str, Any]], None], *, sealed: bool = True) -> None:
    path = run / "checkpoints" / f"step-{step:08d}" / MANIFEST
    body = json.loads(path.read_text())
    seal = body.pop("sha256")
    change(body)
    path.write_text(json.dumps(body | {"sha256": _seal(body) if sealed else seal}))


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def replace_in(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text, text
    file.write_text(text.replace(old, new))
