"""Low-rank adapters: train little beside weights that stay."""

import math

from pydantic import Field

from equigrad.config.base import Section


class Lora(Section):
    """Low-rank adapters (LoRA, arXiv 2106.09685). With this section the model's weights are frozen; trained is what is
    added to them, for each target a product of two small matrices. Names and meaning are those of PEFT."""

    rank: int = Field(16, ge=1)
    """Width between the two matrices (PEFT: r)."""
    alpha: float = Field(32.0, gt=0)
    """The product is multiplied by alpha / rank (PEFT: lora_alpha)."""
    rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead (arXiv 2312.03732)."""
    targets: list[str] = Field(["all-linear"], min_length=1)
    """Linear layers that get an adapter: the ends of their names (``q_proj``, ``self_attn.o_proj``), or regular
    expressions for whole names (``model.layers.[0-3].mlp.*_proj``); ``all-linear``: all but the head and routed
    experts. Of routed experts (``experts.up_proj``) each gets its own. Routers take no adapters."""

    @property
    def scale(self) -> float:
        """What the product is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)
