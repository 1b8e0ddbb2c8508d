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
from equigrad.models.sampling import Rule, draw
from equigrad.numerics.cache import DecodingCache
from equigrad.numerics.ops import Ops
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
    cache = cache_for(model, len(prompts), max(map(len, prompts)) + max_tokens, tensor, experts)
    row = cache.prefill([len(prompt) for prompt in prompts])
    logits = model(torch.tensor([t for p in prompts for t in p], device=device), row, at=last_of(row))
    alive = list(range(len(prompts)))
    rules = [Rule.seeded(seed, f"generate/{number}", temperature, top_p) for number in alive]
    for position in range(max_tokens):
        drawn = draw(logits, model.ops, [rules[n] for n in alive], [position] * len(alive))
        ended = set()
        for slot, (number, token) in enumerate(zip(alive, agreed(drawn.ids, experts).tolist(), strict=True)):
            if token in stop:
                ended.add(slot)
            else:
                outputs[number].append(token)
        if len(ended) == len(alive) or position == max_tokens - 1:
            break
        if ended:
            alive = [alive[slot] for slot in cache.drop(ended)]
        last = torch.tensor([outputs[number][-1] for number in alive], device=device)
        logits = model(last, cache.step())
    return outputs


def cache_for(model: LogitModel, slots: int, capacity: int, tensor: Axis, experts: Axis) -> DecodingCache:
    """Room for what a model's layers keep, on this rank of the axis over which its features are divided."""
    config = model.config
    first, stop = part_of(config.kv_heads, tensor.size, tensor.rank)
    kind = model.ops.dtype, model.device
    return DecodingCache(slots, capacity, stop - first, config.head_size, *kind, tensor, experts)


def cache_bytes(model: LogitModel, slots: int, capacity: int, tensor: Axis) -> int:
    """What ``cache_for`` takes once every layer of the model has its room, all of which is on this rank unless a
    pipeline divides it."""
    config, linear = model.config, model.config.linear_attention
    first, stop = part_of(config.kv_heads, tensor.size, tensor.rank)
    of_token = 2 * (stop - first) * config.head_size * model.ops.dtype.itemsize
    of_linear = 0
    if linear is not None:
        first, stop = part_of(linear.linear_num_key_heads, tensor.size, tensor.rank)
        window = (linear.linear_conv_kernel_dim - 1) * sum(linear.mixed) * 4
        # Of each value head one; in the type of parameters, which is that of sums.
        state = linear.values_per_key * linear.linear_key_head_dim * linear.linear_value_head_dim
        of_linear = (stop - first) * (window + state * model.ops.parameter_dtype.itemsize)
    layers = [config.is_linear(layer) for layer in range(config.num_hidden_layers)]
    return slots * (layers.count(False) * (1 + capacity) * of_token + layers.count(True) * of_linear)


def last_of(row: Row) -> Tensor:
    """The last token of each segment."""
    return torch.tensor(row.lengths, device=row.positions.device).cumsum(0) - 1


def agreed(values: Tensor, experts: Axis) -> Tensor:
    """What the first of the expert ranks has. All have the same sequences, but each its own copy of a token in an
    expert's product, and there copies may be rounded differently."""
    if experts.group is not None:
        dist.broadcast(values, group=experts.group, group_src=0)
    return values
