"""Matrices made orthogonal by polynomials of their products: no decomposition, and nothing but matrix products."""

import torch
from torch import Tensor

from equigrad.config.optim import Optim

Polynomial = tuple[float, float, float]
"""Coefficients a, b, c of x -> a x + b x^3 + c x^5, applied to the singular values."""

QUINTIC: Polynomial = (3.4445, -4.7750, 2.0315)
"""Steepest at zero; after five times, singular values are between about 0.7 and 1.2 (Jordan et al., the Muon post)."""
POLAR_EXPRESS: tuple[Polynomial, ...] = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
"""Each the best one for what the ones before have left (Amsel et al., arXiv 2505.16932), made for five times and norms
that are 2 % too large. Further times repeat the last, as their code does. Theirs is (15, -10, 3) / 8, the eighth, which
takes singular values to 1; this one takes them to 1.035."""
SMALLEST_NORM = 1e-7
"""A norm below this counts as this: a matrix of zeros stays one."""


def polynomials(config: Optim) -> tuple[tuple[Polynomial, ...], float]:
    """The polynomials in their order, and what the norm is multiplied by before it divides."""
    steps = config.newton_schulz_steps
    if config.newton_schulz == "quintic":
        return (QUINTIC,) * steps, 1.0
    return tuple(POLAR_EXPRESS[min(step, len(POLAR_EXPRESS) - 1)] for step in range(steps)), 1.02


def newton_schulz(x: Tensor, config: Optim) -> Tensor:
    """x [k, m, n] -> the nearest (semi-)orthogonal matrices, about; computed in the type of x."""
    applied, larger = polynomials(config)
    tall = x.shape[1] > x.shape[2]
    y = x.mT.contiguous() if tall else x  # products of the smaller side
    y = y / (y.norm(dim=(1, 2), keepdim=True) * larger).clamp(min=SMALLEST_NORM)
    for a, b, c in applied:
        squares = torch.bmm(y, y.mT)
        y = torch.baddbmm(y, torch.baddbmm(squares, squares, squares, beta=b, alpha=c), y, beta=a)
    return y.mT if tall else y
