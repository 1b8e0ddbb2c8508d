"""Weights from and to Hugging Face folders: ``*.safetensors`` with or without an index, bit for bit.

Which stored tensor is which part of a parameter, the model's ``stored_pieces`` say. Knows nothing of how it computes.
"""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from equigrad.checkpoint.state import load, read_tensors
from equigrad.checkpoint.weights import Weights
from equigrad.config.lora import Lora
from equigrad.config.model import Model
from equigrad.errors import UserError
from equigrad.models.huggingface import Piece, Pieces, adapted_stacks, peft_name, stored_pieces
from equigrad.models.specs import ADAPTER_PARTS, is_adapter, parameter_specs
from equigrad.parallel.placement import Placed

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def load_weights(weights: Weights, parameters: Mapping[str, Placed]) -> None:
    """Fill the local parameters from a Hugging Face folder or from a checkpoint, whatever layout wrote it. What
    the weights do not have (adapters, modules for multi-token prediction) stays as it is.

    Raises ``UserError`` for damaged files and for names or shapes that are not the model's.
    """
    if weights.checkpoint is not None:
        wanted = parameters.keys() & parameter_specs(weights.model, weights.lora).keys()
        named = {f"model.{n}": parameters[n].renamed(f"model.{n}") for n in wanted}
        load(weights.checkpoint, named, only="model.")
        return
    files, pieces = weight_files(weights.folder), stored_pieces(weights.model)
    _check_names(weights.folder, set(files), set(pieces), weights.model)
    for path in sorted({files[name] for name in pieces}):
        with _opened(path) as file:
            for name, parts in sorted(pieces.items()):
                for turn, piece in enumerate(parts if files[name] == path else ()):
                    if piece.parameter in parameters:
                        stored = _Stored(file.get_slice(name), piece, turn, parts)
                        _fill(parameters[piece.parameter], stored, f"{path}: {name}")


