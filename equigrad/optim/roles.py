"""What the role of a parameter decides."""

from collections.abc import Mapping
from dataclasses import dataclass

from equigrad.config.optim import Optim
from equigrad.models.specs import Spec


@dataclass(frozen=True)
class Rates:
    """Learning rate and decay of each parameter."""

    config: Optim
    specs: Mapping[str, Spec]

    def __call__(self, name: str, lr: float) -> tuple[float, float]:
        """Of a parameter, its rate and its decay, which is to be multiplied by the rate: vectors do not decay."""
        role = self.specs[name].role
        of_role = {"embedding": self.config.embedding_lr, "head": self.config.head_lr, "vector": self.config.vector_lr}
        decay = 0.0 if role == "vector" else self.config.weight_decay
        return lr * of_role.get(role, 1.0), decay
