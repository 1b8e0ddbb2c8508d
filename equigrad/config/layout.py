"""How the work is divided over processes. The answer does not depend on it."""

from typing import Literal

from pydantic import Field

from equigrad.config.base import Section

ContextStrategy = Literal["ring", "ulysses"]

MOST_THREADS = 4096
"""CPU threads that a process may be asked to use: far more than there are cores, far less than would end it."""


MOST_RANKS = 1 << 17
"""Along one degree: more than there are GPUs in the largest clusters."""


class Layout(Section):
    """World size = dp_replicate x dp_shard x cp x tp x pp; ep borrows ranks of dp_shard x cp."""

    dp_replicate: int = Field(1, ge=1, le=MOST_RANKS)
    """Data-parallel copies of the model."""
    dp_shard: int = Field(1, ge=1, le=MOST_RANKS)
    """Ranks over which one copy of parameters, gradients and optimizer state is sharded (FSDP2)."""
    cp: int = Field(1, ge=1, le=MOST_RANKS)
    """Context-parallel degree: the tokens of a row are divided over this many ranks."""
    cp_strategy: ContextStrategy = "ring"
    """What attention exchanges between context ranks. ``ring``: keys and values travel round while ranks compute (arXiv
    2310.01889). ``ulysses``: tokens of all heads for all tokens of some heads (arXiv 2309.14509); where there are more
    ranks than heads, the others idle in attention."""
    cp_zigzag: bool | None = None
    """Give each context rank a range of tokens from the front of the row and one from its back, so that under causal
    attention all have about as much to see; by default with ``ring`` only, for ``ulysses`` divides heads."""
    tp: int = Field(1, ge=1, le=MOST_RANKS)
    """Tensor-parallel degree."""
    pp: int = Field(1, ge=1, le=MOST_RANKS)
    """Pipeline-parallel degree: the blocks are divided over this many ranks."""
    pp_schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
    """Order of forward and backward passes in a pipeline, see ``equigrad schedule``."""
    pp_stages: int = Field(1, ge=1, le=MOST_RANKS)
    """Stages on each pipeline rank; ``interleaved`` has a smaller bubble with more of them."""
    ep: int = Field(1, ge=1, le=MOST_RANKS)
    """Expert-parallel degree: over how many ranks of dp_shard x cp the experts are divided."""
    reshard_after_forward: bool = True
    """Free gathered parameters after the forward pass and gather them again in the backward pass."""
    reduce_every_round: bool = False
    """Reduce gradients after every round of rows (less memory), else once per step (less communication)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where tensors live; ``auto`` is CUDA where there is a GPU for each local rank, else the CPU."""
    threads: int | None = Field(None, ge=1, le=MOST_THREADS)
    """CPU threads per process; by default ``$OMP_NUM_THREADS``, else the cores divided by the local processes."""
    timeout_s: float = Field(600.0, ge=1, le=1e7)
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

    def rank_of(self, pipe: int, lane: int, context: int, tensor: int) -> int:
        """The process at these places: tensor ranks are neighbours, then context ranks, then data lanes."""
        return ((pipe * self.data_lanes + lane) * self.cp + context) * self.tp + tensor

    @property
    def degrees(self) -> str:
        """Those that divide anything."""
        names = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
        return " x ".join(f"{n} {getattr(self, n)}" for n in names if getattr(self, n) > 1)

    def describe(self) -> str:
        """The product of degrees, for messages."""
        degrees = {n: getattr(self, n) for n in ("dp_replicate", "dp_shard", "cp", "tp", "pp")}
        borrowed = f", ep {self.ep} of them" if self.ep > 1 else ""
        return " x ".join(f"{n} {d}" for n, d in degrees.items()) + f" = {self.world_size}{borrowed}"
