"""The whole job: one section per room, one file per job."""

from collections.abc import Iterator
from typing import Any

from pydantic import Field, model_validator

from equigrad.config.audit import Audit
from equigrad.config.base import Section
from equigrad.config.checkpoint import Checkpoint
from equigrad.config.data import BatchConfig, Data
from equigrad.config.fit import misfits
from equigrad.config.layout import Layout
from equigrad.config.lora import Lora
from equigrad.config.memory import Memory
from equigrad.config.model import Model
from equigrad.config.numerics import Numerics
from equigrad.config.observe import Observe
from equigrad.config.optim import Optim
from equigrad.config.rl import Rl
from equigrad.config.train import Train


class Job(Section):
    """Everything that decides what a run computes."""

    name: str = Field("job", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run; its folder is ``runs/<name>`` unless ``--run`` says otherwise."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of initial weights and data order."""
    train: Train = Train()
    data: Data = Data()
    batch: BatchConfig = BatchConfig()
    model: Model = Model()
    lora: Lora | None = None
    """Train adapters in place of the weights."""
    optim: Optim = Optim()
    rl: Rl | None = None
    """Reinforcement learning in place of the data's own samples."""
    layout: Layout = Layout()
    numerics: Numerics = Numerics()
    memory: Memory = Memory()
    checkpoint: Checkpoint = Checkpoint()
    observe: Observe = Observe()
    audit: Audit = Audit()

    @property
    def most_tokens(self) -> int:
        """Of one step."""
        context, batch = self.data.context, self.batch
        if self.rl is not None:
            return self.rl.most_samples * context
        return batch.samples * context if batch.samples is not None else max(batch.budget, context)

    def common(self) -> dict[str, Any]:
        """What must be the same on all ranks: everything but where each of them keeps and computes it."""
        return self.model_dump(mode="json", exclude={"data": {"cache"}, "layout": {"device", "threads"}})

    @model_validator(mode="after")
    def _sections_agree(self) -> "Job":
        if self.batch.row_tokens < self.data.context:
            raise ValueError(
                f"batch.row_tokens {self.batch.row_tokens} is smaller than data.context {self.data.context}:"
                " a whole sample must fit into a row"
            )
        if self.batch.tokens is not None and self.batch.tokens < self.data.context:
            raise ValueError(
                f"batch.tokens {self.batch.tokens} is smaller than data.context {self.data.context}:"
                " a whole sample must fit into a step"
            )
        native = self.numerics.kind == "native"
        if native and self.numerics.compile and self.layout.pp > 1 and self.layout.pp_schedule == "zero_bubble":
            raise ValueError(
                'numerics.compile does not go with layout.pp_schedule "zero_bubble": a compiled block computes its'
                ' weight gradients at once; choose "1f1b" or "interleaved"'
            )
        # A model.weights folder brings its own shape, checked once it is read.
        if self.model.weights is None and self.data.context > self.model.max_position_embeddings:
            raise ValueError(
                f"data.context {self.data.context} is longer than the model allows:"
                f" model.max_position_embeddings is {self.model.max_position_embeddings}"
            )
        if self.model.weights is None and (problems := list(misfits(self.layout, self.model))):
            raise ValueError("\n".join(problems))
        if self.rl is not None and (wrong := next(self._unfit_for_rl(self.rl), None)):
            raise ValueError(wrong)
        return self

    def _unfit_for_rl(self, rl: Rl) -> Iterator[str]:
        if rl.longest >= self.data.context:
            yield (
                f"rl.longest {rl.longest} leaves no room for a question: a conversation has at most data.context ="
                f" {self.data.context} tokens"
            )
        if self.audit.enabled:
            yield "audit.enabled: audits do not replay reinforcement learning yet; `equigrad verify` compares its steps"
        if rl.tp > self.layout.world_size:
            yield f"rl.tp {rl.tp} is more than the {self.layout.world_size} processes of the layout"
        if self.model.weights is None:
            for problem in misfits(Layout(tp=rl.tp), self.model):
                yield f"rl.tp {rl.tp}: {problem}"
