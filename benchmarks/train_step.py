"""Training step: the trainer against a bare loop over transformers' Qwen2 (SDPA) and against a bare loop over its own
model; and the share of the machine's float32 GEMM peak that the trainer reaches at hidden 256 and 512.

Same shape, same initial weights, same batch of full-length samples, same AdamW, clipping and threads on all sides.

    python benchmarks/train_step.py
"""

import tempfile
from pathlib import Path
from typing import Any

from common import arguments, full_length_samples, interleaved, pin_threads, ratio, show, spread, write

OPTIONS = arguments("train_step", __doc__ or "", rounds=7, context=512, samples=8)
pin_threads(OPTIONS.threads)

import torch  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from transformers import Qwen2Config, Qwen2ForCausalLM  # noqa: E402

from equigrad.config.load import make_job  # noqa: E402
from equigrad.data.stream import Stream  # noqa: E402
from equigrad.data.tokenizers import byte_tokenizer  # noqa: E402
from equigrad.models.huggingface import to_huggingface  # noqa: E402
from equigrad.models.specs import flops_per_token, parameter_count  # noqa: E402
from equigrad.numerics.row import Row  # noqa: E402
from equigrad.parallel.stop import StopRequest  # noqa: E402
from equigrad.parallel.world import start  # noqa: E402
from equigrad.rows import row_tensors  # noqa: E402
from equigrad.trainer import Trainer  # noqa: E402

VOCABULARY = 4096
PRODUCT = 2048  # rows and columns of the product that stands for the peak
SHAPES = {"15M": (384, 1024, 8), "hidden 256": (256, 704, 8), "hidden 512": (512, 1408, 6)}


def make_trainer(shape: tuple[int, int, int], source: Path, folder: Path) -> Trainer:
    """The product's own loop, as ``equigrad train`` runs it."""
    hidden, inner, layers = shape
    tokens = OPTIONS.samples * OPTIONS.context
    job = make_job(
        {
            "data": {"sources": [str(source)], "context": OPTIONS.context, "append_eos": False,
                     "tokenizer": {"kind": "bytes"}, "cache": str(folder / "cache")},
            "batch": {"tokens": tokens, "row_tokens": tokens},
            "model": {"family": "qwen2", "attention_bias": True, "vocab_size": VOCABULARY, "hidden_size": hidden,
                      "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": hidden // 64},
            "optim": {"lr": 3e-4}, "train": {"steps": 10**6}, "layout": {"threads": OPTIONS.threads},
        },
        "benchmark",
    )  # fmt: skip
    trainer = Trainer(job, folder / str(hidden), start(job.layout), Stream(job.data, job.batch, 0, byte_tokenizer()))
    trainer.initialize(0)
    return trainer


def loops(trainer: Trainer) -> dict[str, Any]:
    """One step of each side."""
    stop, job, world = StopRequest(), trainer.job, trainer.world
    batch = trainer.stream.next_batch()
    tokens = row_tensors(trainer.stream, batch.samples, world)
    assert tokens.row.lengths == (OPTIONS.context,) * OPTIONS.samples
    ids, labels = (t.view(OPTIONS.samples, -1) for t in (tokens.ids, tokens.labels))

    def bare(model: torch.nn.Module, loss_of: Any) -> Any:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=job.optim.betas, weight_decay=0.1, fused=True)

        def step() -> float:
            loss = loss_of(model)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()

        return step

    raw = to_huggingface(job.model, None, None, "float32")
    raw.pop("model_type")
    theirs = Qwen2ForCausalLM(Qwen2Config(**raw, attn_implementation="sdpa"))
    theirs.load_state_dict(trainer.model.state_dict(), strict=False)
    own = make_own(trainer)
    row = Row.of(tokens.row.lengths)
    return {
        "trainer": lambda: trainer.update(trainer.stream.next_batch(), stop),
        "own model": bare(own, lambda m: m(tokens.ids, row, tokens.labels).mean()),
        "transformers": bare(
            theirs, lambda m: F.cross_entropy(m(ids, use_cache=False).logits.view(-1, VOCABULARY), labels.reshape(-1))
        ),
    }


def make_own(trainer: Trainer) -> torch.nn.Module:
    """A second copy of our model with the trainer's initial weights."""
    from equigrad.build import build_model

    model = build_model(trainer.job, trainer.world)
    model.load_state_dict(trainer.model.state_dict())
    return model


def main() -> None:
    result: dict[str, Any] = {"threads": OPTIONS.threads, "tokens_per_step": OPTIONS.samples * OPTIONS.context}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = full_length_samples(folder, OPTIONS.context)
        trainer = make_trainer(SHAPES["15M"], source, folder)
        print(f"{parameter_count(trainer.job.model):,} parameters, {OPTIONS.samples} x {OPTIONS.context} tokens a step")
        seconds = interleaved(loops(trainer), OPTIONS.rounds)
        tokens = result["tokens_per_step"]
        result["tokens_per_second"] = {n: spread([tokens / s for s in v]) for n, v in seconds.items()}
        result["over_transformers"] = ratio(seconds["transformers"], seconds["trainer"])
        result["over_own_model"] = ratio(seconds["own model"], seconds["trainer"])
        for side, value in result["tokens_per_second"].items():
            show(f"{side}, tokens/s", value, 0)
        show("trainer / bare loop over transformers (goal 1.05)", result["over_transformers"])
        show("trainer / bare loop over own model (goal 0.97)", result["over_own_model"])
        trainer.checkpointer.close()
        result["share_of_peak"] = {}
        for shape in ("hidden 256", "hidden 512"):
            trainer = make_trainer(SHAPES[shape], source, folder)
            result["share_of_peak"][shape] = share(trainer)
            for against, value in result["share_of_peak"][shape].items():
                show(f"share of the float32 GEMM peak ({against[3:]}), {shape}", value)
            trainer.checkpointer.close()
    write(OPTIONS.json, result)


def share(trainer: Trainer) -> dict[str, dict[str, float]]:
    """Useful operations per second of a step over those of a large float32 product, measured right before and after it.

    ``of_best`` takes the fastest product, which on a noisy machine is its best moment; ``of_sustained`` the time that
    a second of products took, which met the same noise as the step.
    """
    stop, shares = StopRequest(), {"of_best": [], "of_sustained": []}
    work = flops_per_token(trainer.job.model, (OPTIONS.context + 1) / 2) * OPTIONS.samples * OPTIONS.context
    a, b = (torch.randn(PRODUCT, PRODUCT) for _ in range(2))
    c = torch.empty(PRODUCT, PRODUCT)
    products = {"product": lambda: torch.mm(a, b, out=c)}
    for _ in range(OPTIONS.rounds + 2):
        took = interleaved(products, 8)["product"]
        seconds = interleaved({"step": lambda: trainer.update(trainer.stream.next_batch(), stop)}, 1, 0)["step"][0]
        took += interleaved(products, 8)["product"]
        for name, one in (("of_best", min(took)), ("of_sustained", sum(took) / len(took))):
            shares[name].append(work / seconds / (2 * PRODUCT**3 / one))
    return {name: spread(values[2:]) for name, values in shares.items()}


if __name__ == "__main__":
    main()
