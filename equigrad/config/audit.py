"""Whether a run leaves a trajectory, by which others can check it."""

from pydantic import Field

from equigrad.config.base import Section


class Audit(Section):
    """The trajectory of a run: one line of digests a step, see ``equigrad audit``."""

    enabled: bool = False
    """Write ``trajectory.jsonl``: after each step its loss, its gradient norm and digests of batch, job and state,
    chained by SHA-256."""
    every: int = Field(1, ge=1)
    """Digest the tensors (parameters, optimizer, grids, routing) at every n-th step and the last; what they cost is in
    proportion. Everything else is in the line of every step."""
