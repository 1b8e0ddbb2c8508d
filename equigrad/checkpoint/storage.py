"""How boxes get into files and out again, by torch.distributed.checkpoint (DCP).

DCP moves the plans and the errors between ranks, and works out which stored boxes a box overlaps. What there is to
write and to read comes from placements alone, never from what DCP infers of a DTensor; and its default storage, which
is a pickle, is not used. Knows nothing of steps and folders. Importing it takes about a second: do so when needed.
"""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint._hf_utils import _HFStorageInfo
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from equigrad.checkpoint.boxes import Box, Whole, claims, wholes
from equigrad.checkpoint.manifest import Manifest, StoredBox, StoredFile, StoredTensor
from equigrad.checkpoint.tensorfile import write_tensors
from equigrad.errors import UserError
from equigrad.parallel.placement import Placed
from equigrad.parallel.ranks import rank_and_size

Finish = Callable[[dict[str, StoredFile], dict[str, StoredTensor], list[dict[str, Any]]], None]
"""Called on the first rank when all files are written: the files, the tensors in them, every rank's meta."""


def write(
    path: Path,
    tensors: Mapping[str, Placed],
    rank_meta: dict[str, Any],
    finish: Finish,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Writes the boxes of all ranks into ``path``, each once, then calls ``finish``; a collective of ``group``.

    Raises, on every rank: UserError if a file could not be written; RuntimeError, with the traceback of the rank that
    failed, for any other reason.
    """
    writer = _Writer(path, rank_and_size(group)[0], finish)
    _run(dcp.save, storage_writer=writer, planner=_SavePlanner(tensors, rank_meta), process_group=group)


def read(path: Path, manifest: Manifest, tensors: Mapping[str, Placed], group: dist.ProcessGroup | None = None) -> None:
    """Reads this rank's boxes from ``path`` into its tensors; a collective of ``group``. Raises like ``write``."""
    _run(dcp.load, storage_reader=_Reader(path, manifest), planner=_LoadPlanner(tensors), process_group=group)


def _run(action: Callable[..., Any], **arguments: Any) -> None:
    """``dcp.save`` or ``dcp.load`` of an empty state dict, for the planners hold the tensors; with errors explained."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is one process
    try:
        action({}, **arguments)
    except CheckpointException as failure:
        errors = {rank: error for rank, (error, _) in failure.failures.items()}
        if all(isinstance(error, UserError | OSError) for error in errors.values()):
            text = "; ".join(f"rank {rank}: {error}" for rank, error in errors.items())
            raise UserError(text) from failure
        raise RuntimeError(str(failure)) from failure


class _SavePlanner(dcp.DefaultSavePlanner):
    """Each rank writes the boxes it claims; where several claim one, the first does."""

    def __init__(self, tensors: Mapping[str, Placed], rank_meta: dict[str, Any]) -> None:
        super().__init__()
        self._tensors, self._rank_meta = tensors, rank_meta

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        claimed = claims(self._tensors)
        items = []
        for name, (_, shape, box) in claimed.items():
            if box is not None:
                properties = TensorProperties(self._tensors[name].tensor.dtype)
                data = TensorWriteData(_chunk(box), properties, torch.Size(shape))
                items.append(WriteItem(MetadataIndex(name, box.offset), WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items, planner_data=(claimed, self._rank_meta))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        claimed, rank_meta = zip(*(plan.planner_data for plan in all_plans), strict=True)
        whole = wholes(claimed)
        owned = [
            SavePlan([item for item in plan.items if whole[item.index.fqn].boxes[_box(item)] == rank])
            for rank, plan in enumerate(all_plans)
        ]
        return owned, Metadata(state_dict_metadata={}, planner_data=(whole, list(rank_meta)))

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._tensors[write_item.index.fqn].tensor.detach().cpu().contiguous()


class _Writer(StorageWriter):
    """Each rank writes one file."""

    def __init__(self, path: Path, rank: int, finish: Finish) -> None:
        self._path, self._rank, self._finish = path, rank, finish

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self._path.mkdir(exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        items = {item.index.fqn: item for item in plan.items}
        boxes = {name: (_box(item), _dtype(item)) for name, item in items.items()}
        done: Future[list[WriteResult]] = Future()
        if items:
            file = self._path / _file_name(self._rank)
            stored = write_tensors(file, boxes, lambda name: cast(Tensor, planner.resolve_data(items[name])))
            done.set_result([WriteResult(MetadataIndex(file.name), stored.size, stored)])  # what else, the plans say
        else:
            done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        whole, rank_meta = metadata.planner_data
        metadata.planner_data = None  # DCP goes on to send the metadata to every rank, which has no use for it
        files = {result.index.fqn: result.storage_data for written in results for result in written}
        for name, stored in files.items():
            if not (self._path / name).is_file() or (self._path / name).stat().st_size != stored.size:
                raise UserError(f"{name} of another rank is not in {self._path}: the ranks do not share this folder")
        self._finish(files, {name: _stored(tensor) for name, tensor in whole.items()}, rank_meta)


class _LoadPlanner(dcp.DefaultLoadPlanner):
    """Each rank reads, for every local box, what it shares with the boxes in the files."""

    def __init__(self, tensors: Mapping[str, Placed]) -> None:
        super().__init__()
        self._tensors = tensors

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, placed in self._tensors.items():
            place = placed.placement
            if place.numel:
                stored = cast(TensorStorageMetadata, self.metadata.state_dict_metadata[name])
                box = _chunk(Box(place.offset, place.local_shape))
                items += create_read_items_for_chunk_list(name, stored, [box])
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        local = self._tensors[read_item.dest_index.fqn].tensor
        return local[Box(tuple(read_item.dest_offsets), tuple(read_item.lengths)).slices]


class _Reader(dcp.HuggingFaceStorageReader):
    """Reads slices of safetensors files; which file holds which box it knows from the manifest, without opening all."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        super().__init__(str(path))
        self._folder, self._manifest = path, manifest

    def read_metadata(self) -> Metadata:
        metadata = Metadata(state_dict_metadata={}, storage_data={})
        for name, stored in self._manifest.tensors.items():
            dtype, chunks = getattr(torch, stored.dtype), []
            for box in stored.boxes:
                chunk = _chunk(Box(box.offset, box.shape))
                chunks.append(chunk)
                info = _HFStorageInfo(str(self._folder / box.file), chunk.sizes, dtype)
                metadata.storage_data[MetadataIndex(name, box.offset)] = info
            whole = TensorStorageMetadata(TensorProperties(dtype), torch.Size(stored.shape), chunks)
            metadata.state_dict_metadata[name] = whole
        return metadata


def _file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _stored(tensor: Whole) -> StoredTensor:
    boxes = (StoredBox(file=_file_name(rank), **box._asdict()) for box, rank in tensor.boxes.items())
    return StoredTensor(dtype=tensor.dtype, shape=tensor.shape, boxes=tuple(boxes))


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))


def _box(item: WriteItem) -> Box:
    assert item.tensor_data is not None
    return Box(tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes))


def _dtype(item: WriteItem) -> torch.dtype:
    assert item.tensor_data is not None
    return item.tensor_data.properties.dtype
