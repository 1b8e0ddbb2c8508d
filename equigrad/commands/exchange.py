"""``equigrad import`` and ``equigrad export``: from and to Hugging Face model folders."""

import argparse
from pathlib import Path

from equigrad.checkpoint.weights import Weights
from equigrad.config import Job
from equigrad.config.data import TokenizerConfig
from equigrad.config.train import Train
from equigrad.errors import UserError
from equigrad.files import writing
from equigrad.models.huggingface import stored_pieces, to_huggingface, to_peft
from equigrad.models.specs import is_adapter, parameter_count, parameter_specs
from equigrad.resolve import find_weights
from equigrad.run import Run


def import_main(arguments: argparse.Namespace) -> int:
    """Write a run folder whose only checkpoint, of step 0, holds the weights in float32."""
    weights, run = find_weights(arguments.model), Run(Path(arguments.run))
    if weights.checkpoint is not None:
        raise UserError(f"{weights.folder} is a run or checkpoint already; import takes a Hugging Face folder")
    run.check_free()
    with run.lock():
        run.check_free()  # again: before the lock was held, another process may have come first
        run.clear()
        _import(weights, run)
    return 0


def _import(weights: Weights, run: Run) -> None:
    import torch

    from equigrad.checkpoint.huggingface import load_weights, weight_dtypes
    from equigrad.checkpoint.state import Checkpointer
    from equigrad.commands.models import data_within, own_tokenizer
    from equigrad.config.checkpoint import Checkpoint
    from equigrad.parallel.placement import place_all

    specs = parameter_specs(weights.model)
    parameters = place_all((name, torch.empty(spec.shape)) for name, spec in specs.items())
    load_weights(weights, parameters)
    tokenizer = own_tokenizer(weights) if weights.tokenizer else None
    data = data_within(weights.model)
    if tokenizer is not None:
        with writing(run.tokenizer):
            tokenizer.save(run.tokenizer)
        data = data.model_copy(update={"tokenizer": TokenizerConfig(kind="file", path=str(run.tokenizer))})
    named = {f"model.{n}": p.renamed(f"model.{n}") for n, p in parameters.items()}
    saver = Checkpointer(run.folder / "checkpoints", Checkpoint(asynchronous=False))
    saver.save(0, named, {"step": 0, "imported_dtypes": weight_dtypes(weights.folder)})
    saver.close()
    name = "".join(c if c.isalnum() or c in "._-" else "-" for c in run.folder.resolve().name).strip("._-") or "model"
    run.write_job(Job(name=name, train=Train(steps=0), data=data, model=weights.model))
    print(f"{run.folder}: {parameter_count(weights.model):,} parameters imported from {weights.folder}")
    if tokenizer is None:
        print("no tokenizer.json there, so none was imported")


def _export_adapter(weights: Weights, folder: Path, dtype: str) -> int:
    import torch

    from equigrad.checkpoint.huggingface import peft_tensors, write_adapter
    from equigrad.checkpoint.state import read_tensors
    from equigrad.commands.models import own_job

    if weights.lora is None or weights.checkpoint is None:
        raise UserError(f"{weights.folder} has no adapters: only a run with [lora] has; leave --adapter out")
    base, kind = own_job(weights).model.weights, getattr(torch, dtype)
    if base is not None and not (Path(base) / "config.json").exists():
        base = None  # a run, which PEFT cannot read
    config = to_peft(weights.model, weights.lora, base)
    adapters = {n: t.to(kind) for n, t in read_tensors(weights.checkpoint) if is_adapter(n)}
    write_adapter(folder.resolve(), config, peft_tensors(adapters, weights.model, weights.lora))
    print(f"{folder}: {parameter_count(weights.model, weights.lora, True):,} parameters of adapters in {dtype}")
    return 0


def export_main(arguments: argparse.Namespace) -> int:
    """Write config, weights and tokenizer in a form that ``transformers`` loads."""
    import torch

    from equigrad.checkpoint.huggingface import exported_tensors, weight_dtypes, write_huggingface
    from equigrad.checkpoint.manifest import read_manifest
    from equigrad.commands.models import own_tokenizer

    if arguments.shard_mb < 1:
        raise UserError("--shard-mb must be at least 1")
    weights, folder = find_weights(arguments.model), Path(arguments.folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not an empty folder")
    if arguments.adapter:
        return _export_adapter(weights, folder, arguments.dtype or "float32")
    if weights.checkpoint is not None:
        stored = read_manifest(weights.checkpoint).meta.get("imported_dtypes", {})
    else:
        stored = weight_dtypes(weights.folder)
    dtypes = {name: arguments.dtype or stored.get(name, "float32") for name in stored_pieces(weights.model)}
    dtype = next(iter(dtypes.values()))
    tokenizer = own_tokenizer(weights) if weights.tokenizer and Path(weights.tokenizer).exists() else None
    bos, eos = (tokenizer.bos_id, tokenizer.eos_id) if tokenizer else (None, None)
    stop = sorted({tokenizer.eos_id} | tokenizer.turn_ends()) if tokenizer else []
    config = to_huggingface(weights.model, bos, eos, dtype)
    tensors = ((name, t.to(getattr(torch, dtypes[name]))) for name, t in exported_tensors(weights))
    write_huggingface(folder.resolve(), config, tensors, arguments.shard_mb << 20, stop)
    if tokenizer is not None:
        with writing(folder):
            tokenizer.save(folder)
    model = weights.model.model_copy(update={"mtp_layers": 0})
    print(f"{folder}: {parameter_count(model):,} parameters in {dtype}")
    if left := weights.model.mtp_layers:
        print(f"note: {left} modules for multi-token prediction are left out: {model.family} has no place for them")
    return 0
