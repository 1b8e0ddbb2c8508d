"""From the job as written to the job as run: everything that depends on a tokenizer or on given weights is filled in.

Torch-free, so that ``--dry-run`` answers at once.
"""

from pathlib import Path

from equigrad.checkpoint.weights import Weights
from equigrad.config import Job
from equigrad.config.fit import misfits
from equigrad.config.model import Experts
from equigrad.data.tokenizers import Tokenizer
from equigrad.errors import UserError
from equigrad.models.huggingface import read_config
from equigrad.models.specs import parameter_specs
from equigrad.run import Run


def find_weights(path: str | Path) -> Weights:
    """What lies at ``path``: a Hugging Face folder, a run (its latest checkpoint) or one checkpoint of a run."""
    from equigrad.checkpoint.folder import latest

    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"no folder at {folder}: expected a Hugging Face model, a run or a checkpoint")
    if (folder / "config.json").exists():
        tokenizer = folder if (folder / "tokenizer.json").exists() else None
        return Weights(folder, read_config(folder), tokenizer, None)
    run, checkpoint = Run(folder), None
    if run.exists():
        checkpoint = latest(folder / "checkpoints")
        if checkpoint is None:
            raise UserError(f"{folder} is a run without a checkpoint yet")
    elif (folder / "manifest.json").exists():
        checkpoint = folder.resolve()  # `.` and links have no parents to go by
        run = Run(checkpoint.parent.parent)
    else:
        adapters = (folder / "adapter_config.json").exists()
        raise UserError(
            f"{folder} has neither config.json (a model), job.toml (a run) nor manifest.json (a checkpoint)"
            + ("; adapters alone are not read: name the run that trained them" if adapters else "")
        )
    job = run.job()
    model = job.model.model_copy(update={"weights": None})
    return Weights(folder, model, run.tokenizer, checkpoint, job.lora)


def resolve_weights(job: Job) -> Job:
    """Fill the model's shape, and the tokenizer unless one is given, from ``model.weights``."""
    if job.model.weights is None:
        check_adapters(job)
        return job
    found = find_weights(job.model.weights)
    if found.lora is not None and found.lora != job.lora:
        raise UserError(
            f"{found.folder} holds adapters, and the job has others or none: give it the same [lora] to go on with"
            f" them, or start from what `equigrad export '{found.folder}' FOLDER` makes of them and their model"
        )
    explicit = job.model.model_fields_set - {"weights"}
    experts = _given_experts(job.model.experts, found) if "experts" in explicit else found.model.experts
    free = {"mtp_loss_coef"} | ({"mtp_layers"} if found.model.mtp_layers == 0 else set())  # new modules may be added
    for key in sorted(explicit - {"experts"} - free):
        _check_same(key, getattr(job.model, key), getattr(found.model, key), found)
    chosen = {key: getattr(job.model, key) for key in explicit & free}
    model = found.model.model_copy(update={"weights": job.model.weights, "experts": experts} | chosen)
    data = job.data
    if "tokenizer" not in data.model_fields_set:
        if found.tokenizer is None:
            raise UserError(f"{found.folder} has no tokenizer.json; name the model's tokenizer in data.tokenizer")
        tokenizer = data.tokenizer.model_copy(update={"kind": "file", "path": str(found.tokenizer)})
        data = data.model_copy(update={"tokenizer": tokenizer})
    job = job.model_copy(update={"model": model, "data": data})
    check_context(job, found)
    check_layout(job)
    check_adapters(job)
    return job


def check_adapters(job: Job) -> None:
    """``UserError`` for targets of adapters that the model does not have."""
    if job.lora is not None:
        # Which layers there are does not depend on the vocabulary, which may not be known yet.
        parameter_specs(job.model.model_copy(update={"vocab_size": job.model.vocab_size or 2}), job.lora)


def _given_experts(ours: Experts | None, found: Weights) -> Experts | None:
    """The experts of the given model, balanced as the job says: that is a matter of training and not of shape."""
    theirs, coefficient = found.model.experts, "router_aux_loss_coef"
    if ours is None or theirs is None:
        _check_same("experts", ours, theirs, found)
        return theirs
    for key in sorted(ours.model_fields_set - {coefficient}):
        _check_same(f"experts.{key}", getattr(ours, key), getattr(theirs, key), found)
    given = coefficient in ours.model_fields_set
    return theirs.model_copy(update={coefficient: ours.router_aux_loss_coef}) if given else theirs


def _check_same(key: str, ours: object, theirs: object, found: Weights) -> None:
    if ours != theirs:
        raise UserError(f"model.{key} is {ours}, but {found.folder} has {theirs}; leave it out to take it from there")


def check_layout(job: Job) -> None:
    """``UserError`` where the layout does not suit the model, whose shape is known by now."""
    if problems := list(misfits(job.layout, job.model)):
        raise UserError("\n".join(problems))


def check_context(job: Job, weights: Weights) -> None:
    """``UserError`` where samples of the job are longer than the given model allows."""
    limit = weights.model.max_position_embeddings
    if job.data.context > limit:
        raise UserError(
            f"data.context {job.data.context} is longer than the model in {weights.folder} allows:"
            f" max_position_embeddings is {limit}"
        )


def resolve_vocabulary(job: Job, tokenizer: Tokenizer) -> Job:
    """Take the vocabulary from the tokenizer, or check that the model's holds it."""
    size = job.model.vocab_size
    if size is None:
        return job.model_copy(update={"model": job.model.model_copy(update={"vocab_size": tokenizer.vocab_size})})
    if tokenizer.vocab_size > size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but model.vocab_size is {size}:"
            " the model lacks embeddings for some of them; use the model's own tokenizer or raise model.vocab_size"
        )
    return job
