"""Heavy-tailed sample lengths: real tokens per second against Hugging Face's Trainer with its padding collator, plain
and with its length-grouped sampler.

Samples are the paragraphs of Moby Dick as fine-tuning samples (prompt: the chapter's title); the other built-in corpus
has no paragraph breaks. Same architecture (Qwen2, hidden 256, 4 layers), same samples per step, same tokenizer, AdamW,
clipping and threads. A round is 41 steps: one whole mega-batch of the length-grouped sampler, its long and its short
samples.

    python benchmarks/long_tail.py
"""

import tempfile
from pathlib import Path
from typing import Any

from common import arguments, pin_threads, ratio, show, spread, write

OPTIONS = arguments("long_tail", __doc__ or "", rounds=2, steps=41, samples=16)
pin_threads(OPTIONS.threads)

import gzip  # noqa: E402
import json  # noqa: E402
import time  # noqa: E402
from importlib.resources import files  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from transformers import (  # noqa: E402
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Qwen2Config,
    Qwen2ForCausalLM,
    TrainingArguments,
)
from transformers import Trainer as HuggingFaceTrainer  # noqa: E402
from transformers.utils import logging as hf_logging  # noqa: E402

from equigrad.config.load import make_job  # noqa: E402
from equigrad.data.stream import Stream  # noqa: E402
from equigrad.data.tokenizers import Tokenizer  # noqa: E402
from equigrad.data.vocabulary import build_tokenizer  # noqa: E402
from equigrad.models.huggingface import to_huggingface  # noqa: E402
from equigrad.parallel.stop import StopRequest  # noqa: E402
from equigrad.parallel.world import start  # noqa: E402
from equigrad.trainer import Trainer  # noqa: E402

CONTEXT = 1024


def write_paragraphs(folder: Path) -> Path:
    """One prompt/completion record for each paragraph."""
    path = folder / "paragraphs.jsonl"
    text = files("equigrad.data").joinpath("corpora/moby_dick.jsonl.gz").read_bytes()
    with path.open("w") as out:
        for line in gzip.decompress(text).splitlines():
            document = json.loads(line)
            for paragraph in document["text"].split("\n\n"):
                if paragraph.strip():
                    record = {"prompt": document["title"] + "\n\n", "completion": paragraph.strip()}
                    out.write(json.dumps(record) + "\n")
    return path


