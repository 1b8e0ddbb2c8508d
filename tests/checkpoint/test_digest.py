import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from equigrad.checkpoint.digest import digest, digest_files
from equigrad.checkpoint.folder import latest
from equigrad.checkpoint.state import Checkpointer
from equigrad.config.checkpoint import Checkpoint
from equigrad.parallel.placement import place_all
from tests.checkpoint.layouts import LAYOUTS, layout, values

CASES = {
    "nothing": {},
    "one": {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]])},
    "several": {
        "a.weight": torch.arange(300_000),  # two whole leaves and a part
        "a.bias": torch.arange(131_072, dtype=torch.float64),  # exactly one leaf
        "Z": torch.tensor([1.5, -0.0, 3e38]).bfloat16(),
        'é\n"\\': torch.tensor(True),
        "empty": torch.empty(0, 3, dtype=torch.float16),
    },
}
GOLDEN = {
    "nothing": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "one": "9e984cef3789a33408090460031685387ecae2f9292f422408b30bbbf88a96f5",
    "several": "d1335e0ade1797a37920e4f532abc7cbdad434587df4e84c802d16b5490bd54b",
}
"""Never to be changed: digests are compared with those of runs long gone."""


def reference(arrays: dict[str, np.ndarray], dtypes: dict[str, str] | None = None) -> str:
    """The definition in digest.py, written down again, recursively, from RFC 6962."""

    def sha(*parts: bytes) -> bytes:
        return hashlib.sha256(b"".join(parts)).digest()

    def tree(leaves: list[bytes]) -> bytes:
        if not leaves:
            return sha()
        if len(leaves) == 1:
            return leaves[0]
        half = 1 << (len(leaves) - 1).bit_length() - 1
        return sha(b"\1", tree(leaves[:half]), tree(leaves[half:]))

    def node(name: str) -> bytes:
        data, dtype = arrays[name].tobytes(), (dtypes or {}).get(name, str(arrays[name].dtype))
        shape = ",".join(map(str, arrays[name].shape))
        text = f'{{"dtype":"{dtype}","name":{json.dumps(name, ensure_ascii=False)},"shape":[{shape}]}}'
        return sha(b"\2", text.encode(), tree([sha(b"\0", data[i : i + 2**20]) for i in range(0, len(data), 2**20)]))

    return tree([node(name) for name in sorted(arrays, key=str.encode)]).hex()


def numpy(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """NumPy has no bfloat16: its bytes as int16, and the name apart."""
    half = {name: "bfloat16" for name, tensor in tensors.items() if tensor.dtype == torch.bfloat16}
    return {name: (t.view(torch.int16) if name in half else t).numpy() for name, t in tensors.items()}, half


@pytest.mark.parametrize("case", CASES)
def test_digest_is_final_and_as_defined(case):
    found = digest(place_all(CASES[case].items()))
    assert found == reference(*numpy(CASES[case])) == GOLDEN[case]


def test_digest_sees_names_shapes_types_signs_and_every_byte():
    whole = torch.arange(6, dtype=torch.int32).reshape(2, 3)
    other = [
        {"x": whole},
        {"w": whole.reshape(3, 2)},
        {"w": whole.view(torch.float32)},
        {"w": whole + torch.eye(2, 3, dtype=torch.int32)},
        {"w": whole, "v": whole},
        {"w": torch.tensor([0.0])},
        {"w": torch.tensor([-0.0])},
    ]
    digests = [digest(place_all(tensors.items())) for tensors in [{"w": whole}, *other]]
    assert len(set(digests)) == len(digests)


def test_digest_does_not_see_strides():
    whole = torch.arange(12.0).reshape(3, 4)
    assert digest(place_all([("w", whole)])) == digest(place_all([("w", whole.t().contiguous().t())]))


def digests_of_layouts() -> dict[str, str]:
    return {kind: digest(layout(kind, values())) for kind in LAYOUTS}


def test_digest_is_the_same_in_every_layout(workers):
    expected = reference(*numpy(values()))
    assert workers(2).run(digests_of_layouts) == [dict.fromkeys(LAYOUTS, expected)] * 2


def contradicting_digest() -> str:
    rank = torch.distributed.get_rank()
    with pytest.raises(ValueError, match="w is"):
        digest(place_all([("w", torch.zeros(2 + rank))]))
    return "refused"


def test_ranks_that_disagree_are_refused_on_all_ranks(workers):
    assert workers(2).run(contradicting_digest) == ["refused"] * 2


def save(folder: Path, kind: str) -> None:
    saver = Checkpointer(folder, Checkpoint())
    optim = {"optim.exp_avg.w": torch.ones(3)}
    saver.save(1, layout(kind, values()) | place_all(optim.items()), {})
    saver.close()


@pytest.mark.parametrize("kind", ["fsdp", "columns"])
def test_digest_of_files_is_the_digest_of_the_model_that_was_saved(workers, tmp_path, kind):
    workers(2).run(save, tmp_path, kind)
    bare = {name.removeprefix("model."): tensor for name, tensor in values().items()}
    assert digest_files(latest(tmp_path)) == digest(place_all(bare.items()))
