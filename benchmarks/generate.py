"""Generation: the embedded rollout engine against ``generate`` of transformers and a bare PyTorch loop, at equal
lengths, and on requests of heavy-tailed length, where a batch of the others is as long as its longest.

Same Qwen2, same weights, same prompts, same threads, float32; all of them sample at temperature 1 from the whole
vocabulary. The bare loop is what one writes by hand: a static cache, plain products, softmax and ``multinomial``, no
log-probabilities kept. Lengths are given as limits, so that all sides make the same number of real tokens.

    python benchmarks/generate.py
"""

from collections.abc import Callable
from typing import Any

from common import arguments, interleaved, pin_threads, ratio, show, spread, write

OPTIONS = arguments("generate", __doc__ or "", rounds=5, warm_up=1, prompt=32, new=128, tail=128, longest=512)
pin_threads(OPTIONS.threads)

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from transformers import Qwen2Config, Qwen2ForCausalLM  # noqa: E402

from equigrad.config.model import Model  # noqa: E402
from equigrad.models.decoder import Decoder  # noqa: E402
from equigrad.models.huggingface import to_huggingface  # noqa: E402
from equigrad.numerics.native import NativeOps  # noqa: E402
from equigrad.numerics.row import Row  # noqa: E402
from equigrad.rl.engine.embedded import EmbeddedEngine, Limits  # noqa: E402
from equigrad.rl.engine.protocol import Request  # noqa: E402

BATCH, VOCABULARY = 16, 4096
SHAPE = {
    "family": "qwen2", "attention_bias": True, "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 704,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
}  # fmt: skip


