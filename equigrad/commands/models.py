"""What eval, generate, import, export and info share: a model opened from any kind of folder."""

from pathlib import Path

from equigrad.build import build_parts
from equigrad.checkpoint.huggingface import load_weights
from equigrad.checkpoint.weights import Weights
from equigrad.config import Job
from equigrad.config.data import Data
from equigrad.config.model import Model
from equigrad.data.tokenizers import Tokenizer, read_tokenizer
from equigrad.errors import UserError
from equigrad.models.decoder import Decoder
from equigrad.parallel.world import World
from equigrad.run import Run


def own_job(weights: Weights) -> Job:
    """The job of the run that a checkpoint belongs to; for other models a job with its shape and nothing else."""
    if weights.checkpoint is not None:
        return Run(weights.checkpoint.parent.parent).job()
    return Job(name="model", model=weights.model, data=data_within(weights.model))


def data_within(model: Model) -> Data:
    """Default data settings, with a context that the model allows."""
    return Data(context=min(512, model.max_position_embeddings))


def own_tokenizer(weights: Weights) -> Tokenizer:
    """The tokenizer beside a model. ``UserError`` where there is none."""
    if weights.tokenizer is None or not Path(weights.tokenizer).exists():
        raise UserError(f"{weights.folder} has no tokenizer.json")
    return read_tokenizer(weights.tokenizer)


def open_parts(weights: Weights, job: Job, world: World) -> dict[int, Decoder]:
    """Build this rank's parts of the model of ``job`` and fill them."""
    parts = build_parts(job, world)
    load_weights(weights, {name: placed for part in parts.values() for name, placed in part.placed().items()})
    return parts
