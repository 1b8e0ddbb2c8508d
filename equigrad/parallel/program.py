"""What one rank of a pipeline does, as records: made by a schedule, performed by the executor. Torch-free."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Action:
    """Work on one micro-batch in one stage.

    ``backward`` computes all gradients; a schedule may split it into ``input_backward``, which the stage before waits
    for, and ``weight_backward``, which nobody waits for.
    """

    kind: Literal["forward", "backward", "input_backward", "weight_backward"]
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind} of stage {self.stage}, micro-batch {self.microbatch}"


@dataclass(frozen=True)
class StageAction:
    """Where data parallelism shards parameters: what happens to those of a stage.

    unshard: gather them
    reduce:  sum their gradients over the data lanes, and shard both again
    reshard: only shard them again, where there are no gradients
    """

    kind: Literal["unshard", "reduce", "reshard"]
    stage: int

    def __str__(self) -> str:
        return f"{self.kind} of stage {self.stage}"


@dataclass(frozen=True, order=True)
class Transfer:
    """One message: the activation that enters ``stage``, or the gradient of what left ``stage``.

    source, target: ranks
    """

    source: int
    target: int
    what: Literal["activation", "gradient"]
    stage: int
    microbatch: int


@dataclass(frozen=True)
class Exchange:
    """Messages of this rank that are posted together, in this order, without waiting for them."""

    transfers: tuple[Transfer, ...]
    kind: Literal["exchange"] = "exchange"

    def __str__(self) -> str:
        return "exchange of " + ", ".join(
            f"the {t.what} for stage {t.stage}, micro-batch {t.microbatch} (rank {t.source} to {t.target})"
            for t in self.transfers
        )


@dataclass(frozen=True)
class Program:
    """What one rank does, messages included.

    stages:   number of stages over all ranks
    backward: whether gradients are computed
    """

    rank: int
    ranks: int
    stages: int
    backward: bool
    steps: tuple[Action | StageAction | Exchange, ...]
