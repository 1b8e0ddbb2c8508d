"""What a run shows and writes about itself."""

from pydantic import Field, model_validator

from equigrad.config.base import Section


class Observe(Section):
    """Progress, metrics and reports."""

    log_every: int = Field(1, ge=1)
    """Write a line of ``metrics.jsonl`` after every n-th step."""
    tensorboard: bool = False
    """Write TensorBoard events into the run folder (needs the ``tensorboard`` extra)."""
    wandb_project: str | None = None
    """Log to this Weights & Biases project (needs the ``wandb`` extra)."""
    report: bool = True
    """Write ``report.html`` at the end of the run."""
    sample_prompt: str = ""
    """Beginning of the sample of generated text in the report."""
    sample_tokens: int = Field(200, ge=0)
    """Length of that sample; 0: no sample."""
    profile_steps: tuple[int, int] | None = Field(None, strict=False)
    """First and last step (counted from 1) of a profiler trace, written into the run folder as Chrome trace JSON."""

    @model_validator(mode="after")
    def _steps_in_order(self) -> "Observe":
        if self.profile_steps is not None and not 1 <= self.profile_steps[0] <= self.profile_steps[1]:
            raise ValueError(f"profile_steps must be [first, last] with 1 <= first <= last, not {self.profile_steps}")
        return self
