"""Writes one rank's boxes as a safetensors file: in one pass, hashed on the way, without a copy of the values.

(The safetensors package makes the whole file in memory, or writes it without a hash and hides why a write failed.)
The header also says where the boxes lie, in the manner of torch.distributed.checkpoint's ``HuggingFaceStorageReader``,
so that PyTorch's own tools can read a checkpoint. Knows nothing of ranks or of the manifest.
"""

import hashlib
import json
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equigrad.checkpoint.boxes import Box
from equigrad.checkpoint.manifest import StoredFile

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What safetensors calls the types it can hold."""

CHUNK = 2**20
"""Bytes that are hashed and then written at a time, while they are in the processor's cache."""


def write_tensors(
    path: Path, boxes: Mapping[str, tuple[Box, torch.dtype]], value: Callable[[str], Tensor]
) -> StoredFile:
    """Writes the boxes by name and waits until they are on the disk; returns the file's size and hash.

    value: the tensor of a box, contiguous and in host memory; called once for each, when it is written
    Raises: OSError that names the file.
    """
    names = sorted(boxes, key=lambda name: (-boxes[name][1].itemsize, name))  # keeps values aligned to their size
    offsets = {name: {"saved_offsets": boxes[name][0].offset} for name in names}
    header: dict[str, Any] = {
        "__metadata__": {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
    }
    end = 0
    for name in names:
        box, dtype = boxes[name]
        start, end = end, end + dtype.itemsize * box.numel
        header[name] = {"dtype": CODES[dtype], "shape": box.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    sha = hashlib.sha256()
    try:
        with open(path, "wb") as file:

            def put(data: bytes | memoryview) -> None:
                sha.update(data)
                file.write(data)

            put(struct.pack("<Q", len(text)) + text)
            for name in names:
                data = value(name).reshape(-1).view(torch.uint8).numpy().data
                for start in range(0, len(data), CHUNK):
                    put(data[start : start + CHUNK])
            file.flush()
            os.fsync(file.fileno())
            return StoredFile(size=file.tell(), sha256=sha.hexdigest())
    except OSError as error:
        error.filename = str(path)  # write() does not say where
        raise
