"""What is kept between forward and backward."""

from typing import Literal

from pydantic import Field

from equigrad.config.base import Section


class Memory(Section):
    """Activation policy."""

    recompute: Literal["none", "block"] = "none"
    """``block``: keep the input of a block only and compute the block again in the backward pass. Saves little in a
    ``zero_bubble`` pipeline, where what weight gradients need waits for them."""
    recompute_every: int = Field(1, ge=1)
    """With ``block``: apply it to every n-th block."""
    saved_logits_mb: int = Field(256, ge=0)
    """Probabilities of a row up to this size are kept for its backward pass, larger ones are computed again. A pipeline
    may hold those of several rows."""
