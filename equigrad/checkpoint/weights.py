"""Where weights lie. Torch-free."""

from dataclasses import dataclass
from pathlib import Path

from equigrad.config.lora import Lora
from equigrad.config.model import Model


@dataclass(frozen=True)
class Weights:
    """Where weights come from: a Hugging Face folder, or a checkpoint of a run of ours, maybe with adapters."""

    folder: Path
    model: Model
    tokenizer: Path | None
    checkpoint: Path | None
    lora: Lora | None = None
