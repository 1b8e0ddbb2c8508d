"""How a decoder is cut into the stages of a pipeline: whole blocks, the embedding before the first, the head after the
last. Torch-free."""

import re
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from equigrad.config.model import Model
from equigrad.models.specs import token_flops

EMBEDDING = "model.embed_tokens.weight"
_BLOCK = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Part:
    """Blocks [start, stop) of a model of ``layers``.

    Example: ``Part(0, 4, 4)`` is a whole model of four blocks.
    """

    start: int
    stop: int
    layers: int

    @property
    def first(self) -> bool:
        """Whether token ids enter here."""
        return self.start == 0

    @property
    def last(self) -> bool:
        """Whether the loss comes out here."""
        return self.stop == self.layers

    def holds(self, name: str, both_ends: bool) -> bool:
        """Whether a parameter belongs to this part. Modules for multi-token prediction, numbered after the blocks,
        belong to the last; an embedding that is used at ``both_ends`` to the first and to the last."""
        if found := _BLOCK.match(name):
            return self.start <= min(int(found[1]), self.layers - 1) < self.stop
        if name == EMBEDDING:
            return self.first or (both_ends and self.last)
        return self.last


def cut_into_parts(model: Model, count: int, context: int) -> tuple[Part, ...]:
    """``count`` parts (at most as many as blocks), so that the one that computes most computes as little as can be.

    ``context``: the tokens of a typical sample. Of equally good cuts it is the one whose early parts are longest.
    """
    layers = model.num_hidden_layers
    if not 1 <= count <= layers:
        raise ValueError(f"{layers} blocks cannot be cut into {count} parts")
    work = token_flops(model)
    # At the end: the head, and each module for multi-token prediction: a block, a projection and the head again.
    head = 6.0 * model.vocabulary * model.hidden_size
    module = head + 12.0 * model.hidden_size**2
    block = (work(context / 2) - head - model.mtp_layers * module) / model.all_layers
    head += model.mtp_layers * (module + block)

    @cache
    def best(stop: int, parts: int) -> tuple[float, int]:
        """The most that any of ``parts`` parts of the first ``stop`` blocks computes, and where the last one starts."""
        extra = head if stop == layers else 0.0
        if parts == 1:
            return stop * block + extra, 0
        ways = range(stop - 1, parts - 2, -1)
        return min((max(best(start, parts - 1)[0], (stop - start) * block + extra), -start) for start in ways)

    bounds = [layers]
    for parts in range(count, 1, -1):
        bounds.append(abs(best(bounds[-1], parts)[1]))
    bounds = [0, *reversed(bounds)] if count > 1 else [0, layers]
    return tuple(Part(a, b, layers) for a, b in pairwise(bounds))
