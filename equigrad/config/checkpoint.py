"""When the state of a run is saved, and which saves are kept."""

from pydantic import Field

from equigrad.config.base import Section


class Checkpoint(Section):
    """Checkpoints of a run. The last step is always saved."""

    every: int = Field(0, ge=0)
    """Save after every n-th step; 0: at the end only (and when the run is interrupted)."""
    keep_last: int = Field(2, ge=1)
    """How many of the latest checkpoints stay."""
    keep_every: int = Field(0, ge=0)
    """Checkpoints at multiples of this step stay for good; 0: none."""
    asynchronous: bool = True
    """Write while training goes on; only the copy of the state is made within the step."""
