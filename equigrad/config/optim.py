"""The optimizer and its learning-rate schedule."""

from typing import Literal

from pydantic import Field, model_validator

from equigrad.config.base import Section


class Optim(Section):
    """How gradients become an update."""

    name: Literal["adamw"] = "adamw"
    """Which rule."""
    lr: float = Field(3e-3, gt=0)
    """Peak learning rate."""
    betas: tuple[float, float] = Field((0.9, 0.95), strict=False)
    """Decay of the first and the second moment."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled decay of matrices (times the learning rate); norms and biases do not decay."""
    clip_norm: float = Field(1.0, ge=0)
    """Largest global gradient norm; a larger gradient is scaled down to it. 0: no clipping."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Shape after warm-up. ``wsd``: stable, then a linear decay over the last ``decay_fraction`` of the steps."""
    schedule_steps: int | None = Field(None, ge=1)
    """Length of the schedule in steps; by default ``train.steps``. Give it to run a schedule in several parts."""
    warmup_steps: int = Field(0, ge=0)
    """Steps in which the learning rate grows linearly to its peak."""
    decay_fraction: float = Field(0.2, gt=0, le=1)
    """``wsd``: last share of the steps in which the learning rate falls."""
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    """Learning rate at the end, as a share of the peak."""

    @model_validator(mode="after")
    def _betas(self) -> "Optim":
        if not all(0 <= b < 1 for b in self.betas):
            raise ValueError(f"betas must lie in [0, 1), not {self.betas}")
        return self
