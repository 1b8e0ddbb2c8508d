"""Next-token prediction: pre-training, and fine-tuning on the tokens that are in the loss."""

from torch import Tensor


def language_model(token_loss: Tensor, included: Tensor, normaliser: int) -> Tensor:
    """This row's share of the step's loss, a scalar.

    ``token_loss`` [T] float32 is the cross-entropy of each token, ``included`` [T] bool says which tokens count, and
    ``normaliser`` is their number over the *whole* step: all rows of all ranks. Shares add up to the mean.
    """
    return token_loss.where(included, 0.0).sum() / normaliser
