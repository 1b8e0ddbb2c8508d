"""Published runs, as workloads: what was measured, on what, and whether it calibrates or tests.

The split was written before the first fit: of llm-foundry's tables of A100-40GB and H100, the models of ``CALIBRATES``
in bfloat16 calibrate; all their other rows, and all rows of the other tables, are held out.
"""

import csv
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any, Literal, NamedTuple

from equigrad.config.layout import Layout
from equigrad.plan.hardware import DATA, GIB, TERA, hardware
from equigrad.plan.memory import memory
from equigrad.plan.shape import Layer, Shape
from equigrad.plan.step import step
from equigrad.plan.workload import DEEPSPEED, FSDP2, FSDP_PURE, MEGATRON, Workload

CALIBRATES = ("mpt-125m", "mpt-1b", "mpt-7b", "mpt-30b")

Part = Literal["calibration", "held out"]


class Run(NamedTuple):
    """One row of a table.

    seconds: of a step
    memory:  bytes at the peak of a GPU, where it was measured
    assumed: what its source leaves open and was assumed; empty: nothing
    """

    table: str
    name: str
    work: Workload
    machine: str
    seconds: float
    memory: float | None
    part: Part
    assumed: str = ""


@cache
def runs() -> tuple[Run, ...]:
    """Every row of every table."""
    return (*llm_foundry(), *megatron(), *sailor(), *further())


