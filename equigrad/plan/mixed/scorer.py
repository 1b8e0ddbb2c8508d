"""Which templates are worth a plan, and which are worth going on with: two estimates, linear in ``features``, of by how
much longer than the best of all a template's plan takes, and the best plan that grows from it, as a logarithm of their
ratio. ``mixed.train`` learns both from small clusters that were solved by brute force, and writes ``data/scorer.json``.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

from equigrad.config.base import Section
from equigrad.plan.datafile import checked
from equigrad.plan.hardware import DATA
from equigrad.plan.mixed.features import NAMES, Features
from equigrad.plan.mixed.template import Template

FILE = DATA / "scorer.json"


Weights = dict[str, tuple[float, float]]
"""By name of the number: of it alone, and of it times the share of the cluster that is left."""


class Scorer(Section):
    """Weights for a template's own plan and for the best that grows from it; and where they are from."""

    source: str
    own: Weights
    grown: Weights

    def sorted(self, features: Features, templates: Sequence[Template]) -> tuple[list[Template], list[Template]]:
        """By their own plans and by what grows from them, the most promising first; of equals the smallest, so that it
        is the same in every run."""
        rows = np.array([features.of(template) for template in templates])

        def best(weights: Weights) -> list[Template]:
            scores = rows @ np.array([weights[name] for name in NAMES]).T.reshape(-1)
            return [one for _, one in sorted(zip(scores.round(9).tolist(), templates, strict=True))]

        return best(self.own), best(self.grown)


@cache
def scorer(path: Path = FILE) -> Scorer:
    """The data file, checked. ``UserError`` where it is not what it should be."""
    return checked(Scorer, path)
