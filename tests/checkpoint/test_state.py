import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp

from equigrad.checkpoint.folder import latest, list_checkpoints, temporary
from equigrad.checkpoint.manifest import read_manifest
from equigrad.checkpoint.state import Checkpointer, load, read_tensors
from equigrad.config.checkpoint import Checkpoint
from equigrad.errors import UserError
from equigrad.parallel.placement import Placed, Placement, place_all
from tests.checkpoint.layouts import LAYOUTS, layout, same_bits, values, zeros

META = {"cursor": [1, 2], "loss": 0.1, "name": "ü"}


def save(folder: Path, kind: str, step: int = 1, asynchronous: bool = True) -> None:
    saver = Checkpointer(folder, Checkpoint(asynchronous=asynchronous))
    rank = dist.get_rank() if dist.is_initialized() else 0
    saver.save(step, layout(kind, values()), META, {"rng": f"of rank {rank}"})
    saver.close()


def loaded_is_same(path: Path, kind: str) -> tuple[bool, dict, tuple]:
    tensors = layout(kind, zeros())
    manifest = load(path, tensors)
    return same_bits(tensors), manifest.meta, manifest.rank_meta


@pytest.mark.parametrize("kind", LAYOUTS)
def test_saved_on_two_ranks_is_read_bit_for_bit_on_one_and_in_every_layout_on_two(workers, tmp_path, kind):
    workers(2).run(save, tmp_path, kind)
    path = latest(tmp_path)
    expected = True, META, ({"rng": "of rank 0"}, {"rng": "of rank 1"})
    assert loaded_is_same(path, "plain") == expected
    for other in LAYOUTS:
        assert workers(2).run(loaded_is_same, path, other) == [expected] * 2


def test_saved_on_one_rank_is_read_on_two(workers, tmp_path):
    save(tmp_path, "plain", asynchronous=False)
    for kind in LAYOUTS:
        assert workers(2).run(loaded_is_same, latest(tmp_path), kind) == [(True, META, ({"rng": "of rank 0"},))] * 2


def test_every_element_is_written_once_and_nothing_is_a_pickle(workers, tmp_path):
    bytes_of_state = sum(tensor.nbytes for tensor in values().values())
    for kind in LAYOUTS:
        workers(2).run(save, tmp_path / kind, kind)
        files = list(latest(tmp_path / kind).iterdir())
        assert {file.suffix for file in files} <= {".safetensors", ".json"}
        assert not any(file.read_bytes().startswith((b"\x80", b"PK")) for file in files)
        headers = 10_000
        assert sum(file.stat().st_size for file in files) < bytes_of_state + 2 * headers


def test_files_are_plain_safetensors_that_torch_reads_too(workers, tmp_path):
    workers(2).run(save, tmp_path, "columns")
    tensors = {name: torch.zeros_like(t) for name, t in values().items() if t.numel()}
    dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(latest(tmp_path))))
    assert all(torch.equal(tensors[name], values()[name]) for name in tensors if name != "model.v")


def test_whole_tensors_are_read_without_ranks(workers, tmp_path):
    workers(2).run(save, tmp_path, "columns")
    names = []
    for name, tensor in read_tensors(latest(tmp_path)):
        names.append(name)
        assert torch.allclose(tensor, values()[f"model.{name}"], rtol=0, atol=0, equal_nan=True)
        assert tensor.dtype == values()[f"model.{name}"].dtype
    assert names == sorted(name.removeprefix("model.") for name in values())


def save_and_change(folder: Path) -> bool:
    saver = Checkpointer(folder, Checkpoint())
    tensors, meta = layout("fsdp", values()), {"seen": [1]}
    for step in (1, 2):
        saver.save(step, tensors, meta)
        for placed in tensors.values():
            placed.tensor.zero_()
        meta["seen"].append(2)
    saver.close()
    first, second = list_checkpoints(folder)
    assert read_manifest(first).meta == {"seen": [1]}
    before, after = layout("fsdp", zeros()), layout("fsdp", values())
    load(first, before)
    load(second, after)
    return same_bits(before) and not any(placed.tensor.any() for placed in after.values())


def test_what_changes_right_after_an_asynchronous_save_is_not_saved(workers, tmp_path):
    assert workers(2).run(save_and_change, tmp_path) == [True, True]


def test_staging_buffers_are_used_again(tmp_path):
    saver = Checkpointer(tmp_path, Checkpoint())
    saver.save(1, layout("plain", values()), {})
    first = {name: buffer.data_ptr() for name, buffer in saver._buffers.items()}
    saver.save(2, layout("plain", zeros()), {})
    assert {name: buffer.data_ptr() for name, buffer in saver._buffers.items()} == first
    assert "model.nothing" not in first
    saver.close()


