"""Weights on their way from the ranks that train, however they are divided, to whoever samples with them.

There is one way: tensor by tensor, whole, in name order, under the names that checkpoints use. What an engine makes of
them (its own layout, its own type) is its affair. To an engine elsewhere they go through files: a Hugging Face folder
for each version, in the types of the trainer, which any server can read; its marker is written last.
"""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from equigrad.checkpoint.boxes import claims, wholes
from equigrad.checkpoint.digest import tree
from equigrad.checkpoint.huggingface import as_stored, merged, model_tensors, write_huggingface
from equigrad.checkpoint.weights import Weights as Source
from equigrad.config.lora import Lora
from equigrad.config.model import Model
from equigrad.errors import UserError
from equigrad.files import write_json
from equigrad.models.huggingface import to_huggingface
from equigrad.parallel.placement import Placed
from equigrad.parallel.ranks import gather, rank_and_size

_MARKER = "version.json"
_SHARD = 5 << 30
"""Bytes of a file."""


class Weights:
    """The parameters of a model whose boxes are on the ranks of a group (default: all ranks)."""

    def __init__(self, parameters: Mapping[str, Placed], group: dist.ProcessGroup | None = None) -> None:
        """A collective. Whoever changes the parameters in place need not tell."""
        self._parameters, self._group = parameters, group
        self._rank, self._size = rank_and_size(group)
        self._wholes = wholes(gather(claims(parameters), group))

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Names and whole tensors, on every rank; a collective, to be gone through to the end. A tensor that is whole
        here is no copy."""
        device = next((placed.tensor.device for placed in self._parameters.values()), torch.device("cpu"))
        for name, whole in self._wholes.items():
            if self._size == 1:
                yield name, self._parameters[name].tensor
                continue
            found = torch.empty(whole.shape, dtype=getattr(torch, whole.dtype), device=device)
            for box, holder in whole.boxes.items():
                target = found[box.slices]
                if holder == self._rank:
                    target.copy_(self._parameters[name].tensor)
                sent = target if target.is_contiguous() else target.contiguous()
                dist.broadcast(sent, group=self._group, group_src=holder)
                if sent is not target and holder != self._rank:
                    target.copy_(sent)
            yield name, found

    def digests(self) -> dict[str, str]:
        """SHA-256 of each tensor, the same on every rank; a collective. ``tree_of_tensors`` says the same of what has
        arrived whole."""
        return tree(self._parameters, self._group).nodes


def write_weights(
    folder: Path, weights: Iterable[tuple[str, Tensor]], model: Model, lora: Lora | None, version: int
) -> Path:
    """Write the weights of a version below ``folder``, adapters as a part of what they adapt; where they are. Versions
    before the last one are taken away. ``UserError`` where that fails."""
    target = folder / f"version-{version:08d}"
    shutil.rmtree(target, ignore_errors=True)
    stored = as_stored(merged(weights, lora), model)
    first = next(stored)
    config = to_huggingface(model, None, None, str(first[1].dtype).removeprefix("torch."))
    write_huggingface(target, config, chain([first], stored), _SHARD)
    write_json(target / _MARKER, {"version": version})
    for old in folder.glob("version-*"):  # higher ones are of a run that was longer, or another
        if old.name not in (target.name, f"version-{version - 1:08d}"):
            shutil.rmtree(old, ignore_errors=True)
    return target


def read_weights(folder: Path, model: Model, version: int) -> Iterator[tuple[str, Tensor]]:
    """The whole parameters of a version, one by one. ``UserError`` at once where they are of another, or unfinished."""
    try:
        found = json.loads((folder / _MARKER).read_text(encoding="utf-8"))["version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder} holds no finished weights: {_MARKER}: {error}") from None
    if found != version:
        raise UserError(f"{folder} holds the weights of version {found}, not {version}")
    return model_tensors(Source(folder, model, None, None))
