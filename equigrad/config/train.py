"""How long a run lasts and what it measures on the way."""

from typing import Literal

from pydantic import Field

from equigrad.config.base import Section


class Train(Section):
    """The loop."""

    steps: int = Field(100, ge=0)
    """Number of updates."""
    eval_every: int = Field(0, ge=0)
    """Measure the held-out loss after every n-th step; 0: at the end only."""
    eval_tokens: int | None = Field(None, ge=1)
    """Most held-out tokens of an evaluation on the way; the one at the end always takes all."""
    non_finite: Literal["stop", "skip"] = "stop"
    """What happens to a step whose loss or gradient norm is not finite: end the run before anything changes, or leave
    the step's update out and count it."""
    max_skips: int = Field(10, ge=0)
    """With ``skip``: consecutive non-finite steps after which the run stops all the same."""
