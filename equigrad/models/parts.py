"""How a decoder is cut into the stages of a pipeline: whole blocks, the embedding before the first, the head after the
last. Torch-free."""

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise

from equigrad.config.model import Model
from equigrad.models.specs import BLOCK, layer_flops

EMBEDDING = "model.embed_tokens.weight"


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
        if found := BLOCK.match(name):
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
    work, head = layer_flops(model)
    # Of all blocks before each. Modules for multi-token prediction are at the end, as the head is.
    before = list(accumulate((block(context / 2) for block in work), initial=0.0))
    head += before[-1] - before[layers]

    # The most that any part of the first so many blocks computes, cut into so many parts as well as can be; and for
    # each further part, where the last one starts.
    most, cuts = [*before[:layers], before[layers] + head], list[list[int]]()
    for parts in range(2, count + 1):
        least, cut = [math.inf] * (layers + 1), [0] * (layers + 1)
        for stop in range(parts, layers + 1):
            extra = head if stop == layers else 0.0
            for start in range(stop - 1, parts - 2, -1):
                own = before[stop] - before[start] + extra
                if own >= least[stop]:
                    break  # and more so from an earlier start
                if max(most[start], own) < least[stop]:
                    least[stop], cut[stop] = max(most[start], own), start
        most = least
        cuts.append(cut)
    bounds = [layers]
    for cut in reversed(cuts):
        bounds.append(cut[bounds[-1]])
    bounds = [0, *reversed(bounds)]
    return tuple(Part(a, b, layers) for a, b in pairwise(bounds))
