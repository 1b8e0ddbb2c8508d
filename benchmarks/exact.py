"""What the same bits everywhere cost: a step of exact numerics against one of native float32, and against native
float32 under PyTorch's deterministic mode, which promises less (the same bits in the same layout).

Same shape, same samples, same threads; the exact side compiled, and as it runs without a compiler. Time, the memory
that a process needs at its peak, and where the time goes.

    python benchmarks/exact.py
"""

import multiprocessing
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import arguments, full_length_samples, interleaved, pin_threads, ratio, shape_trainer, show, spread, write

OPTIONS = arguments("exact", __doc__ or "", rounds=5, tokens=4096, contexts="512,1024,2048", hidden="128,256,512")
pin_threads(OPTIONS.threads)

import torch  # noqa: E402

from equigrad.numerics.exact import grids  # noqa: E402
from equigrad.numerics.exact.fused import run_fused  # noqa: E402
from equigrad.parallel.stop import StopRequest  # noqa: E402
from equigrad.trainer import Trainer  # noqa: E402

SIDES: dict[str, dict[str, Any]] = {
    "native": {},
    "exact, compiled": {"kind": "exact", "compile": True},
    "exact, plain": {"kind": "exact"},
}


def make_trainer(hidden: int, context: int, numerics: dict[str, Any], folder: Path) -> Trainer:
    """Of the shape, each sample a row of its own."""
    return shape_trainer(hidden, context, OPTIONS.tokens, OPTIONS.threads, numerics, folder)


def step_of(trainer: Trainer) -> Callable[[], Any]:
    stop = StopRequest()

    def step() -> None:
        run_fused("compiled" if trainer.job.numerics.compile else "plain")  # which is one switch for the whole process
        trainer.update(trainer.stream.next_batch(), stop)

    return step


def deterministic(step: Callable[[], Any]) -> Callable[[], Any]:
    """The same under PyTorch's deterministic mode."""

    def run() -> None:
        torch.use_deterministic_algorithms(True)
        try:
            step()
        finally:
            torch.use_deterministic_algorithms(False)

    return run


def times(hidden: int, context: int, folder: Path) -> dict[str, Any]:
    """Seconds of a step of each side, and how many times those of native they are."""
    full_length_samples(folder, context)
    trainers = {name: make_trainer(hidden, context, numerics, folder) for name, numerics in SIDES.items()}
    steps = {name: step_of(trainer) for name, trainer in trainers.items()}
    steps["native, deterministic"] = deterministic(steps["native"])
    seconds = interleaved(steps, OPTIONS.rounds)
    again = {n: t.redone for n, t in trainers.items() if t.grids is not None}
    for trainer in trainers.values():
        trainer.checkpointer.close()
    of_native = {name: ratio(own, seconds["native"]) for name, own in seconds.items() if name != "native"}
    for name, value in of_native.items():
        show(f"hidden {hidden}, rows of {context}: {name} / native", value, 2)
    return {"seconds": {n: spread(s) for n, s in seconds.items()}, "of_native": of_native, "steps_done_again": again}


def profile(hidden: int, context: int, folder: Path) -> dict[str, float]:
    """Of one compiled exact step, the shares of what takes most of its time."""
    full_length_samples(folder, context)
    trainer = make_trainer(hidden, context, SIDES["exact, compiled"], folder)
    step = step_of(trainer)
    for _ in range(3):
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        step()
    trainer.checkpointer.close()
    averages = found.key_averages()
    total = sum(event.self_cpu_time_total for event in averages)
    largest = sorted(averages, key=lambda event: -event.self_cpu_time_total)[:20]
    return {event.key: round(event.self_cpu_time_total / total, 4) for event in largest}