def weight_files(folder: Path) -> dict[str, Path]:
    """Which file holds each tensor of a Hugging Face folder."""
    index = folder / _INDEX
    if index.exists():
        try:
            names = json.loads(index.read_text())["weight_map"]
            files = {name: folder / file for name, file in names.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{index}: not a valid index of weights: {error}") from None
        missing = sorted({path.name for path in files.values() if not path.exists()})
        if missing:
            raise UserError(f"{folder}: {', '.join(missing)} named in {_INDEX} is not there")
        return files
    single = folder / _SINGLE
    if not single.exists():
        raise UserError(f"{folder}: no {_SINGLE} and no {_INDEX}; other formats of weights are not read")
    with _opened(single) as file:
        return dict.fromkeys(file.keys(), single)


def weight_dtypes(folder: Path) -> dict[str, str]:
    """The type in which a Hugging Face folder holds each weight, for instance ``bfloat16``."""
    files, dtypes = weight_files(folder), {}
    for path in sorted(set(files.values())):
        with _opened(path) as file:
            for name in list(file.keys()):
                dtypes[name] = str(file.get_slice(name)[:1].dtype).removeprefix("torch.")
    return dtypes


def huggingface_tensors(folder: Path, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors, one by one, as they are stored."""
    files = weight_files(folder)
    for name in names:
        with _opened(files[name]) as file:
            yield name, file.get_tensor(name)


def exported_tensors(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a Hugging Face folder of the model, one by one, from any kind of source."""
    if weights.checkpoint is None:
        yield from huggingface_tensors(weights.folder, stored_pieces(weights.model))
    else:
        yield from as_stored(merged(read_tensors(weights.checkpoint), weights.lora), weights.model)


def as_stored(named: Iterable[tuple[str, Tensor]], model: Model) -> Iterator[tuple[str, Tensor]]:
    """Whole parameters as the tensors of a Hugging Face folder, each as soon as all of it is there."""
    pieces = stored_pieces(model)
    names: dict[str, list[str]] = {}
    for name, parts in pieces.items():
        for piece in parts:
            names.setdefault(piece.parameter, []).append(name)
    waiting: dict[str, dict[Piece, Tensor]] = {}
    for parameter, tensor in named:
        for name in names.get(parameter, []):  # modules for multi-token prediction have no place there
            found = waiting.setdefault(name, {})
            for piece in pieces[name]:
                if piece.parameter == parameter:
                    part = tensor if piece.index is None else tensor[piece.index]
                    found[piece] = part.mT if piece.transposed else part
            if len(found) == len(pieces[name]):
                yield name, _joined(pieces[name], found)
                del waiting[name]


def _joined(pieces: Pieces, found: Mapping[Piece, Tensor]) -> Tensor:
    """What is stored of these pieces."""
    parts = [found[piece] for piece in pieces]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if pieces[0].rows else torch.stack(parts, -1).flatten(-2)


def merged(named: Iterable[tuple[str, Tensor]], lora: Lora | None) -> Iterator[tuple[str, Tensor]]:
    """Parameters in name order, one by one, each weight with what its adapter adds to it."""
    pair: list[Tensor] = []
    for name, tensor in named:
        if lora is not None and is_adapter(name):
            pair.append(tensor)  # they come right before their weight
        elif lora is not None and pair and name.endswith(".weight"):
            a, b = pair
            pair = []
            yield name, tensor + (b @ a).mul_(lora.scale)
        else:
            yield name, tensor


def model_tensors(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """The whole parameters of any kind of source, one by one."""
    if weights.checkpoint is not None:
        yield from read_tensors(weights.checkpoint)
        return
    pieces = stored_pieces(weights.model)
    last = {piece.parameter: name for name, parts in pieces.items() for piece in parts}
    stacks: dict[str, list[Tensor]] = {}
    for name, tensor in huggingface_tensors(weights.folder, pieces):
        for turn, piece in enumerate(pieces[name]):
            part = tensor[slice(*piece.rows)] if piece.rows else tensor[..., turn :: len(pieces[name])]
            stacks.setdefault(piece.parameter, []).append(part.mT if piece.transposed else part)
            if last[piece.parameter] == name:
                stack = stacks.pop(piece.parameter)
                yield piece.parameter, stack[0].contiguous() if piece.index is None else torch.stack(stack)


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: damaged or not a safetensors file: {error}") from None


def _check_names(folder: Path, stored: set[str], ours: set[str], model: Model) -> None:
    # Old checkpoints carry rotary tables, and tied models sometimes a copy of the embedding: neither is a parameter.
    extra = {n for n in stored - ours if not n.endswith("rotary_emb.inv_freq")}
    extra -= {"lm_head.weight"} if model.tie_word_embeddings else set()
    if model.family == "qwen3_next":  # its modules for multi-token prediction are not ours, and `transformers` has none
        extra = {n for n in extra if not n.startswith("mtp.")}
    missing = ours - stored
    if missing or extra:
        some = {"missing": sorted(missing)[:5], "unexpected": sorted(extra)[:5]}
        text = "; ".join(f"{what}: {', '.join(names)}" for what, names in some.items() if names)
        raise UserError(f"{folder}: the weights do not fit its config.json ({text})")


@dataclass(frozen=True)
class _Stored:
    """The elements of a tensor in a file that are one of its ``pieces``, number ``turn`` of them: its rows, or each
    last index that is ``turn`` modulo their number, read transposed if the piece says so."""

    slices: Any
    piece: Piece
    turn: int
    pieces: Pieces

    def shape(self) -> tuple[int, ...]:
        """Of the piece, as the parameter has it."""
        shape, turns, end = tuple(self.slices.get_shape()), len(self.pieces), self.pieces[-1].rows
        if self.piece.rows and end:
            start, stop = self.piece.rows
            return (stop - start if shape[0] == end[1] else -1, *shape[1:])
        *rest, last = shape
        return self._turned((*rest, last // turns if last % turns == 0 else -1))

    def read(self, box: tuple[slice, ...]) -> Tensor:
        """A box of the piece."""
        if self.piece.rows:
            start, (rows, *rest) = self.piece.rows[0], box
            return self.slices[(slice(start + rows.start, start + rows.stop), *rest)]
        *rest, last = self._turned(box)
        turns = len(self.pieces)
        there = self.slices[(*rest, slice(last.start * turns, last.stop * turns))][..., self.turn :: turns]
        return there.mT if self.piece.transposed else there

    def _turned(self, dims: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*dims[:-2], dims[-1], dims[-2]) if self.piece.transposed else dims


def _fill(placed: Placed, stored: _Stored, where: str) -> None:
    """Copy what this rank holds of a stored piece, which is all of a parameter or one index of it."""
    at, index = placed.placement, stored.piece.index
    first = 0 if index is None else 1
    if stored.shape() != at.shape[first:]:
        needed = at.shape[first:]
        if end := stored.pieces[-1].rows:
            needed = (end[1], *needed[1:])
        raise UserError(f"{where} has shape {tuple(stored.slices.get_shape())}, of which the model needs {needed}")
    target, box = placed.tensor, tuple(slice(o, o + n) for o, n in zip(at.offset, at.local_shape, strict=True))
    if index is not None:
        if not box[0].start <= index < box[0].stop:
            return
        target = target[index - box[0].start]
    if target.numel():
        found = stored.read(box[first:])
        if found.dtype not in _FLOATS:
            raise UserError(f"{where} is stored as {str(found.dtype).removeprefix('torch.')}: no plain weights")
        target.copy_(found)


def write_huggingface(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, Tensor]],
    shard_bytes: int,
    stop_ids: Sequence[int] = (),
) -> None:
    """Write ``config.json`` and the weights as they are, in files of at most ``shard_bytes`` (one tensor at least).

    ``stop_ids`` end a generated text: they go into ``generation_config.json``.

    Everything is written beside the folder and moved into place at the end. ``UserError`` where that fails.
    """
    with _made_aside(folder) as aside:
        _write_shards(aside, tensors, shard_bytes)
        (aside / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        special = {"bos_token_id": config.get("bos_token_id"), "eos_token_id": list(stop_ids)}
        special = {k: v for k, v in special.items() if v not in (None, [])}
        (aside / "generation_config.json").write_text(json.dumps(special, indent=2) + "\n")


def peft_tensors(adapters: Mapping[str, Tensor], model: Model, lora: Lora) -> dict[str, Tensor]:
    """Adapters by our names -> as PEFT stores them, where its configuration is that of ``to_peft``."""
    rest, stored, stacks = dict(adapters), dict[str, Tensor](), adapted_stacks(model, lora)
    for name, weights in stacks.items():
        pairs = [w and [rest.pop(w.removesuffix("weight") + part) for part in ADAPTER_PARTS] for w in weights]
        experts, _, parameter = name.rpartition(".")
        # PEFT wraps the experts once for each parameter; the outer wrapper takes their name.
        wrapped = parameter == "gate_up_proj" and f"{experts}.down_proj" in stacks
        at = f"{experts}.base_layer" if wrapped else experts
        joined = _joined_adapters(pairs, in_turns=model.family == "gpt_oss")
        stored |= {f"{at}.{part}": tensor for part, tensor in zip(ADAPTER_PARTS, joined, strict=True)}
    return {peft_name(name): tensor for name, tensor in (rest | stored).items()}


def _joined_adapters(pairs: Sequence[Any], in_turns: bool) -> tuple[Tensor, Tensor]:
    """One adapter for stacked projections of the same input whose outputs are one, as PEFT stores it.

    pairs:    of each projection A [E, r, K] and B [E, N, r], or None
    in_turns: whether the outputs take turns; else they follow one another

    The joined B has a block for each projection, so that none reads another's rank. With R the ranks together, returns
    A as [E R, K], all of an expert next to each other, and B as [n N, R E], all of a rank next to each other.
    """
    present = [(index, *pair) for index, pair in enumerate(pairs) if pair]
    experts, rows, rank = present[0][2].shape
    blocks = present[0][2].new_zeros(experts, rows, len(pairs), len(present), rank)
    for block, (index, _, b) in enumerate(present):
        blocks[:, :, index, block] = b
    blocks = (blocks if in_turns else blocks.transpose(1, 2)).flatten(3).flatten(1, 2)
    return torch.cat([a for _, a, _ in present], 1).flatten(0, 1), blocks.permute(1, 2, 0).flatten(1)


def write_adapter(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write adapters as PEFT stores them: ``adapter_config.json`` and ``adapter_model.safetensors``."""
    with _made_aside(folder) as aside:
        file = aside / "adapter_model.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
        file.chmod(0o644)
        (aside / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


@contextmanager
def _made_aside(folder: Path) -> Iterator[Path]:
    """A folder to write into; what is in it at the end moves to ``folder``. ``UserError`` where that fails."""
    aside = folder.with_name(f".{folder.name}.tmp")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        yield aside
        folder.mkdir(parents=True, exist_ok=True)
        for file in aside.iterdir():
            file.replace(folder / file.name)
        aside.rmdir()
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise UserError(f"cannot write {folder}: {error}") from None


def _write_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> None:
    shard: dict[str, Tensor] = {}
    written: list[tuple[Path, list[str]]] = []
    size = total = 0

    def flush() -> None:
        nonlocal shard, size
        if shard:
            path = folder / f"part-{len(written):05d}"
            save_file(shard, path, metadata={"format": "pt"})
            path.chmod(0o644)  # as any other file; save_file makes it private
            written.append((path, sorted(shard)))
        shard, size = {}, 0

    for name, tensor in tensors:
        tensor = tensor.contiguous()
        if size + tensor.nbytes > shard_bytes:
            flush()
        shard[name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
    flush()
    if len(written) == 1:
        written[0][0].rename(folder / _SINGLE)
        return
    where: dict[str, str] = {}
    for number, (path, names) in enumerate(written, 1):
        final = f"model-{number:05d}-of-{len(written):05d}.safetensors"
        path.rename(folder / final)
        where |= dict.fromkeys(names, final)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