def make_trainer(source: Path, folder: Path) -> tuple[Trainer, Tokenizer]:
    """Ours: the samples of a step packed into rows of at most 4,096 tokens."""
    tree: dict[str, Any] = {
        "data": {"sources": [str(source)], "context": CONTEXT, "cache": str(folder / "cache"),
                 "tokenizer": {"kind": "bpe", "vocab_size": 4096}},
        "batch": {"samples": OPTIONS.samples, "row_tokens": 4096},
        "model": {"family": "qwen2", "attention_bias": True, "vocab_size": 4096, "hidden_size": 256,
                  "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4},
        "optim": {"lr": 3e-4}, "train": {"steps": 10**6}, "layout": {"threads": OPTIONS.threads},
    }  # fmt: skip
    job = make_job(tree, "benchmark")
    tokenizer = build_tokenizer(job.data, folder / "none")
    trainer = Trainer(job, folder / "run", start(job.layout), Stream(job.data, job.batch, 0, tokenizer))
    trainer.initialize(0)
    return trainer, tokenizer


def hugging_face(trainer: Trainer, tokenizer: Tokenizer, folder: Path, grouped: bool) -> Any:
    """A function that trains some steps with Hugging Face's Trainer and tells real tokens and seconds."""
    hf_logging.set_verbosity_error()
    tokenizer.save(folder / "tokenizer")
    collator = DataCollatorForSeq2Seq(AutoTokenizer.from_pretrained(folder / "tokenizer"), padding=True)
    collator.tokenizer.pad_token = tokenizer.eos_token
    refs = [trainer.stream.read(ref) for ref in every_sample(trainer)]
    # Whole sequences: their loss shifts the labels itself.
    rows = [
        {
            "input_ids": [*s.ids.tolist(), int(s.labels[-1])],
            "labels": [-100, *np.where(s.loss, s.labels, -100).tolist()],
        }
        for s in refs
    ]
    raw = to_huggingface(trainer.job.model, None, None, "float32")
    raw.pop("model_type")
    model = Qwen2ForCausalLM(Qwen2Config(**raw | {"use_cache": False}, attn_implementation="sdpa"))
    rounds = iter(range(10**6))

    class Counted(HuggingFaceTrainer):
        real = 0

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            Counted.real += int(inputs["attention_mask"].sum()) - len(inputs["attention_mask"])  # predictions
            return super().compute_loss(model, inputs, *args, **kwargs)

    def run(steps: int) -> tuple[int, float]:
        sampling = {"train_sampling_strategy": "group_by_length"} if grouped else {}
        settings = TrainingArguments(
            output_dir=str(folder / "hf"), per_device_train_batch_size=OPTIONS.samples, max_steps=steps,
            learning_rate=3e-4, weight_decay=0.1, adam_beta2=0.95, max_grad_norm=1.0, optim="adamw_torch_fused",
            save_strategy="no", report_to=[], disable_tqdm=True, logging_strategy="no", use_cpu=True,
            seed=next(rounds), dataloader_num_workers=0, **sampling,
        )  # fmt: skip
        theirs = Counted(model=model, args=settings, train_dataset=rows, data_collator=collator)
        Counted.real = 0
        began = time.perf_counter()
        theirs.train()
        return Counted.real, time.perf_counter() - began

    return run


def every_sample(trainer: Trainer) -> list[Any]:
    """All training samples in the order of one epoch."""
    job = trainer.job
    stream = Stream(job.data, job.batch, 0, build_tokenizer(job.data, Path(job.data.cache or "") / "none"))
    wanted = stream.stats[0].samples
    refs: list[Any] = []
    while len(refs) < wanted:
        refs += stream.next_batch().samples
    return refs[:wanted]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trainer, tokenizer = make_trainer(write_paragraphs(folder), folder)
        stop = StopRequest()

        def ours(steps: int) -> tuple[int, float]:
            began, before = time.perf_counter(), trainer.counters["tokens"]
            for _ in range(steps):
                trainer.update(trainer.stream.next_batch(), stop)
            return trainer.counters["tokens"] - before, time.perf_counter() - began

        sides = {
            "equigrad": ours,
            "Trainer, padding": hugging_face(trainer, tokenizer, folder, False),
            "Trainer, length-grouped": hugging_face(trainer, tokenizer, folder, True),
        }
        rates: dict[str, list[float]] = {side: [] for side in sides}
        for run in sides.values():
            run(2)  # warm-up
        for _ in range(OPTIONS.rounds):
            for side, run in sides.items():
                tokens, seconds = run(OPTIONS.steps)
                rates[side].append(tokens / seconds)
        lengths = [ref.length for ref in every_sample(trainer)]
        trainer.checkpointer.close()
    result: dict[str, Any] = {
        "threads": OPTIONS.threads,
        "samples_per_step": OPTIONS.samples,
        "lengths": {"samples": len(lengths), "mean": float(np.mean(lengths)), "median": float(np.median(lengths)),
                    "p99": float(np.quantile(lengths, 0.99)), "max": max(lengths)},
        "real_tokens_per_second": {side: spread(values) for side, values in rates.items()},
        "over_padding": ratio(rates["equigrad"], rates["Trainer, padding"]),
        "over_length_grouped": ratio(rates["equigrad"], rates["Trainer, length-grouped"]),
    }  # fmt: skip
    print("sample lengths:", {k: round(v) for k, v in result["lengths"].items()})
    for side, value in result["real_tokens_per_second"].items():
        show(f"{side}, real tokens/s", value, 0)
    show("equigrad / Trainer with padding (goal 2)", result["over_padding"])
    show("equigrad / Trainer, length-grouped (goal 1.1)", result["over_length_grouped"])
    write(OPTIONS.json, result)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
