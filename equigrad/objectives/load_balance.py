"""The load-balancing term of a mixture of experts (Fedus et al., arXiv 2101.03961), from global counts."""

from collections.abc import Sequence

import torch
from torch import Tensor


def load_balance(probabilities: Sequence[Tensor], shares: Tensor, layers: int, tokens: int) -> Tensor:
    """This row's share of the step's term, a scalar: ``E sum_e f_e P_e``, the mean over the layers.

    probabilities: of each layer here [E], the sum over this row's tokens of each expert's share of their scores
    shares:        [layers here, E], f: tokens that chose the expert, over all tokens, *of the step before*
    layers:        of the whole model, those that have experts
    tokens:        of the whole step: all rows of all ranks; rows without tokens weigh nothing

    P, the mean probability, is the only factor with a gradient. That f is the last step's makes the term linear in the
    tokens: what a micro-batch adds to the gradient does not depend on the others, which it cannot know yet.
    """
    return (torch.stack(list(probabilities)) * shares).sum() * (shares.shape[1] / (layers * tokens))
