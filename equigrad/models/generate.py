"""Decoding with a cache of keys and values, or of states: batched, reproducible, independent of batch neighbours.

Each sequence draws its numbers from a counter keyed by (seed, number of the sequence, position), so that what sequence
number n draws does not depend on the sequences beside it. Knows token ids only, no text.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from equigrad.config.model import Model
from equigrad.errors import UserError
from equigrad.numerics.cache import DecodingCache
from equigrad.numerics.ops import Ops
from equigrad.numerics.random import key, splitmix64
from equigrad.numerics.row import Row
from equigrad.parallel.collectives import ALONE, Axis
from equigrad.parallel.partition import part_of


class LogitModel(Protocol):
    """What decoding needs of a model: a decoder, or one whose parts are on several ranks."""

    config: Model
    ops: Ops

    @property
    def device(self) -> torch.device: ...

    def __call__(self, ids: Tensor, row: Row, *, at: Tensor | None = None) -> Tensor:
        """Logits [n, V] at the tokens ``at`` [n]; None: all."""
        ...


@torch.no_grad()
def generate(
    model: LogitModel,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: Sequence[int] = (),
    tensor: Axis = ALONE,
    experts: Axis = ALONE,
) -> list[list[int]]:
    """New token ids of each prompt, without the prompt; a stop id ends a sequence and is not returned.

    ``tensor`` is the axis over which the model's features are divided.
    ``temperature`` 0 is greedy. ``top_p`` keeps the smallest set of most likely tokens whose probability reaches it.
    Raises ``UserError`` for an empty prompt or one that does not fit the model's context.
    """
    config, device = model.config, model.device
    limit = config.max_position_embeddings
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise UserError(f"prompt {number} is empty; give at least the begin-of-text token")
        if len(prompt) + max_tokens > limit:
            raise UserError(
                f"prompt {number} has {len(prompt)} tokens; with {max_tokens} new ones that is longer than the model"
                f" allows: max_position_embeddings is {limit}"
            )
    outputs: list[list[int]] = [[] for _ in prompts]
    if not prompts or max_tokens == 0:
        return outputs
    lengths = [len(p) for p in prompts]
    first_head, stop_head = part_of(config.kv_heads, tensor.size, tensor.rank)
    cache = DecodingCache(
        len(prompts),
        max(lengths) + max_tokens,
        stop_head - first_head,
        config.head_size,
        model.ops.dtype,
        device,
        tensor,
        experts,
    )
    row = cache.prefill(lengths)
    ends = torch.tensor(lengths, device=device).cumsum(0) - 1
    logits = model(torch.tensor([t for p in prompts for t in p], device=device), row, at=ends)
    alive = list(range(len(prompts)))
    streams = [key(seed, f"generate/{number}") for number in range(len(prompts))]
    for position in range(max_tokens):
        chosen = _choose(logits.float(), temperature, top_p, [streams[n] for n in alive], position)
        chosen = _agreed(chosen, experts, device)
        kept = []
        for slot, (number, token) in enumerate(zip(alive, chosen, strict=True)):
            if token not in stop:
                outputs[number].append(token)
                kept.append(slot)
        if not kept or position == max_tokens - 1:
            break
        if len(kept) < len(alive):
            cache.keep(torch.tensor(kept, device=device))
            alive = [alive[slot] for slot in kept]
        last = torch.tensor([outputs[number][-1] for number in alive], device=device)
        logits = model(last, cache.step())
    return outputs


def _agreed(chosen: list[int], experts: Axis, device: torch.device) -> list[int]:
    """What the first of the expert ranks chose. All have the same sequences, but each its own copy of a token in an
    expert's product, and there copies may be rounded differently."""
    if experts.group is None:
        return chosen
    first = torch.tensor(chosen, device=device)
    dist.broadcast(first, group=experts.group, group_src=0)
    return first.tolist()


def _choose(logits: Tensor, temperature: float, top_p: float, streams: Sequence[int], position: int) -> list[int]:
    """One token id per row of ``logits`` [sequences, V]."""
    if temperature == 0:
        return logits.argmax(-1).tolist()
    # On the CPU: a GPU adds up cumulative sums in whatever order. Less the maximum first: divided by a tiny temperature
    # the logits themselves would overflow.
    logits = logits.double().cpu()
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature
    probabilities, order = torch.softmax(scaled, -1).sort(dim=-1, descending=True, stable=True)
    cumulative = probabilities.cumsum(-1)
    mass = probabilities.masked_fill_(cumulative - probabilities >= top_p, 0.0).sum(-1, keepdim=True)
    counter = torch.tensor(position, dtype=torch.int64)
    uniform = [int(splitmix64(counter, stream)) / 2**64 + 0.5 for stream in streams]
    threshold = torch.tensor(uniform, dtype=torch.float64)[:, None] * mass
    choice = (probabilities.cumsum(-1) <= threshold).sum(-1, keepdim=True)
    last = (probabilities > 0).sum(-1, keepdim=True) - 1
    return order.gather(-1, torch.minimum(choice, last)).squeeze(-1).tolist()
