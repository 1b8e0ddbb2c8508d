"""From one process to two: the trainer's step against a bare loop over the same model, which plain FSDP2 shards.

One thread a process, the same initial weights, the same batch of full-length samples, the same AdamW and clipping. One
process and two take turns, and so do the sides; nobody computes meanwhile. Strong scaling: a step has as many tokens on
two processes as on one. A dense model, and one with experts; of that also with the experts divided over the ranks.

    python benchmarks/scaling.py
"""

import multiprocessing as mp
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from common import arguments, full_length_samples, pin_threads, ratio, show, spread, world_of, write

OPTIONS = arguments("scaling", __doc__ or "", rounds=8, context=512, samples=8)
pin_threads(1)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor, distribute_tensor  # noqa: E402

from equigrad.build import build_model  # noqa: E402
from equigrad.config import Job  # noqa: E402
from equigrad.config.load import make_job  # noqa: E402
from equigrad.data.stream import Stream  # noqa: E402
from equigrad.data.tokenizers import byte_tokenizer  # noqa: E402
from equigrad.models.decoder import Decoder  # noqa: E402
from equigrad.models.specs import parameter_count  # noqa: E402
from equigrad.numerics.native import NativeOps  # noqa: E402
from equigrad.parallel.stop import StopRequest  # noqa: E402
from equigrad.parallel.world import World  # noqa: E402
from equigrad.rows import row_tensors  # noqa: E402
from equigrad.trainer import Trainer  # noqa: E402

WARM_UP = 2
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 352, "router_aux_loss_coef": 0.0}
Step = Callable[[], None]


def make_job_on(processes: int, moe: bool, ep: int, folder: Path) -> Job:
    tokens = OPTIONS.samples * OPTIONS.context
    model = {"family": "qwen3_moe", "experts": EXPERTS} if moe else {"family": "qwen3"}
    return make_job(
        {
            "data": {"sources": [str(folder / "full.jsonl")], "context": OPTIONS.context, "append_eos": False,
                     "tokenizer": {"kind": "bytes"}, "cache": str(folder / "cache")},
            "batch": {"tokens": tokens, "row_tokens": tokens // processes},
            "model": model | {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6,
                              "num_attention_heads": 4},
            "optim": {"lr": 3e-4}, "train": {"steps": 10**6},
            "layout": {"threads": 1, "dp_shard": processes, "ep": ep},
        },
        "benchmark",
    )  # fmt: skip


def trainer_step(job: Job, rank: int, folder: Path) -> Step:
    """The product's whole loop, as ``equigrad train`` runs it."""
    stream = Stream(job.data, job.batch, 0, byte_tokenizer())
    trainer = Trainer(job, folder / "run", world_of(job, rank), stream)
    trainer.initialize(0)
    stop = StopRequest()
    return lambda: (trainer.update(stream.next_batch(), stop), None)[1]


def bare_step(job: Job, rank: int, folder: Path) -> Step:
    """What one writes by hand: each rank its share of the samples, FSDP2 with its defaults, and the usual four
    lines."""
    world, processes = World(job.layout, 0, 1, 0, torch.device("cpu"), None), job.layout.world_size
    stream = Stream(job.data, job.batch, 0, byte_tokenizer())
    samples = stream.next_batch().samples
    tokens = row_tensors(stream, samples[rank::processes], world)
    if processes == 1:
        model = build_model(job, world)
    else:
        model = Decoder(job.model, NativeOps(torch.float32), "cpu")
        for module in (*model.blocks, model):
            fully_shard(module)
    alone = job.layout.model_copy(update={"dp_shard": 1})
    values = build_model(job.model_copy(update={"layout": alone}), world)
    values.initialize(0)
    with torch.no_grad():
        for own, given in zip(model.parameters(), values.parameters(), strict=True):
            if isinstance(own, DTensor):
                given = distribute_tensor(given.data, own.device_mesh, own.placements)
            own.copy_(given)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=job.optim.betas, weight_decay=0.1, fused=True)

    def step() -> None:
        loss = model(tokens.ids, tokens.row, tokens.labels).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step


