"""How rollouts become an update of the policy."""

from typing import Any, Literal, TypeAlias

from pydantic import Field, model_validator

from equigrad.config.base import Section

Name: TypeAlias = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp"]

# Publications' own values; what they leave open stays the default.
PRESETS: dict[str, dict[str, Any]] = {
    # Shao et al., arXiv 2402.03300, section 4.1. Its divergence, 0.04 in the loss, takes a reference: give ``kl``.
    "grpo": {"normaliser": "sequence", "clip_low": 0.2, "clip_high": 0.2},
    # Liu et al., arXiv 2503.20783, section 3.2.
    "dr_grpo": {"normaliser": "constant", "clip_low": 0.2, "clip_high": 0.2},
    # Yu et al., arXiv 2503.14476, section 4.1.
    "dapo": {"normaliser": "token", "clip_low": 0.2, "clip_high": 0.28},
    # Zheng et al., arXiv 2507.18071, section 5.1.
    "gspo": {"normaliser": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
    # MiniMax, arXiv 2506.13585, section 3.1: no lower bound. It gives no upper one; this is DAPO's.
    "cispo": {"normaliser": "token", "clip_low": 1.0, "clip_high": 0.28},
    # Ahmadian et al., arXiv 2402.14740, section 3: a rollout is one action. It does not clip; these bounds are ours.
    "rloo": {"normaliser": "rollout", "clip_low": 0.2, "clip_high": 0.2},
    # Hu, arXiv 2501.03262.
    "reinforce_pp": {"normaliser": "token", "clip_low": 0.2, "clip_high": 0.2},
}


class Policy(Section):
    """The algorithm of reinforcement learning, and its numbers."""

    name: Name = "grpo"
    """``grpo``, ``dr_grpo``, ``dapo``, ``gspo``, ``cispo``, ``rloo`` or ``reinforce_pp``. Each brings the values of its
    publication for what is not given here."""
    normaliser: Literal["token", "sequence", "constant", "rollout"] = "token"
    """What a token's loss is divided by. ``token``: the step's number of sampled tokens; ``sequence``: the number of
    its rollout's, and the number of rollouts; ``constant``: ``longest``, and the number of rollouts; ``rollout``: the
    number of rollouts alone. All of the whole step, whatever groups there are."""
    longest: int = Field(1024, ge=1)
    """Tokens of a rollout, for the constant normaliser."""
    clip_low: float = Field(0.2, ge=0)
    """A ratio below one minus this is clipped."""
    clip_high: float = Field(0.2, ge=0)
    """A ratio above one plus this is clipped."""
    clip_twice: float | None = Field(None, gt=1)
    """Where the advantage is negative a ratio counts as at most this."""
    trust: float | None = Field(None, gt=0, lt=1)
    """A token whose probability is further than this from that with which it was sampled, and would be taken further,
    has no gradient, besides those that are clipped."""
    kl: float = Field(0.0, ge=0)
    """Coefficient of the divergence from the reference model."""
    kl_kind: Literal["k1", "k2", "k3"] = "k3"
    """How it is estimated at a token."""
    kl_in: Literal["loss", "reward"] = "loss"
    """``loss``: a loss of its own. ``reward``: always ``k1``, taken off the reward before anything is made of it: the
    sum over a rollout, in REINFORCE++ over the tokens from each on."""
    correction: Literal["none", "truncate", "mask"] = "none"
    """Where the trainer's log-probabilities before the update differ from those of sampling: each token's loss times
    their ratio, at most ``correction_high`` (``truncate``), or none outside of ``correction_low`` to
    ``correction_high`` (``mask``)."""
    correction_of: Literal["token", "sequence"] = "token"
    """Whether that ratio is of a token, or of all of a rollout's together."""
    correction_low: float = Field(0.5, ge=0)
    """See ``correction``."""
    correction_high: float = Field(2.0, gt=0)
    """See ``correction``."""

    @model_validator(mode="before")
    @classmethod
    def _from_publication(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {**PRESETS.get(str(value.get("name", "grpo")), {}), **value}

    @model_validator(mode="after")
    def _bounds(self) -> "Policy":
        if self.correction_low >= self.correction_high:
            raise ValueError(
                f"correction_low {self.correction_low} is not below correction_high {self.correction_high}"
            )
        return self
