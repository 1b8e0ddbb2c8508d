"""How the work is divided over processes. The answer does not depend on it."""

from typing import Literal

from pydantic import Field, model_validator

from equigrad.config.base import Section

ContextStrategy = Literal["ring", "ulysses"]


class Layout(Section):
    """World size = dp_replicate x dp_shard x cp x tp x pp; ep borrows ranks of dp_shard x cp."""

    dp_replicate: int = Field(1, ge=1)
    """Data-parallel copies of the model."""
    dp_shard: int = Field(1, ge=1)
    """Ranks over which one copy of parameters, gradients and optimizer state is sharded (FSDP2)."""
    cp: int = Field(1, ge=1)
    """Context-parallel degree: the tokens of a row are divided over this many ranks."""
    cp_strategy: ContextStrategy = "ring"
    """What attention exchanges between context ranks. ``ring``: keys and values travel round while ranks compute (arXiv
    2310.01889). ``ulysses``: tokens of all heads for all tokens of some heads (arXiv 2309.14509); where there are more
    ranks than heads, the others idle in attention."""
    cp_zigzag: bool | None = None
    """Give each context rank a range of tokens from the front of the row and one from its back, so that under causal
    attention all have about as much to see; by default with ``ring`` only, for ``ulysses`` divides heads."""
    tp: int = Field(1, ge=1)
    """Tensor-parallel degree."""
    pp: int = Field(1, ge=1)
    """Pipeline-parallel degree: the blocks are divided over this many ranks."""
    pp_schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
    """Order of forward and backward passes in a pipeline, see ``equigrad schedule``."""
    pp_stages: int = Field(1, ge=1)
    """Stages on each pipeline rank; ``interleaved`` has a smaller bubble with more of them."""
    ep: int = Field(1, ge=1)
    """Expert-parallel degree: over how many ranks of dp_shard x cp the experts are divided."""
    reshard_after_forward: bool = True
    """Free gathered parameters after the forward pass and gather them again in the backward pass."""
    reduce_every_round: bool = False
    """Reduce gradients after every round of rows (less memory), else once per step (less communication)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where tensors live; ``auto`` is CUDA where there is a GPU for each local rank, else the CPU."""
    threads: int | None = Field(None, ge=1)
    """CPU threads per process; by default ``$OMP_NUM_THREADS``, else the cores divided by the local processes."""
    timeout_s: float = Field(600.0, gt=0)
    """Seconds after which a collective that some rank never joins is an error."""

    @property
    def zigzag(self) -> bool:
        """Whether the tokens of a row are dealt from both ends."""
        return self.cp_strategy == "ring" if self.cp_zigzag is None else self.cp_zigzag

    @property
    def data_lanes(self) -> int:
        """Groups of ranks that each compute rows of their own."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.data_lanes * self.cp * self.tp * self.pp

    def describe(self) -> str:
        """The product of degrees, for messages."""
        degrees = {n: getattr(self, n) for n in ("dp_replicate", "dp_shard", "cp", "tp", "pp")}
        borrowed = f", ep {self.ep} of them" if self.ep > 1 else ""
        return " x ".join(f"{n} {d}" for n, d in degrees.items()) + f" = {self.world_size}{borrowed}"

    def expert_problem(self, experts: int | None) -> str | None:
        """Why this layout does not suit a model with so many experts (None: a dense one), and what would."""
        if self.ep == 1:
            return None
        if experts is None:
            return f"layout.ep {self.ep} divides experts, and the model has none; leave layout.ep at 1"
        lent = self.dp_shard * self.cp
        fitting = [ep for ep in range(1, lent + 1) if lent % ep == 0 and ep <= experts]
        could = f"it can be {', '.join(map(str, fitting))}"
        if lent % self.ep:
            return (
                f"layout.ep {self.ep} borrows the ranks of dp_shard x cp and must divide their number,"
                f" dp_shard {self.dp_shard} x cp {self.cp} = {lent}; {could}"
            )
        if self.ep > experts:
            return f"layout.ep {self.ep} is more than model.experts.num_experts {experts}; {could}"
        return None

    @model_validator(mode="after")
    def _supported(self) -> "Layout":
        if self.pp_stages > 1 and self.pp == 1:
            raise ValueError(f"pp_stages {self.pp_stages} needs a pipeline: pp is 1")
        return self
