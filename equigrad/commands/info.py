"""``equigrad info`` and ``equigrad report``: what is in a run, a checkpoint or a model folder."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from equigrad.checkpoint.weights import Weights
from equigrad.errors import UserError
from equigrad.files import write_json, writing
from equigrad.models.specs import parameter_count
from equigrad.resolve import find_weights
from equigrad.run import Run


def main(arguments: argparse.Namespace) -> int:
    """Print what there is, as aligned lines; ``--json`` writes the same as a tree."""
    path = Path(arguments.path)
    run = Run(path)
    result = _run(run) if run.exists() else _one(find_weights(path))
    _show(result)
    if arguments.json:
        write_json(Path(arguments.json), result)
    return 0


def _run(run: Run) -> dict[str, Any]:
    from equigrad.checkpoint.folder import list_checkpoints

    job = run.job()
    summary = run.read_summary() if run.summary.exists() else None
    return {
        "kind": "run",
        "path": str(run.folder),
        "name": job.name,
        "finished": summary is not None and summary["steps"] >= job.train.steps,
        "steps": job.train.steps,
        "parameters": parameter_count(job.model, job.lora),
        "layout": job.layout.describe(),
        "checkpoints": [_checkpoint(c) for c in list_checkpoints(run.folder / "checkpoints")],
        "summary": summary,
    }


def _checkpoint(path: Path) -> dict[str, Any]:
    """Facts of a checkpoint, every byte of it verified, and the digest of its parameters."""
    from equigrad.checkpoint.digest import digest_files
    from equigrad.checkpoint.manifest import verify

    manifest = verify(path)
    return {
        "path": str(path),
        "step": manifest.step,
        "tokens": manifest.meta.get("counters", {}).get("tokens"),
        "bytes": sum(f.size for f in manifest.files.values()),
        "tensors": len(manifest.tensors),
        "parameter_digest": digest_files(path),
    }


def _one(weights: Weights) -> dict[str, Any]:
    """A checkpoint or a Hugging Face folder."""
    shape = weights.model.model_dump(exclude_none=True)
    if weights.checkpoint is not None:
        return {"kind": "checkpoint"} | _checkpoint(weights.checkpoint) | {"model": shape}
    from equigrad.checkpoint.digest import digest
    from equigrad.checkpoint.huggingface import model_tensors, weight_dtypes
    from equigrad.parallel.placement import place_all

    tensors = model_tensors(weights)
    return {
        "kind": "model",
        "path": str(weights.folder),
        "parameters": parameter_count(weights.model),
        "dtypes": sorted(set(weight_dtypes(weights.folder).values())),
        "parameter_digest": digest(place_all((name, tensor.float()) for name, tensor in tensors)),
        "model": shape,
    }


def _show(tree: dict[str, Any]) -> None:
    lines = list(_lines(tree))
    width = max(len(label) for label, _ in lines)
    for label, value in lines:
        print(f"{label:<{width}}  {value}".rstrip())


def _lines(tree: dict[str, Any], indent: str = "") -> Iterator[tuple[str, str]]:
    """Label and value of every line; a part's own line has no value, and what has none has no line."""
    for key, value in tree.items():
        label = indent + key.replace("_", " ")
        if isinstance(value, dict):
            yield label, ""
            yield from _lines(value, indent + "  ")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for item in value:
                yield label.removesuffix("s"), ""
                yield from _lines(item, indent + "  ")
        elif value not in (None, []):
            yield label, _text(value)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}" if isinstance(value, float) else str(value)


def report_main(arguments: argparse.Namespace) -> int:
    """Write ``report.html`` again from what the run has recorded."""
    from equigrad.observe.report import write_report

    run = Run(Path(arguments.path))
    if not run.exists():
        raise UserError(f"{run.folder} is not a run folder: it has no job.toml")
    with writing(run.folder):
        print(write_report(run.folder))
    return 0
