"""What passes between the ops of a mixture of experts: whom the router chose, and where the tokens then lie."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Load(NamedTuple):
    """How a router spread the tokens of this rank. Added over all rows of all ranks, it is that of the step.

    counts:      [E] int64, tokens that chose each expert; together the number of tokens times k
    probability: [E] float32, the sum over the tokens of each expert's share of their scores
    """

    counts: Tensor
    probability: Tensor


class Routes(NamedTuple):
    """The choice of each token of the residual stream.

    experts: [T, k] int64, the best first, and of equals the one with the lower index
    weights: [T, k] float32, what each expert's output counts for
    """

    experts: Tensor
    weights: Tensor
    load: Load


@dataclass(frozen=True)
class Dispatch:
    """How copies of tokens got from the row to the experts, which is also their way back.

    A slot is one of the k choices of a token: slot ``t k + j`` is choice j of token t.

    order:    [T k] int64, the slots sorted by expert, and by token for one expert
    place:    [T, k] int64, where in ``order`` each slot is
    ends:     [own experts] int32, ``ends[e - 1] .. ends[e]`` are the copies for own expert e
    exchange: how the copies lie on the ranks that share the experts; None: all experts are here
    """

    order: Tensor
    place: Tensor
    ends: Tensor
    exchange: "Exchange | None"


@dataclass(frozen=True)
class Exchange:
    """Copies sent to and received from each rank, in rank order.

    arrange: [received] int64, what was received, sorted by own expert, then by sender
    back:    [received] int64, its inverse
    """

    sent: Sequence[int]
    received: Sequence[int]
    arrange: Tensor
    back: Tensor


Loads = dict[int, Load]
"""The loads of one row by layer, of those layers that have experts: the decoder puts them in, its caller reads them."""
