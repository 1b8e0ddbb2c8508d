"""Activation checkpointing: keep the input of a block, compute the block again in the backward pass.

Nothing in a block is random and every op is deterministic, so the result has the same bits as without.
"""

from collections.abc import Sequence
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from equigrad.config.memory import Memory


def apply(config: Memory, blocks: Sequence[nn.Module]) -> None:
    """Wrap the forward of every chosen block, in place; parameter names stay as they are."""
    if config.recompute == "block":
        for block in blocks[:: config.recompute_every]:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
