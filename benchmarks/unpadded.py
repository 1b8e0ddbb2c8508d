"""What padding costs: the same real rows under equigrad and under a padded twin, two data lanes of two context ranks.

The twin does what trainers do that pad: it pads each row until the context-parallel degree divides it, and gives an
idle lane a copy of a real row, with a loss of zero. Model, kernels, exchanges and processes are the same, and the two
take turns. Four processes with one thread each; a third part prepares one row of 7,173 tokens for four workers.

    python benchmarks/unpadded.py
"""

import os
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import arguments, interleaved, pin_threads, ratio, show, spread, world_of, write

OPTIONS = arguments("unpadded", __doc__ or "", rounds=8)
pin_threads(1)

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402

from equigrad.build import build_model  # noqa: E402
from equigrad.config.load import make_job  # noqa: E402
from equigrad.data.microbatch import MicroBatch, micro_batch  # noqa: E402
from equigrad.data.samples import Sample  # noqa: E402
from equigrad.models.specs import flops_per_token  # noqa: E402
from equigrad.parallel.partition import Partition  # noqa: E402
from equigrad.rows import to_tensors  # noqa: E402

LANES, CONTEXT_RANKS = 2, 2
CASES = {"one lane idle": [[1501], []], "both lanes busy": [[901, 600], [1499]]}
ROW, WORKERS = 7173, 4
Lanes = list[list[Sample]]


def sample(length: int, loss: bool = True) -> Sample:
    ids = np.random.default_rng(length).integers(0, 1000, length + 1)
    return Sample({"ids": ids[:-1], "labels": ids[1:], "loss": np.full(length, loss)})


def padded(row: list[Sample], multiple: int) -> list[Sample]:
    """The row with pad tokens behind it, as one more segment that is not in the loss."""
    missing = -sum(map(len, row)) % multiple
    return [*row, sample(missing, loss=False)] if missing else row


class Meter:
    """Bytes that this rank hands to each collective."""

    NAMES = ("all_to_all_single", "all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "all_reduce",
             "batch_isend_irecv")  # fmt: skip

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}
        for name in self.NAMES:
            setattr(dist, name, self._counted(name, getattr(dist, name)))

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if name == "batch_isend_irecv":
                sent = [op.tensor for op in args[0] if op.op is dist.isend]
            else:
                sent = [args[0 if name == "all_reduce" else 1]]
            self.bytes[name] = self.bytes.get(name, 0) + sum(t.numel() * t.element_size() for t in sent)
            return function(*args, **kwargs)

        return run


