"""Learning rate as a function of the step. Torch-free and stateless, so resuming needs nothing."""

import math

from equigrad.config.optim import Optim
from equigrad.numerics.exact.scalar import cos


def learning_rate(config: Optim, step: int, steps: int) -> float:
    """Rate of update number ``step`` (0, 1, ...) in a run of ``steps`` (unless ``schedule_steps`` says otherwise).

    Warm-up rises linearly and reaches the peak at step ``warmup_steps``; the last update of ``cosine`` and ``linear``
    is one step above the minimum. ``wsd`` (warm-up, stable, decay; arXiv 2404.06395) falls linearly at the end.
    """
    steps = config.schedule_steps or steps
    if step < config.warmup_steps:
        return config.lr * (step + 1) / (config.warmup_steps + 1)
    span = max(1, steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    if config.schedule == "cosine":
        level = 0.5 * (1 + cos(math.pi * progress))
    elif config.schedule == "linear":
        level = 1 - progress
    elif config.schedule == "wsd":
        level = min(1.0, (steps - step) / max(1.0, config.decay_fraction * steps))
    else:
        return config.lr
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * max(0.0, level))