class Interrupt(Exception):
    pass


def interrupt(*_: object) -> None:
    raise Interrupt


def test_an_interrupted_wait_does_not_let_the_next_save_into_the_buffers_that_are_being_written(tmp_path):
    saver, written = Checkpointer(tmp_path, Checkpoint()), threading.Event()
    saver._thread.submit(written.wait)
    saver.save(1, layout("plain", values()), {})
    before = signal.signal(signal.SIGUSR1, interrupt)
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    with pytest.raises(Interrupt):
        saver.wait()
    signal.signal(signal.SIGUSR1, before)
    threading.Timer(0.1, written.set).start()
    saver.save(2, layout("plain", zeros()), {})
    saver.close()
    assert loaded_is_same(list_checkpoints(tmp_path)[0], "plain")[0]


def test_what_is_not_json_is_refused_at_once(tmp_path):
    saver = Checkpointer(tmp_path, Checkpoint())
    with pytest.raises(TypeError, match="not JSON serializable"):
        saver.save(1, {}, {"x": object()})


def test_only_the_weights_can_be_loaded(tmp_path):
    saver = Checkpointer(tmp_path, Checkpoint(asynchronous=False))
    weight, moment = torch.ones(3), torch.full((3,), 2.0)
    saver.save(1, place_all([("model.w", weight), ("optim.exp_avg.w", moment)]), {})
    into = place_all([("model.w", torch.zeros(3)), ("optim.momentum.w", torch.zeros(3))])
    with pytest.raises(
        UserError, match=r"Missing from it: optim\.momentum\.w\. Not in this model: optim\.exp_avg\.w\."
    ):
        load(latest(tmp_path), into)
    load(latest(tmp_path), into, only="model.")
    assert into["model.w"].tensor.tolist() == [1, 1, 1]
    assert into["optim.momentum.w"].tensor.tolist() == [0, 0, 0]


def load_other_architecture(path: Path, differing: int) -> str:
    others = layout("rows", zeros())
    renamed = others.pop("model.w")
    others["model.extra"] = renamed
    if dist.get_rank() == differing:
        for name in ("model.b", "model.count"):
            part = others[name].tensor
            wrong = Placement(name, (9,), (0,), (len(part),))
            others[name] = Placed(wrong, part.double())
    with pytest.raises(UserError) as error:
        load(path, others)
    assert not any(placed.tensor.any() for placed in others.values())
    return str(error.value)


@pytest.mark.parametrize("differing", [0, 1])
def test_another_architecture_is_refused_with_names_on_every_rank(workers, tmp_path, differing):
    save(tmp_path, "plain")
    texts = workers(2).run(load_other_architecture, latest(tmp_path), differing)
    assert texts[0] == texts[1]
    assert "step-00000001 is a checkpoint of another architecture." in texts[0]
    assert "Missing from it: model.extra. Not in this model: model.w." in texts[0]
    assert "Different: model.b (float32 [1] in it, float64 [9] here), model.count (int64 [4] in it" in texts[0]


def test_layouts_that_lose_a_part_are_refused_when_saving(workers, tmp_path):
    assert workers(2).run(save_half, tmp_path) == ["refused"] * 2
    assert not list(tmp_path.iterdir())


def save_half(folder: Path) -> str:
    """Both ranks take their half for the whole left half, as DCP does with tensor-parallel shards under FSDP2."""
    saver = Checkpointer(folder, Checkpoint())
    saver.save(1, {"w": Placed(Placement("w", (4, 6), (0, 0), (4, 3)), torch.zeros(4, 3))}, {})
    with pytest.raises(RuntimeError, match=r"the boxes of w \[4, 6\] overlap or leave a gap"):
        saver.close()
    return "refused"


def damage(path: Path, what: str) -> str:
    """Damages the second file (or the manifest), returns the message that is to be expected."""
    file, manifest = path / "rank-00001.safetensors", path / "manifest.json"
    if what == "missing":
        file.unlink()
        return "rank-00001.safetensors is missing from the checkpoint"
    if what == "truncated":
        file.write_bytes(file.read_bytes()[:-1])
        return r"rank-00001.safetensors is damaged: it has \d+ bytes, \d+ were written"
    if what == "changed":
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        return r"rank 1: .*rank-00001.safetensors is damaged: its bytes are not those that were written"
    if what == "no manifest":
        manifest.unlink()
        return "step-00000001 is not a checkpoint: it has no manifest.json"
    if what == "truncated manifest":
        manifest.write_bytes(manifest.read_bytes()[:-10])
        return "manifest.json is damaged: not valid JSON"
    body = json.loads(manifest.read_text())
    if what == "changed manifest":
        body["meta"]["loss"] = 0.2
        manifest.write_text(json.dumps(body))
        return "manifest.json is damaged: it was changed after it had been written"
    if what == "newer format":
        manifest.write_text(json.dumps({"format": 2, "tensors": []}))
        return "manifest.json has format 2, of a newer equigrad; this one reads formats up to 1"
    manifest.write_text("[]")
    return "manifest.json is not the manifest of a checkpoint: it has no format version"