class Bare:
    """A loop by hand over the same weights: a batch of prompts of one length, a static cache, no engine."""

    def __init__(self, model: Decoder) -> None:
        self._config, self._w = model.config, {n: p.detach() for n, p in model.named_parameters()}
        angles = model.rotary_table(Row.of([SHAPE["max_position_embeddings"]]))  # type: ignore[list-item]
        self._cos, self._sin = (torch.cat([half, half], -1)[:, None] for half in angles)

    @torch.no_grad()
    def generate(self, prompts: Tensor, new: int) -> Tensor:
        count, begun = prompts.shape
        config = self._config
        shape = (config.num_hidden_layers, 2, count, config.num_attention_heads, begun + new, config.head_size)
        cache, ids = torch.zeros(shape), prompts
        for place in range(begun, begun + new):
            logits = self._forward(ids[:, -1:] if place > begun else ids, cache, place)
            ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1)], 1)
        return ids[:, begun:]

    def _forward(self, ids: Tensor, cache: Tensor, stop: int) -> Tensor:
        config, w, now = self._config, self._w, slice(stop - ids.shape[1], stop)
        x, size = w["model.embed_tokens.weight"][ids], (config.hidden_size,)
        cos, sin = self._cos[now].transpose(0, 1), self._sin[now].transpose(0, 1)
        for n in range(config.num_hidden_layers):
            at = f"model.layers.{n}"

            def linear(x: Tensor, name: str, bias: bool = False, at: str = at) -> Tensor:
                return F.linear(x, w[f"{at}.{name}.weight"], w[f"{at}.{name}.bias"] if bias else None)

            y = F.rms_norm(x, size, w[f"{at}.input_layernorm.weight"], config.rms_norm_eps)
            q, k, v = (
                linear(y, f"self_attn.{p}_proj", True).unflatten(-1, (-1, config.head_size)).transpose(1, 2)
                for p in "qkv"
            )
            q, k = (
                t * cos + torch.cat([-t[..., t.shape[-1] // 2 :], t[..., : t.shape[-1] // 2]], -1) * sin for t in (q, k)
            )
            cache[n, 0, :, :, now], cache[n, 1, :, :, now] = k, v
            keys, values = cache[n, :, :, :, :stop]
            y = F.scaled_dot_product_attention(q, keys, values, is_causal=ids.shape[1] > 1)
            x = x + linear(y.transpose(1, 2).flatten(2), "self_attn.o_proj")
            y = F.rms_norm(x, size, w[f"{at}.post_attention_layernorm.weight"], config.rms_norm_eps)
            x = x + linear(F.silu(linear(y, "mlp.gate_proj")) * linear(y, "mlp.up_proj"), "mlp.down_proj")
        x = F.rms_norm(x[:, -1], size, w["model.norm.weight"], config.rms_norm_eps)
        return F.linear(x, w["model.embed_tokens.weight"])


class Sides:
    """What is compared. Each is called with prompts [n, length] and how many tokens each wants."""

    def __init__(self) -> None:
        config = Model.model_validate(SHAPE)
        self._model = Decoder(config, NativeOps(), "cpu")
        self._model.initialize(0)
        raw = to_huggingface(config, None, None, "float32")
        raw.pop("model_type")
        self._theirs = Qwen2ForCausalLM(Qwen2Config(**raw, attn_implementation="sdpa")).eval()
        self._theirs.load_state_dict(self._model.state_dict(), strict=False)
        self._bare, weights = Bare(self._model), dict(self._model.named_parameters())
        capacity = OPTIONS.prompt + max(OPTIONS.new, OPTIONS.longest)
        self._engine = EmbeddedEngine(self._model, Limits(BATCH, capacity), weights, 0)

    def engine(self, prompts: Tensor, wanted: list[int]) -> int:
        requests = [
            Request(str(n), tuple(prompt), most, 0, seed=n)
            for n, (prompt, most) in enumerate(zip(prompts.tolist(), wanted, strict=True))
        ]
        return sum(len(completion.tokens) for completion in self._engine.generate(requests))

    def transformers(self, prompts: Tensor, wanted: list[int]) -> int:
        return self._in_batches(prompts, wanted, self._theirs_of)

    def bare(self, prompts: Tensor, wanted: list[int]) -> int:
        return self._in_batches(prompts, wanted, self._bare.generate)

    def _theirs_of(self, prompts: Tensor, new: int) -> Tensor:
        found = self._theirs.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=new, do_sample=True, top_k=0, top_p=1.0,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        return found[:, prompts.shape[1] :]

    def _in_batches(self, prompts: Tensor, wanted: list[int], generate: Callable[[Tensor, int], Tensor]) -> int:
        """In their order, each batch as long as its longest; what is beyond a request's length is not real."""
        for first in range(0, len(wanted), BATCH):
            found = generate(prompts[first : first + BATCH], max(wanted[first : first + BATCH]))
            assert found.shape[1] == max(wanted[first : first + BATCH])
        return sum(wanted)


def heavy_tailed(count: int, longest: int) -> list[int]:
    """Lengths of a Pareto distribution with exponent 1.2, from 16 tokens on: most are short, few are long."""
    drawn = torch.rand(count, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [min(longest, int(16 * (1 - u) ** (-1 / 1.2))) for u in drawn.tolist()]


def compare(sides: Sides, name: str, wanted: list[int], goal: str) -> dict[str, Any]:
    prompts = torch.randint(VOCABULARY, (len(wanted), OPTIONS.prompt), generator=torch.Generator().manual_seed(0))
    tokens, runs = sum(wanted), {"engine": sides.engine, "transformers": sides.transformers, "bare": sides.bare}

    def run(side: str) -> None:
        assert runs[side](prompts, wanted) == tokens

    seconds = interleaved({side: lambda side=side: run(side) for side in runs}, OPTIONS.rounds, OPTIONS.warm_up)
    speed = {side: spread([tokens / s for s in each]) for side, each in seconds.items()}
    for side, value in speed.items():
        show(f"{name}, {side}, tokens/s", value, 0)
    over = {f"{a}_over_{b}": ratio(seconds[b], seconds[a])
            for a, b in (("engine", "transformers"), ("bare", "transformers"), ("engine", "bare"))}  # fmt: skip
    show(f"{name}, engine / transformers ({goal})", over["engine_over_transformers"])
    show(f"{name}, bare loop / transformers", over["bare_over_transformers"])
    lengths = {"requests": len(wanted), "tokens": tokens, "longest": max(wanted), "mean": tokens / len(wanted)}
    return lengths | {"tokens_per_second": speed} | over


def main() -> None:
    sides = Sides()
    equal = compare(sides, "equal lengths", [OPTIONS.new] * BATCH, "goal 1.2")
    tail = compare(sides, "heavy tail", heavy_tailed(OPTIONS.tail, OPTIONS.longest), "goal 2")
    options = {"threads": OPTIONS.threads, "batch": BATCH, "prompt": OPTIONS.prompt, "model": SHAPE}
    write(OPTIONS.json, options | {"equal_lengths": equal, "heavy_tailed": tail})


if __name__ == "__main__":
    main()
