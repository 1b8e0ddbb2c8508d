"""The algorithms of reinforcement learning, each a file: what a rollout is worth, how much a token counts, and which
loss it has."""

from equigrad.config.policy import Policy
from equigrad.rl.algorithms.algorithm import Algorithm
from equigrad.rl.algorithms.cispo import Cispo
from equigrad.rl.algorithms.grpo import DrGrpo, Grpo
from equigrad.rl.algorithms.gspo import Gspo
from equigrad.rl.algorithms.reinforce_pp import ReinforcePlusPlus
from equigrad.rl.algorithms.rloo import Rloo

_OF_NAME: dict[str, type[Algorithm]] = {
    "grpo": Grpo,
    "dr_grpo": DrGrpo,
    "dapo": Grpo,
    "gspo": Gspo,
    "cispo": Cispo,
    "rloo": Rloo,
    "reinforce_pp": ReinforcePlusPlus,
}


def algorithm(config: Policy) -> Algorithm:
    """The algorithm of that name."""
    return _OF_NAME[config.name](config)
