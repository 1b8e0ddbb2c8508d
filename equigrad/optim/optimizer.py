"""A job's optimizer: which rule each parameter has, by its role, and all rules together."""

from collections.abc import Mapping
from typing import Protocol

from equigrad.config.optim import Optim
from equigrad.models.specs import Spec
from equigrad.optim.arithmetic import Arithmetic
from equigrad.optim.momentum import Equalized, Lion
from equigrad.optim.muon import LionMuon, MeqMuon, Muon, NorMuon
from equigrad.optim.roles import Rates
from equigrad.parallel.collectives import ALONE, Axis
from equigrad.parallel.placement import Placed

_MUONS: dict[str, type[Muon]] = {
    "muon": Muon,
    "normuon": NorMuon,
    "lionmuon": LionMuon,
    "signmuon": LionMuon,
    "meqmuon": MeqMuon,
}


class Rule(Protocol):
    """A rule for some parameters, and its state, which is where the parameters are."""

    def step(self, gradients: Mapping[str, Placed], lr: float, update: int) -> None:
        """Update them in place; ``update``: how many were made before."""

    def state(self) -> dict[str, Placed]:
        """Tensors to save, or to load into."""


class Optimizer:
    """All rules of a job.

    updates: how many were made
    """

    def __init__(
        self,
        config: Optim,
        parameters: Mapping[str, Placed],
        specs: Mapping[str, Spec],
        arithmetic: Arithmetic,
        axis: Axis = ALONE,
    ) -> None:
        """``parameters``: of this rank; ``axis``: the ranks that have parts of the same ones. A collective."""
        self.updates = 0
        trained = {n: p for n, p in parameters.items() if specs[n].trained}
        matrices = {n: p for n, p in trained.items() if specs[n].is_matrix}
        rest = {n: p for n, p in trained.items() if n not in matrices}
        rates = Rates(config, specs)
        adamw = arithmetic.adamw
        self._muon: Muon | None = None
        self._rules: list[Rule]
        if config.name == "adamw":
            self._rules = [adamw(config, trained, rates)]
        elif config.name == "lion":
            self._rules = [Lion(config, trained, rates, arithmetic)]
        else:
            self._muon = _MUONS[config.name](config, matrices, rates, arithmetic, axis)
            others: Rule
            if config.name == "meqmuon":
                others = Equalized(config, rest, rates, arithmetic, axis)
            else:
                others = adamw(config, rest, rates)
            self._rules = [self._muon, others]

    @property
    def sent(self) -> int:
        """Bytes that this rank has sent to orthogonalise matrices, so far."""
        return 0 if self._muon is None else self._muon.exchange.sent

    def step(self, gradients: Mapping[str, Placed], lr: float) -> None:
        """Update every parameter in place from its gradient, with learning rate ``lr``."""
        for rule in self._rules:
            rule.step(gradients, lr, self.updates)
        self.updates += 1

    def state(self) -> dict[str, Placed]:
        """Every tensor of the state, to save or to load into."""
        return {name: placed for rule in self._rules for name, placed in rule.state().items()}
