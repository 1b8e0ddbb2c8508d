"""Small jobs and clusters of several kinds of nodes."""

from dataclasses import replace
from typing import Any

from equigrad.config import Job
from equigrad.config.load import make_job
from equigrad.plan.mixed.cost import Costs
from equigrad.plan.mixed.train import costs

CONTEXT = 2048
MODEL: dict[str, Any] = {
    "vocab_size": 32_000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 6,
    "num_attention_heads": 16, "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip
SPARSE = {"experts": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 1024}}
WINDOWS = {"sliding_window": 512, "use_sliding_window": True, "max_window_layers": 2, "family": "qwen2"}


def small(samples: int = 16, **model: Any) -> Job:
    """A job with so many samples a step."""
    tree = {"data": {"context": CONTEXT}, "batch": {"tokens": samples * CONTEXT, "row_tokens": CONTEXT},
            "model": MODEL | model, "numerics": {"dtype": "bfloat16"}}  # fmt: skip
    return make_job(tree, "the test")


def on(job: Job, share: float = 0.9, **kinds: tuple[int, int]) -> Costs:
    """A job on so many nodes of so many GPUs of each machine; ``share`` of a device's memory may be used."""
    made = costs(job, kinds)
    made.kinds = {name: _with_memory(where, share) for name, where in made.kinds.items()}
    return made


def _with_memory(where: Any, share: float) -> Any:

    return replace(where, memory=where.memory / 0.9 * share)
