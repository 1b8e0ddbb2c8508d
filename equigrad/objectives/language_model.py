"""Next-token prediction: pre-training, and fine-tuning on the tokens that are in the loss."""

from torch import Tensor


def language_model(token_loss: Tensor, normaliser: int) -> Tensor:
    """This row's share of the step's loss, a scalar.

    ``token_loss`` [n] float32 is the cross-entropy of each token in the loss (a token that is not never gets here), and
    ``normaliser`` is their number over the *whole* step: all rows of all ranks. Shares add up to the mean.
    """
    return token_loss.sum() / normaliser