def rounding_of_weights(hidden: int, context: int, folder: Path) -> dict[str, float]:
    """The share of a compiled exact step in which weights are put onto their grids, once for each row and pass: what
    keeping them rounded for the whole step would save, at 16 bytes a parameter."""
    full_length_samples(folder, context)
    trainer = make_trainer(hidden, context, SIDES["exact, compiled"], folder)
    matrices = [placed.tensor for placed in trainer.parameters.values() if placed.tensor.ndim == 2]

    def round_all() -> None:
        for _ in range(OPTIONS.tokens // context):
            for matrix in matrices:
                grids.rows(matrix, 20)
                grids.columns(matrix, 20)

    seconds = interleaved({"rounding": round_all, "step": step_of(trainer)}, OPTIONS.rounds)
    trainer.checkpointer.close()
    share = ratio(seconds["rounding"], seconds["step"])
    show(f"hidden {hidden}, rows of {context}: rounding of weights / step", share, 3)
    return share


def _peak(hidden: int, context: int, numerics: dict[str, Any], folder: Path, answer: Any) -> None:
    trainer = make_trainer(hidden, context, numerics, folder)
    step = step_of(trainer)
    for _ in range(2):
        step()
    answer.put(peak_memory())


def peak_memory() -> float:
    """MB that this process has had at most; not ``ru_maxrss``, which a child has of its parent."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def memory(hidden: int, context: int, folder: Path) -> dict[str, float]:
    """MB at the peak of a process of its own over those of one that has imported everything and compiled nothing."""
    full_length_samples(folder, context)
    spawn = multiprocessing.get_context("spawn")
    peaks = {}
    for name, numerics in [("nothing", {}), *SIDES.items()]:
        answer = spawn.Queue()
        shape = (128, 16) if name == "nothing" else (hidden, context)
        process = spawn.Process(target=_peak, args=(*shape, numerics, folder, answer))
        process.start()
        peaks[name] = answer.get()
        process.join()
    return {name: round(peak - peaks["nothing"], 1) for name, peak in peaks.items() if name != "nothing"}


def accuracy(hidden: int, context: int, folder: Path) -> dict[str, dict[str, float]]:
    """How far the gradients of the first step are from those of ``transformers`` in float64 from the same weights: the
    error of all of them over their norm, and the worst of one parameter."""
    full_length_samples(folder, context)
    kinds = SIDES | {"native, bfloat16": {"dtype": "bfloat16"}}
    found, expected = {}, None
    for name in ("exact, plain", "native", "native, bfloat16"):
        trainer = make_trainer(hidden, context, kinds[name], folder)
        for placed in trainer.parameters.values():  # the same weights for all
            placed.tensor.copy_(placed.tensor.float())
        norm, kept = trainer.norm, dict[str, torch.Tensor]()

        def keep(gradients: Any, norm: Any = norm, kept: Any = kept) -> float:
            kept.update({n: g.tensor.double().clone() for n, g in gradients.items()})
            return norm(gradients)

        trainer.norm = keep  # type: ignore[method-assign]
        batch = trainer.stream.next_batch()
        if expected is None:
            expected = _gradients_in_float64(trainer, batch)
        trainer.update(batch, StopRequest())
        trainer.checkpointer.close()
        total = sum(float(g.square().sum()) for g in expected.values()) ** 0.5
        errors = {n: float((kept[n] - g).norm()) for n, g in expected.items()}
        found[name] = {
            "of all": sum(e * e for e in errors.values()) ** 0.5 / total,
            "worst parameter": max(e / float(expected[n].norm()) for n, e in errors.items()),
        }
        print(f"hidden {hidden}: gradients of {name}: {found[name]}")
    return found


def _gradients_in_float64(trainer: Trainer, batch: Any) -> dict[str, torch.Tensor]:
    from transformers import LlamaConfig, LlamaForCausalLM

    from equigrad.models.huggingface import to_huggingface

    raw = to_huggingface(trainer.job.model, None, None, "float32")
    raw.pop("model_type")
    model = LlamaForCausalLM(LlamaConfig(**raw, attn_implementation="eager"))
    model.load_state_dict({n: p.tensor.float() for n, p in trainer.parameters.items()}, strict=False)
    model.double()
    samples = [trainer.stream.read(ref) for ref in batch.samples]
    tokens = sum(map(len, samples))
    for sample in samples:
        ids, labels = (torch.from_numpy(x.astype("int64")) for x in (sample.ids, sample.labels))
        logits = model(ids[None]).logits[0]
        (torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / tokens).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def main() -> None:
    contexts = [int(n) for n in OPTIONS.contexts.split(",")]
    result: dict[str, Any] = {"threads": OPTIONS.threads, "tokens_per_step": OPTIONS.tokens, "shapes": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for hidden in map(int, OPTIONS.hidden.split(",")):
            for context in contexts if hidden != 128 else contexts[:1]:
                result["shapes"][f"hidden {hidden}, rows of {context}"] = times(hidden, context, folder)
            result["shapes"][f"hidden {hidden}, rows of {contexts[0]}"]["memory_mb"] = found = memory(
                hidden, contexts[0], folder
            )
            print(f"hidden {hidden}: MB at the peak {found}")
        result["profile"] = profile(512, 512, folder)
        result["rounding_of_weights"] = rounding_of_weights(512, 512, folder)
        result["accuracy"] = accuracy(128, 512, folder)
    write(OPTIONS.json, result)


if __name__ == "__main__":
    main()