def llama(hidden: int, layers: int, heads: int, kv_heads: int, inner: int, vocab: int) -> Shape:
    """Llama's kind: rotary positions, a gate, no biases, a head of its own."""
    return Shape(hidden, heads, kv_heads, hidden // heads, inner, vocab, (Layer(),) * layers, tied=False)


FOUNDRY = {
    "a100_40gb": ("llm-foundry A100", "a100_40gb_roce"),
    "a100_80gb": ("llm-foundry A100 80GB", "dgx_a100"),
    "h100_80gb": ("llm-foundry H100", "dgx_h100"),
}
"""Table and machine of each kind of GPU. 1600 Gb/s between nodes are what a DGX A100 has too."""
FRESH = "a100_80gb"
"""Looked up when all else stood, and so held out as a whole."""


def llm_foundry() -> Iterator[Run]:
    """MPT models under FSDP, one table for each kind of GPU and precision. The loss is fused by default there. When the
    share of communication that computation hides was fitted, it came out as 0; so nothing overlaps.
    """
    for line in (DATA / "fsdp_runs.jsonl").read_text(encoding="utf-8").splitlines():
        row: dict[str, Any] = json.loads(line)
        shape = Shape.gpt(row["hidden"], row["layers"], row["heads"], row["vocab"], row["seq_len"], row["ffn"])
        fp8 = row["precision"] == "amp_fp8"
        table, machine = FOUNDRY[row["gpu"]]
        work = Workload(
            shape, row["seq_len"], row["micro_batch"], row["grad_accum"],
            Layout(dp_shard=row["gpus"], reduce_every_round=True), FSDP_PURE,
            "block" if row["activation_checkpointing"] else "none", fused_loss=True, overlap=False, fp8=fp8,
        )  # fmt: skip
        yield Run(
            table=table + " FP8" * fp8,
            name=f"{row['model']} {row['gpus']} GPUs, {row['micro_batch']} x {row['seq_len']}",
            work=work,
            machine=machine,
            seconds=work.tokens / row["gpus"] / row["tokens_per_s_per_gpu"],
            memory=None,
            part="calibration" if row["model"] in CALIBRATES and not fp8 and row["gpu"] != FRESH else "held out",
        )


def megatron() -> Iterator[Run]:
    """GPT models with tensor, pipeline and data parallelism (arXiv 2104.04473, table 1).

    The table has neither the micro-batch nor the number of stages of a rank; its text says that they were tuned. They
    are taken as the fastest, by this model, that fit the memory.
    """
    for row in _csv("megatron_sc21_table1.csv"):
        heads, hidden, layers = int(row["heads"]), int(row["hidden"]), int(row["layers"])
        tp, pp, gpus, batch = int(row["tp"]), int(row["pp"]), int(row["gpus"]), int(row["global_batch"])
        lanes = gpus // (tp * pp)
        work = Workload(
            Shape.gpt(hidden, layers, heads, 51200, 2048), 2048, 1, batch // lanes,
            Layout(dp_replicate=lanes, tp=tp, pp=pp, pp_schedule="interleaved" if pp > 1 else "1f1b"), MEGATRON,
            "block", attention="unfused", fused=True, fused_loss=True, dropout=True, sequence_parallel=False,
            overlap=False,
        )  # fmt: skip
        # The publication's own count of operations, recomputation included.
        flops = 96 * batch * 2048 * layers * hidden**2 * (1 + 2048 / (6 * hidden) + 51200 / (16 * layers * hidden))
        seconds = flops / (gpus * float(row["tflops_per_gpu"]) * TERA)
        yield Run("Megatron SC21", f"{row['params_b']}B {gpus} GPUs", tuned(work, "dgx_a100"), "dgx_a100", seconds,
                  None, "held out")  # fmt: skip


def tuned(work: Workload, machine: str) -> Workload:
    """The fastest micro-batch, a power of two up to 16, and number of stages of a rank, up to 4, that fit."""
    room = hardware().device(hardware().machine(machine).device).memory.value * GIB
    samples, layers = work.micro_batch * work.micro_batches, len(work.shape.layers)
    best, least = work, float("inf")
    for size in (1, 2, 4, 8, 16):
        for stages in range(1, 5 if work.layout.pp > 1 else 2):
            if samples % size or layers % (work.layout.pp * stages) or (samples // size) % work.layout.pp:
                continue
            layout = work.layout.model_copy(update={"pp_stages": stages})
            one = replace(work, micro_batch=size, micro_batches=samples // size, layout=layout)
            if memory(one).total <= room and (seconds := step(one, machine).seconds) < least:
                best, least = one, seconds
    return best


def sailor() -> Iterator[Run]:
    """OPT-350M with tensor, pipeline and data parallelism on GH200."""
    assumed = "sequences of 2048 tokens in half precision"
    for row in _csv("sailor_measured.csv"):
        tp, pp, dp = int(row["tp"]), int(row["pp"]), int(row["dp"])
        size = int(row["micro_batch"])
        work = Workload(
            Shape.gpt(1024, 24, 16, 50272, 2048), 2048, size, int(row["global_batch"]) // (dp * size),
            Layout(dp_replicate=dp, tp=tp, pp=pp), DEEPSPEED, attention="unfused",
            dropout=True, sequence_parallel=False, overlap=False,
        )  # fmt: skip
        yield Run("Sailor", f"{row['model']} {row['nodes']} nodes, tp {tp} pp {pp} dp {dp}", work, "gh200_node",
                  float(row["seconds_per_iteration"]), float(row["max_memory_gib"]) * GIB, "held out",
                  assumed)  # fmt: skip


SHAPES = {
    # Hugging Face's config.json of each model.
    "llama2-7b": llama(4096, 32, 32, 32, 11008, 32000),
    "llama2-13b": llama(5120, 40, 40, 40, 13824, 32000),
    "llama2-70b": llama(8192, 80, 64, 8, 28672, 32000),
    "llama3-8b": llama(4096, 32, 32, 8, 14336, 128256),
    "llama3-70b": llama(8192, 80, 64, 8, 28672, 128256),
    "llama3-405b": llama(16384, 126, 128, 8, 53248, 128256),
    # arXiv 2005.14165, table 2.1, and 2205.05198, table 3.
    "gpt3-175b": Shape.gpt(12288, 96, 96, 51200, 2048),
    "gpt-22b": Shape.gpt(6144, 48, 64, 51200, 2048),
    "gpt-175b": Shape.gpt(12288, 96, 96, 51200, 2048),
    "gpt-530b": Shape.gpt(20480, 105, 128, 51200, 2048),
    "gpt-1t": Shape.gpt(25600, 128, 160, 51200, 2048),
}
TOLD = ("recompute", "recompute_every", "attention", "fused", "fused_loss", "dropout", "sequence_parallel", "overlap",
        "overlap_tensor", "keeps_gathered", "fp8")  # fmt: skip
"""What a row of ``further_runs.jsonl`` says in the words of ``Workload``."""
STATES = {"megatron": MEGATRON, "fsdp2": FSDP2}


def further() -> Iterator[Run]:
    """Tables that were looked up when the model and its constants were there already, each row with its own facts.
    Nothing was fitted to them, and no constant changed after they were first compared."""
    for line in (DATA / "further_runs.jsonl").read_text(encoding="utf-8").splitlines():
        row: dict[str, Any] = json.loads(line)
        tp, pp, cp, gpus = row["tp"], row["pp"], row["cp"], row["gpus"]
        lanes = gpus // (tp * pp * cp)
        # Once a step under Megatron's distributed optimizer, and in torchtitan's pipelines.
        every_time = row["sharded"] and pp == 1
        layout = Layout(
            dp_shard=lanes, tp=tp, pp=pp, cp=cp, pp_stages=row["stages"],
            pp_schedule="interleaved" if row["stages"] > 1 else "1f1b",
            reshard_after_forward=every_time, reduce_every_round=every_time,
        )  # fmt: skip
        work = Workload(
            SHAPES[row["model"]], row["sequence"], row["micro_batch"],
            row["global_batch"] // (lanes * row["micro_batch"]), layout, STATES[row["state"]],
            **{name: row[name] for name in TOLD},
        )  # fmt: skip
        seconds = work.tokens / gpus / row["tokens_per_s_per_gpu"]
        memory_ = row.get("memory_gib")
        name = f"{row['model']} {gpus} GPUs, {row['micro_batch']} x {row['sequence']}, {row['recompute']}"
        yield Run(row["table"], name, work, row["machine"], seconds, memory_ and memory_ * GIB, "held out",
                  row.get("assumed", ""))  # fmt: skip


def _csv(name: str) -> list[dict[str, str]]:
    with (DATA / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
