"""The optimizer and its learning-rate schedule."""

from typing import Any, Literal, TypeAlias

from pydantic import Field, model_validator

from equigrad.config.base import Section

# Publications' own values; what they leave open stays the default.
PRESETS: dict[str, dict[str, Any]] = {
    # Touvron et al., arXiv 2307.09288, section 2.2.
    "llama2": {"name": "adamw", "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1, "clip_norm": 1.0,
               "schedule": "cosine", "min_lr_ratio": 0.1},
    # Chen et al., arXiv 2302.06675, section 5: rates 3 to 10 times smaller than AdamW's, decays as many times larger.
    "lion": {"name": "lion", "lion_betas": (0.9, 0.99), "lr": 3e-4, "weight_decay": 1.0},
    # Liu et al., arXiv 2502.16982, section 2.2: AdamW's rate and decay, for an update of its size.
    "moonlight": {"name": "muon", "momentum": 0.95, "nesterov": True, "update_scale": "rms", "weight_decay": 0.1},
    # Li et al., arXiv 2510.05491, and its public code.
    "normuon": {"name": "normuon", "momentum": 0.95, "nesterov": True, "row_beta": 0.95},
    # arXiv 2605.19811: the two periods for which it gives a ratio of rates.
    "lionmuon-p2": {"name": "lionmuon", "lion_betas": (0.9, 0.99), "period": 2, "lion_lr": 1 / 20},
    "lionmuon-p5": {"name": "lionmuon", "lion_betas": (0.9, 0.99), "period": 5, "lion_lr": 1 / 40},
    # arXiv 2609.35701.
    "meqmuon": {"name": "meqmuon", "momentum": 0.95, "meq_scale": 0.2, "weight_decay": 0.1},
}  # fmt: skip
_PRODUCTS = {"newton_schulz", "newton_schulz_steps"}
USES: dict[str, set[str]] = {
    "adamw": {"betas", "eps"},
    "lion": {"lion_betas"},
    "muon": {"betas", "eps", "momentum", "nesterov", "update_scale", *_PRODUCTS},
    "normuon": {"betas", "eps", "momentum", "nesterov", "row_beta", "update_scale", *_PRODUCTS},
    "lionmuon": {"betas", "eps", "lion_betas", "period", "lion_lr", "update_scale", *_PRODUCTS},
    "signmuon": {"betas", "eps", "momentum", "period", "lion_lr", "update_scale", *_PRODUCTS},
    "meqmuon": {"momentum", "meq_scale", *_PRODUCTS},
}
"""Of the keys that belong to some rules only, those that each rule reads."""
Rule: TypeAlias = Literal["adamw", "lion", "muon", "normuon", "lionmuon", "signmuon", "meqmuon"]


class Optim(Section):
    """How gradients become an update."""

    preset: Literal["llama2", "lion", "moonlight", "normuon", "lionmuon-p2", "lionmuon-p5", "meqmuon"] | None = None
    """A publication whose values are taken for what is not given here, where a run starts; `equigrad train --dry-run`
    shows them."""
    name: Rule = "adamw"
    """Which rule, of matrices in blocks: ``adamw``; ``lion``; ``muon``; ``normuon``; ``lionmuon``; ``signmuon``;
    ``meqmuon``. Docs: [Optimizers](optimizers.md)."""
    lr: float = Field(3e-3, gt=0)
    """Peak learning rate."""
    embedding_lr: float = Field(1.0, ge=0)
    """Learning rate of the embedding, in parts of ``lr``."""
    head_lr: float = Field(1.0, ge=0)
    """Learning rate of an output head that is not tied to the embedding, in parts of ``lr``."""
    vector_lr: float = Field(1.0, ge=0)
    """Learning rate of norms, biases and other vectors, in parts of ``lr``."""
    betas: tuple[float, float] = Field((0.9, 0.95), strict=False)
    """AdamW: decay of the first and the second moment."""
    eps: float = Field(1e-8, gt=0)
    """AdamW: added to the root of the second moment."""
    lion_betas: tuple[float, float] = Field((0.9, 0.99), strict=False)
    """Lion and LionMuon: how much of the buffer is in the update, and its decay."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """Muon, NorMuon, MeqMuon: how much of the buffer is kept each step. SignMuon: both of Lion's decays."""
    nesterov: bool = True
    """Muon, NorMuon: look one step ahead."""
    row_beta: float = Field(0.95, ge=0, lt=1)
    """NorMuon: decay of the second moment of each row."""
    newton_schulz: Literal["quintic", "polar_express"] = "quintic"
    """Polynomials by which matrices are orthogonalised. ``quintic``: one, repeated (Muon); ``polar_express``: another
    each time (arXiv 2505.16932)."""
    newton_schulz_steps: int = Field(5, ge=1, le=10)
    """How many times a polynomial is applied. ``polar_express`` has five; further times repeat the last."""
    update_scale: Literal["rms", "spectral"] = "rms"
    """What an orthogonalised update of [m, n] is multiplied by. ``rms``: 0.2 sqrt(max(m, n)), by which it is as large
    as AdamW's, so that rates carry over; ``spectral``: sqrt(m / n)."""
    period: int = Field(2, ge=1)
    """LionMuon, SignMuon: every so many steps, the first included, the update is orthogonalised; in between it is a
    sign."""
    lion_lr: float | None = Field(None, gt=0)
    """LionMuon, SignMuon: the learning rate of signs, in parts of ``lr``; by default 1/20, and 1/40 from ``period`` 5
    on."""
    meq_scale: float = Field(0.2, gt=0)
    """MeqMuon: root mean square of an update of learning rate 1."""
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

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, value: Any) -> Any:
        if not isinstance(value, dict) or str(value.get("preset")) not in PRESETS:
            return value
        # Not kept beside the values: whatever changes these later, it would not be true any more.
        return {**PRESETS[value["preset"]], **{k: v for k, v in value.items() if k != "preset"}}

    @property
    def orthogonal(self) -> bool:
        """Whether hidden matrices get an update that is made orthogonal."""
        return self.name not in ("adamw", "lion")

    @property
    def sign_betas(self) -> tuple[float, float]:
        """How much of the buffer is in an update whose sign is taken, and the buffer's decay; SignMuon's are one."""
        return (self.momentum, self.momentum) if self.name == "signmuon" else self.lion_betas

    @property
    def sign_lr(self) -> float:
        """``lion_lr``, the default applied."""
        return self.lion_lr or (1 / 20 if self.period < 5 else 1 / 40)

    @model_validator(mode="after")
    def _betas(self) -> "Optim":
        for name, betas in (("betas", self.betas), ("lion_betas", self.lion_betas)):
            if not all(0 <= b < 1 for b in betas):
                raise ValueError(f"{name} must lie in [0, 1), not {betas}")
        return self
