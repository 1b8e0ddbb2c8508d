"""One SHA-256 for a set of named tensors, whatever the layout that holds them.

The definition is final; a digest computed today must be comparable for good:

- The value of a tensor is its global row-major bytes, little-endian, cut into leaves of 2^20 bytes (the last may be
  shorter; an empty tensor has no leaf).
- A tree over items is the Merkle tree of RFC 6962 with SHA-256: of no item, SHA256(""); a leaf is SHA256(00 || leaf);
  an inner node is SHA256(01 || left || right), the left child covering the largest power of two of items that is
  smaller than their number.
- A tensor's node is SHA256(02 || json || root): root, that of the tree over its leaves; json, the canonical JSON
  (RFC 8785) of {"dtype", "name", "shape"}, dtype being PyTorch's name, as in
  ``{"dtype":"bfloat16","name":"norm.weight","shape":[64]}``.
- The digest is the root, in hexadecimal, of the same tree whose leaf hashes are the tensors' nodes, in the order of
  their names' UTF-8 bytes.

Knows nothing of models: the caller chooses what is digested, and under which names.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from equigrad.checkpoint.boxes import Whole, claims, wholes
from equigrad.checkpoint.state import read_tensors
from equigrad.parallel.placement import Placed
from equigrad.parallel.ranks import gather, rank_and_size

LEAF_BYTES = 2**20


class Tree(NamedTuple):
    """The digest of a set of tensors, and the node of each of them by which a difference is found; hexadecimal.

    ``{"w": [[1, 2], [3, 4]]}`` in float32 is ``Tree(root="9e98...", nodes={"w": "9e98..."})``.
    """

    root: str
    nodes: dict[str, str]


def digest(tensors: Mapping[str, Placed], group: dist.ProcessGroup | None = None) -> str:
    """The root alone of ``tree``."""
    return tree(tensors, group).root


def tree(tensors: Mapping[str, Placed], group: dist.ProcessGroup | None = None) -> Tree:
    """The digest and its nodes, the same on every rank; a collective of ``group`` (default: all ranks).

    Rank r gathers and hashes the tensors r, r + n, ... of the n ranks' order, so ranks hash at the same time and none
    holds more than one whole tensor. Where ranks hold different copies, the lowest rank's counts.
    Raises: ValueError if the placements do not make up whole tensors.
    """
    rank, size = rank_and_size(group)
    whole = wholes(gather(claims(tensors), group))
    names, nodes = list(whole), {}
    with ThreadPoolExecutor() as pool:
        for first in range(0, len(names), size):
            block = names[first : first + size]
            tensor = _exchange({name: whole[name] for name in block}, tensors, rank, group)
            if tensor is not None:
                nodes[block[rank]] = _node(block[rank], tensor, pool)
    for others in gather(nodes, group):
        nodes.update(others)
    return _tree(nodes)


def tree_of_tensors(tensors: Mapping[str, Tensor]) -> Tree:
    """The digest of whole tensors that this process has. Equal to ``tree`` of the same, wherever their boxes are."""
    with ThreadPoolExecutor() as pool:
        return _tree({name: _node(name, tensor, pool) for name, tensor in tensors.items()})


def digest_files(path: Path, prefix: str = "model.") -> str:
    """The root alone of ``tree_of_files``."""
    return tree_of_files(path, prefix).root


def tree_of_files(path: Path, prefix: str = "model.") -> Tree:
    """The digest of a checkpoint's tensors under ``prefix`` (removed from their names), read one by one.

    Equal to ``tree`` of the tensors that were saved.
    Raises: UserError if the checkpoint is damaged.
    """
    with ThreadPoolExecutor() as pool:
        return _tree({name: _node(name, tensor, pool) for name, tensor in read_tensors(path, prefix)})


def _tree(nodes: Mapping[str, bytes]) -> Tree:
    names = sorted(nodes)
    return Tree(_root([nodes[name] for name in names]).hex(), {name: nodes[name].hex() for name in names})


def _exchange(
    block: Mapping[str, Whole], tensors: Mapping[str, Placed], rank: int, group: dist.ProcessGroup | None
) -> Tensor | None:
    """Sends this rank's boxes of the i-th tensor of ``block`` to rank i; returns the i-th tensor on rank i."""
    result, transfers, landings = None, [], []
    for hasher, (name, whole) in enumerate(block.items()):
        if hasher != rank:
            if rank in whole.boxes.values():
                sent = _bytes(tensors[name].tensor.contiguous())
                transfers.append(dist.P2POp(dist.isend, sent, group=group, group_peer=hasher))
            continue
        if list(whole.boxes.values()) == [rank]:
            result = tensors[name].tensor
            continue
        device = next((placed.tensor.device for placed in tensors.values()), torch.device("cpu"))
        result = torch.empty(whole.shape, dtype=getattr(torch, whole.dtype), device=device)
        for box, holder in whole.boxes.items():
            target = result[box.slices]
            if holder == rank:
                target.copy_(tensors[name].tensor)
                continue
            landing = target if target.is_contiguous() else torch.empty(box.shape, dtype=target.dtype, device=device)
            transfers.append(dist.P2POp(dist.irecv, _bytes(landing), group=group, group_peer=holder))
            landings.append((target, landing))
    for work in dist.batch_isend_irecv(transfers) if transfers else []:
        work.wait()
    for target, landing in landings:
        if landing is not target:
            target.copy_(landing)
    return result


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor as uint8 [n], without copying."""
    return tensor.reshape(-1).view(torch.uint8)


def _node(name: str, tensor: Tensor, pool: ThreadPoolExecutor) -> bytes:
    """The node of a whole tensor. The leaves are hashed in parallel: hashlib releases the interpreter's lock."""
    value = _bytes(tensor.detach().cpu().contiguous()).numpy().data

    def leaf(start: int) -> bytes:
        sha = hashlib.sha256(b"\x00")
        sha.update(value[start : start + LEAF_BYTES])
        return sha.digest()

    starts = range(0, len(value), LEAF_BYTES)
    root = _root(list(pool.map(leaf, starts) if len(starts) > 1 else map(leaf, starts)))
    what = {"dtype": str(tensor.dtype).removeprefix("torch."), "name": name, "shape": list(tensor.shape)}
    text = json.dumps(what, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(b"\x02" + text.encode() + root).digest()


def _root(nodes: Sequence[bytes]) -> bytes:
    """The root over leaf hashes. Pairing level by level, an odd one out rising, is the tree of RFC 6962."""
    while len(nodes) > 1:
        paired = [hashlib.sha256(b"\x01" + a + b).digest() for a, b in zip(nodes[::2], nodes[1::2], strict=False)]
        nodes = paired + list(nodes[len(paired) * 2 :])
    return nodes[0] if nodes else hashlib.sha256().digest()