def sides_on(processes: int, rank: int, moe: bool, folder: Path) -> dict[str, Step]:
    job = make_job_on(processes, moe, 1, folder)
    sides = {"trainer": trainer_step(job, rank, folder), "bare": bare_step(job, rank, folder)}
    if moe and processes > 1:
        divided = make_job_on(processes, moe, processes, folder)
        sides["trainer, experts divided"] = trainer_step(divided, rank, folder)
    return sides


def serve(rank: int, processes: int, folder: str, pipe: Connection) -> None:
    """Does the steps that it is told to."""
    torch.set_num_threads(1)
    if processes > 1:
        dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=processes)
    sides: dict[bool, dict[str, Step]] = {}
    while (message := pipe.recv()) is not None:
        moe, side = message
        if moe not in sides:
            sides[moe] = sides_on(processes, rank, moe, Path(folder))
        if side:
            sides[moe][side]()
        pipe.send(None)
    if processes > 1:
        dist.barrier()
        dist.destroy_process_group()


def main() -> None:
    result: dict[str, Any] = {"tokens_per_step": OPTIONS.samples * OPTIONS.context}
    with tempfile.TemporaryDirectory() as name:
        full_length_samples(Path(name), OPTIONS.context)
        context, pipes, started = mp.get_context("spawn"), {1: [], 2: []}, []
        for processes, ours in pipes.items():
            for rank in range(processes):
                near, far = context.Pipe()
                started.append(context.Process(target=serve, args=(rank, processes, name, far), daemon=True))
                started[-1].start()
                ours.append(near)

        def run(processes: int, moe: bool, side: str) -> float:
            began = time.perf_counter()
            for pipe in pipes[processes]:
                pipe.send((moe, side))
            for pipe in pipes[processes]:
                pipe.recv()
            return time.perf_counter() - began

        for kind, moe in (("dense", False), ("experts", True)):
            run(1, moe, "")
            run(2, moe, "")
            cases = [(n, s) for n in pipes for s in ("trainer", "bare")] + [(2, "trainer, experts divided")] * moe
            seconds: dict[tuple[int, str], list[float]] = {case: [] for case in cases}
            for number in range(WARM_UP + OPTIONS.rounds):
                for processes, side in cases:
                    took = run(processes, moe, side)
                    if number >= WARM_UP:
                        seconds[processes, side].append(took)
            result[kind] = report(kind, seconds)
            result[kind]["parameters"] = parameter_count(make_job_on(1, moe, 1, Path(name)).model)
        for pipe in (*pipes[1], *pipes[2]):
            pipe.send(None)
        for process in started:
            process.join()
    write(OPTIONS.json, result)


def report(kind: str, seconds: dict[tuple[int, str], list[float]]) -> dict[str, Any]:
    tokens = OPTIONS.samples * OPTIONS.context
    found: dict[str, Any] = {"tokens_per_second": {}, "scaling": {}, "over_plain_fsdp2": {}}
    for (processes, side), values in seconds.items():
        what = f"{side}, {processes} process{'es' * (processes > 1)}"
        found["tokens_per_second"][what] = spread([tokens / s for s in values])
        show(f"{kind}: {what}, tokens/s", found["tokens_per_second"][what], 0)
        if processes > 1:
            base = seconds[1, side.partition(",")[0]]
            found["scaling"][side] = ratio(base, values)
            show(f"{kind}: {side}, 1 to {processes} processes", found["scaling"][side])
            if side != "bare":
                found["over_plain_fsdp2"][side] = ratio(seconds[processes, "bare"], values)
                show(f"{kind}: {side} / plain FSDP2, {processes} processes", found["over_plain_fsdp2"][side])
    return found


if __name__ == "__main__":
    main()
