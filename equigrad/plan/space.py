"""Every layout that a job could have on so many GPUs: the space that ``plan.search`` searches. No seconds, no bytes.

What is left out, and why:

- what the configuration refuses (``config.fit``), and what would leave data lanes without a row
- ``gpipe``: it takes as long as ``1f1b`` and never less memory. ``zero_bubble`` with several stages a rank, with
  recomputation (which saves nothing there, and the cost model does not know it) and with ``numerics.compile``
- ``ulysses`` over more ranks than heads: the cost model does not know that some of them idle
- ``reshard_after_forward`` and ``reduce_every_round`` where weights are not sharded or
  there is a pipeline: a pipeline gathers and reduces once a step, whatever they say
- rows that are longer than another row with as many rounds: more padding and nothing gained
- offload and cuts between stages: a job has no key for them; stages are cut as training cuts them
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

from equigrad.config.fit import misfits
from equigrad.config.job import Job
from equigrad.config.layout import ContextStrategy, Layout
from equigrad.models.parts import cut_into_parts
from equigrad.plan.workload import Recompute, Workload
from equigrad.schedule.pipeline import PipelineKind

RECOMPUTE: tuple[tuple[Recompute, int], ...] = (("none", 1), ("block", 1), ("block", 2), ("block", 4))
"""What is computed again, and in which of how many blocks."""


class Choice(NamedTuple):
    """What is chosen beside the degrees and the order of the pipeline."""

    strategy: ContextStrategy
    micro_batch: int
    recompute: Recompute
    every: int


class Order(NamedTuple):
    """How a pipeline goes."""

    schedule: PipelineKind
    stages: int


@dataclass(frozen=True)
class Space:
    """The layouts of a job. ``base``: its workload on one device."""

    job: Job
    gpus: int
    base: Workload

    @classmethod
    def of(cls, job: Job, gpus: int) -> "Space":
        """``UserError`` for jobs whose cost is not known."""
        return cls(job, gpus, Workload.of(job.model_copy(update={"layout": Layout()})))

    @cached_property
    def samples(self) -> int:
        """Of a step, the last one short where tokens leave a rest."""
        return -(-(self.job.batch.tokens or 0) // self.job.data.context)

    def degrees(self) -> Iterator[Layout]:
        """All products of degrees that make the GPUs, each once."""
        experts = self.job.model.experts.num_experts if self.job.model.experts is not None else 1
        for tp in divisors(self.gpus):
            for pp in divisors(self.gpus // tp):
                if any(misfits(Layout(tp=tp, pp=pp), self.job.model)):
                    continue
                for cp, shard in product(divisors(self.gpus // tp // pp), repeat=2):
                    replicas, rest = divmod(self.gpus, tp * pp * cp * shard)
                    if rest or replicas * shard > self.samples:
                        continue
                    for ep in divisors(shard * cp):
                        if ep <= experts:
                            yield Layout(dp_replicate=replicas, dp_shard=shard, cp=cp, tp=tp, pp=pp, ep=ep)

    def choices(self, layout: Layout) -> Iterator[Choice]:
        """For one product of degrees."""
        strategies: list[ContextStrategy] = ["ring"]
        if layout.cp > 1 and layout.cp * layout.tp <= self.job.model.num_attention_heads:
            strategies.append("ulysses")
        of_lane = -(-self.samples // layout.data_lanes)
        sizes = sorted({-(-of_lane // rounds) for rounds in range(1, of_lane + 1)})
        for strategy, size, (recompute, every) in product(strategies, sizes, RECOMPUTE):
            yield Choice(strategy, size, recompute, every)

    def orders(self, layout: Layout, choice: Choice) -> Iterator[Order]:
        """Schedules and stages of each rank."""
        yield Order("1f1b", 1)
        if layout.pp == 1:
            return
        if choice.recompute == "none" and not self.job.numerics.compile:
            yield Order("zero_bubble", 1)
        yield from (Order("interleaved", n) for n in range(2, self.job.model.num_hidden_layers // layout.pp + 1))

    def works(self, layout: Layout, choice: Choice, order: Order) -> Iterator[Workload]:
        """What is left to choose: when sharded weights are freed, gradients reduced. The last does both early."""
        layout = layout.model_copy(
            update={"cp_strategy": choice.strategy, "pp_schedule": order.schedule, "pp_stages": order.stages}
        )
        free = layout.pp == 1 and layout.dp_shard * layout.cp > 1
        for reshard, reduces in product((False, True), repeat=2) if free else [(True, False)]:
            own = layout.model_copy(update={"reshard_after_forward": reshard, "reduce_every_round": reduces})
            yield self.work(own, choice)

    def work(self, layout: Layout, choice: Choice) -> Workload:
        """The job with a layout: what ``Workload.of`` makes of the job that ``overrides`` makes."""
        rows = -(-self.samples // (choice.micro_batch * layout.data_lanes))
        return replace(
            self.base, layout=layout, micro_batch=choice.micro_batch, micro_batches=rows, recompute=choice.recompute,
            recompute_every=choice.every, cuts=self._cuts(layout.pp * layout.pp_stages),
        )  # fmt: skip

    def _cuts(self, stages: int) -> tuple[int, ...]:
        if stages not in self._known:
            parts = cut_into_parts(self.job.model, stages, self.job.data.context)
            self._known[stages] = tuple(part.start for part in parts[1:])
        return self._known[stages]

    @cached_property
    def _known(self) -> dict[int, tuple[int, ...]]:
        return {}


def divisors(number: int) -> list[int]:
    """In order."""
    return [n for n in range(1, number + 1) if number % n == 0]


PLANNED = (
    "dp_replicate", "dp_shard", "cp", "cp_strategy", "tp", "pp", "pp_schedule", "pp_stages", "ep",
    "reshard_after_forward", "reduce_every_round",
)  # fmt: skip
"""Keys of a layout that a plan decides."""


def overrides(job: Job, work: Workload) -> dict[str, Any]:
    """By dotted key, what a plan changes in the job."""
    wanted = {f"layout.{key}": getattr(work.layout, key) for key in PLANNED}
    wanted |= {
        "batch.row_tokens": work.micro_batch * work.sequence,
        "memory.recompute": work.recompute,
        "memory.recompute_every": work.recompute_every,
    }
    return {key: value for key, value in wanted.items() if value != _value(job, key)}


def words(changes: dict[str, Any]) -> list[str]:
    """The same as words of a command line."""
    shown = {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in changes.items()}
    return [word for key, value in shown.items() for word in (f"--{key}", value)]


def _value(job: Job, key: str) -> Any:
    section, _, leaf = key.partition(".")
    return getattr(getattr(job, section), leaf)