def peak_memory() -> float:
    """MB, the most since ``reset_peak``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) / 1024


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def rank_main(rank: int, store: str, out: str) -> None:
    torch.set_num_threads(1)
    size = LANES * CONTEXT_RANKS
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    job = make_job(
        {
            "model": {"family": "qwen2", "attention_bias": True, "vocab_size": 4096, "hidden_size": 256,
                      "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4},
            "layout": {"dp_shard": LANES, "cp": CONTEXT_RANKS, "threads": 1},
        },
        "benchmark",
    )  # fmt: skip
    world = world_of(job, rank)
    model, meter = build_model(job, world), Meter()
    model.initialize(0)

    def run(lanes: Lanes, weights: Sequence[float]) -> dict[str, Any]:
        """Forward and backward of one round; what this rank measured."""
        row = lanes[world.lane]
        partition = Partition.of_row(sum(map(len, row)), CONTEXT_RANKS, job.layout.zigzag)
        part = micro_batch(row, partition, world.axis("cp").rank)
        normaliser = sum(int(s.loss.sum()) for lane, w in zip(lanes, weights, strict=True) if w for s in lane)
        dist.barrier()
        meter.bytes = {}
        reset_peak()
        used, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        tensors = to_tensors(part, world)
        losses = model(tensors.ids, tensors.row, tensors.labels, tensors.at)
        (losses.sum() * (weights[world.lane] / normaliser)).backward()
        now = resource.getrusage(resource.RUSAGE_SELF)
        dist.barrier()
        seconds = time.perf_counter() - began
        memory, sent = peak_memory(), dict(meter.bytes)
        model.zero_grad(set_to_none=True)
        cpu = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
        return {"seconds": seconds, "cpu": cpu, "memory": memory, "bytes": sent, "tokens": len(tensors.ids)}

    results: dict[str, Any] = {}
    for case, lengths in CASES.items():
        real = [[sample(n) for n in lane] for lane in lengths]
        twin = [padded(lane, CONTEXT_RANKS) for lane in real]
        full = next(lane for lane in twin if lane)
        sides = {
            "equigrad": lambda real=real: run(real, [1.0] * LANES),
            "padded": lambda twin=twin, full=full: run(
                [lane or full for lane in twin], [float(bool(lane)) for lane in twin]
            ),
        }
        measured: dict[str, list[Any]] = {name: [] for name in sides}
        for number in range(OPTIONS.rounds + 2):
            for name, side in sides.items():
                one: list[Any] = [None] * size
                dist.all_gather_object(one, side())
                if number >= 2:
                    measured[name].append(one)
        executed = {"equigrad": real, "padded": [lane or full for lane in twin]}
        results[case] = {name: summary(job, executed[name], rounds) for name, rounds in measured.items()}
        results[case]["paired"] = {
            "latency": [[max(r["seconds"] for r in one) for one in measured[name]] for name in sides],
            "cpu": [[sum(r["cpu"] for r in one) for one in measured[name]] for name in sides],
        }
        results[case]["real_tokens"] = sum(map(sum, lengths))
    if rank == 0:
        torch.save(results, out)
    dist.barrier()
    dist.destroy_process_group()


def summary(job: Any, lanes: Lanes, rounds: list[Any]) -> dict[str, Any]:
    """Medians over rounds of what all ranks measured; ranks of a lane are neighbours."""
    ranks = range(len(rounds[0]))
    latency = [max(r["seconds"] for r in one) for one in rounds]
    flops = sum(len(s) * flops_per_token(job.model, (len(s) + 1) / 2) for lane in lanes for s in lane)
    by_lane = [ranks[i : i + CONTEXT_RANKS] for i in range(0, len(ranks), CONTEXT_RANKS)]
    return {
        "executed_tokens": sum(r["tokens"] for r in rounds[0]),
        "flops": flops,
        "latency_seconds": spread(latency) | {"p95": float(np.quantile(latency, 0.95))},
        "cpu_seconds_by_lane": [spread([sum(one[r]["cpu"] for r in lane) for one in rounds]) for lane in by_lane],
        "peak_memory_mb_by_rank": [float(np.median([one[r]["memory"] for one in rounds])) for r in ranks],
        "bytes_by_rank": [rounds[0][r]["bytes"] for r in ranks],
    }


def preparation() -> dict[str, Any]:
    """One row cut and serialised for its workers, against the padded row serialised for each of them."""
    length = {"ids": np.int64, "labels": np.int64, "positions": np.int64, "loss": np.bool_, "log_probs": np.float32,
              "advantages": np.float32, "temperatures": np.float32}  # fmt: skip
    row = Sample({name: np.ones(ROW, kind) for name, kind in length.items()})
    partition = Partition.contiguous(ROW, WORKERS)

    def ours() -> list[bytes]:
        return [micro_batch([row], partition, worker).to_bytes() for worker in range(WORKERS)]

    def twin() -> list[bytes]:
        missing = -ROW % WORKERS
        streams = {n: np.concatenate([s, np.zeros(missing, s.dtype)]) for n, s in row.streams.items()}
        return [MicroBatch((ROW + missing,), streams).to_bytes() for _ in range(WORKERS)]

    def often(prepare: Callable[[], list[bytes]]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(50):
                prepare()  # and let go, as whoever has sent them does

        return run

    sides = {"equigrad": often(ours), "padded": often(twin)}
    seconds = interleaved(sides, 20, warm_up=3)
    return {
        "bytes": {"equigrad": sum(map(len, ours())), "padded": sum(map(len, twin()))},
        "milliseconds": {name: spread([s / 50 * 1e3 for s in values]) for name, values in seconds.items()},
        "times_faster": ratio(seconds["padded"], seconds["equigrad"]),
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "out")
        mp.spawn(rank_main, (os.path.join(folder, "store"), out), LANES * CONTEXT_RANKS)
        result: dict[str, Any] = {"cases": torch.load(out, weights_only=True)}
    for case, found in result["cases"].items():
        print(f"{case}: {found['real_tokens']} real tokens, executed {found['equigrad']['executed_tokens']}"
              f" against {found['padded']['executed_tokens']}")  # fmt: skip
        paired = found.pop("paired")
        for what, (own, other) in paired.items():
            found[f"{what}_saved"] = spread([1 - a / b for a, b in zip(own, other, strict=True)])
            show(f"  {what} saved, {case}", found[f"{what}_saved"])
    result["preparation"] = preparation()
    show("preparation of a row for 4 workers, times faster", result["preparation"]["times_faster"], 2)
    print("bytes", result["preparation"]["bytes"])
    write(OPTIONS.json, result)


if __name__ == "__main__":
    main()
