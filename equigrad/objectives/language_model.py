"""Next-token prediction: pre-training, and fine-tuning on the tokens that are in the loss."""

from torch import Tensor

from equigrad.numerics.exact.elementary import quotient
from equigrad.numerics.ops import Ops

_MOST = 13
"""A mean loss is below 2^13 nats."""


def language_model(token_loss: Tensor, ops: Ops, normaliser: int) -> Tensor:
    """This row's share of the step's loss, a scalar.

    ``token_loss`` [n] float32 is the cross-entropy of each token in the loss (a token that is not never gets here), and
    ``normaliser`` is their number over the *whole* step: all rows of all ranks. Shares add up to the mean.
    """
    return ops.total(quotient(token_loss, normaliser), _MOST)