def load_damaged(path: Path, message: str) -> str:
    with pytest.raises(UserError, match=message) as error:
        load(path, layout("rows", zeros()))
    return str(error.value)


@pytest.mark.parametrize(
    "what",
    [
        "missing",
        "truncated",
        "changed",
        "no manifest",
        "truncated manifest",
        "changed manifest",
        "newer format",
        "other JSON",
    ],
)
def test_damage_is_named_on_every_rank(workers, tmp_path, what):
    workers(2).run(save, tmp_path, "rows")
    path = latest(tmp_path)
    texts = workers(2).run(load_damaged, path, damage(path, what))
    assert texts[0] == texts[1]
    if what in ("missing", "truncated"):
        with pytest.raises(UserError, match=what if what == "missing" else "damaged"):
            list(read_tensors(path))


def fail_to_save(folder: Path, asynchronous: bool) -> list[str]:
    """The second save of rank 1 goes to a device that is always full; the third is given up for it."""
    saver = Checkpointer(folder, Checkpoint(asynchronous=asynchronous))
    tensors = layout("rows", values())
    saver.save(1, tensors, {})
    saver.wait()
    if dist.get_rank() == 1:
        path = temporary(folder, 2, saver._run)
        path.mkdir(exist_ok=True)
        (path / "rank-00001.safetensors").symlink_to("/dev/full")
    if asynchronous:
        saver.save(2, tensors, {})
    with pytest.raises(UserError) as error:
        saver.save(3 if asynchronous else 2, tensors, {})
    saver.save(4, tensors, {})
    saver.close()
    return [str(error.value), *(path.name for path in sorted(folder.iterdir()))]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_full_disk_is_told_on_every_rank_and_spares_the_last_checkpoint(workers, tmp_path, asynchronous):
    for text, *names in workers(2).run(fail_to_save, tmp_path, asynchronous):
        assert "the checkpoint of step 2 could not be saved; earlier ones are intact." in text
        assert "rank 1: [Errno 28] No space left on device: " in text
        assert "rank-00001.safetensors" in text
        assert names == ["step-00000001", "step-00000004"]
    assert loaded_is_same(latest(tmp_path), "plain")[0]


def make_unwritable(folder: Path) -> str:
    with pytest.raises(UserError, match=r"checkpoints cannot be written to .*file/checkpoints: Not a directory"):
        Checkpointer(folder, Checkpoint())
    return "refused"


def test_a_folder_that_cannot_be_written_is_refused_before_training_on_every_rank(workers, tmp_path):
    (tmp_path / "file").write_text("")
    assert workers(2).run(make_unwritable, tmp_path / "file" / "checkpoints") == ["refused"] * 2


def test_only_the_checkpoints_asked_for_are_kept(tmp_path):
    saver = Checkpointer(tmp_path, Checkpoint(keep_last=2, keep_every=4))
    for step in range(1, 11):
        saver.save(step, layout("plain", {"w": torch.ones(1)}), {"step": step})
    saver.close()
    assert [path.name for path in list_checkpoints(tmp_path)] == [f"step-{step:08d}" for step in (4, 8, 9, 10)]


def test_a_step_saved_again_replaces_the_first(tmp_path):
    saver = Checkpointer(tmp_path, Checkpoint(keep_last=1))
    for value in (1.0, 2.0):
        saver.save(5, place_all([("model.w", torch.tensor(value))]), {"value": value})
    saver.close()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]
    assert dict(read_tensors(latest(tmp_path)))["w"] == 2
    assert read_manifest(latest(tmp_path)).meta == {"value": 2.0}


def test_what_takes_a_second_to_import_is_not_imported_before_it_is_needed():
    program = """
import sys
import equigrad.checkpoint.digest, equigrad.checkpoint.rng, equigrad.checkpoint.state
assert not {"torch.distributed.checkpoint", "torch.distributed.tensor"} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", program], check=True)
