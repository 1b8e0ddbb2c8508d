"""One step, divided: which rank holds which tokens of which samples in which round. From degrees and what is known of
samples.

What a step executes and what `equigrad schedule` draws come from the same functions. Torch-free; knows no tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from equigrad.config import Job
from equigrad.config.layout import Layout
from equigrad.config.model import Model
from equigrad.data.samples import SampleRef
from equigrad.models.parts import Part, cut_into_parts
from equigrad.models.specs import layer_flops
from equigrad.parallel.partition import Partition, Range, part_of, segments_within
from equigrad.schedule.packing import Packing, Schedule, plan
from equigrad.schedule.pipeline import (
    Cost,
    PipelineSchedule,
    Simulation,
    forward_pipeline,
    pipeline,
    simulate,
    sized_cost,
)

_OF_ANY_ROW = 1e-3
"""What a row costs a pipeline stage however short it is, in rows of the costliest."""


def sample_costs(samples: Sequence[SampleRef], model: Model) -> list[float]:
    """Operations of each sample, forward and backward, were all parameters trained. Of what is out of the loss the head
    computes nothing."""
    layers, head = layer_flops(model)
    blocks = {n: n * sum(layer((n + 1) / 2) for layer in layers) for n in {sample.length for sample in samples}}
    return [blocks[sample.length] + sample.loss_tokens * head for sample in samples]


def schedule_samples(
    samples: Sequence[SampleRef], model: Model, lanes: int, row_tokens: int, packing: Packing
) -> Schedule:
    """The schedule of these samples, balanced by the operations each of them costs."""
    return plan(samples, sample_costs(samples, model), lanes, row_tokens, packing)


def pipeline_order(layout: Layout, schedule: Schedule, backward: bool = True) -> tuple[PipelineSchedule, Cost]:
    """The pipeline's schedule, whose micro-batches are the rounds, and the cost by which it is played: that of the
    costliest row of each round, since every lane goes by the same program."""
    rounds, most = len(schedule.costs), max(schedule.costs)
    if backward:
        order = pipeline(layout.pp_schedule, layout.pp, layout.pp_stages, rounds)
    else:
        order = forward_pipeline(layout.pp, layout.pp_stages, rounds)
    return order, sized_cost([_OF_ANY_ROW + cost / most for cost in schedule.costs])


@dataclass(frozen=True)
class Piece:
    """Tokens [start, stop) of a sample, which lie in the row from ``at`` on."""

    sample: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True)
class Share:
    """What a context rank holds of a row.

    pieces: in the order in which it holds them
    tensor: tokens of each of its tensor ranks in the residual stream, in the order of the pieces
    """

    pieces: tuple[Piece, ...]
    tensor: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(piece.stop - piece.start for piece in self.pieces)


@dataclass(frozen=True)
class DividedRow:
    """``samples``: their numbers and lengths, in row order; ``shares``: of each context rank."""

    samples: tuple[tuple[int, int], ...]
    shares: tuple[Share, ...]

    @property
    def tokens(self) -> int:
        return sum(length for _, length in self.samples)


@dataclass(frozen=True)
class Division:
    """A step.

    rounds:   ``rounds[r][lane]``
    kinds:    modality of each round
    costs:    operations of each sample
    stages:   the blocks of each pipeline stage
    timeline: the pipeline, played; None without one
    """

    name: str
    step: int
    layout: Layout
    experts: int | None
    samples: tuple[SampleRef, ...]
    costs: tuple[float, ...]
    rounds: tuple[tuple[DividedRow, ...], ...]
    kinds: tuple[str, ...]
    stages: tuple[Part, ...]
    timeline: Simulation | None

    @property
    def tokens(self) -> int:
        """Real tokens: those of the samples."""
        return sum(sample.length for sample in self.samples)

    @property
    def loss_tokens(self) -> int:
        """Labels that are in the loss."""
        return sum(sample.loss_tokens for sample in self.samples)

    @cached_property
    def executed_tokens(self) -> int:
        """Tokens that the ranks of one pipeline stage compute, each counted where it is computed."""
        return sum(sum(share.tensor) for rows in self.rounds for row in rows for share in row.shares)

    @property
    def empty_rows(self) -> int:
        return sum(not row.samples for rows in self.rounds for row in rows)

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max((row.tokens for rows in self.rounds for row in rows), default=0)

    @property
    def bubble(self) -> float:
        """The share of the pipeline ranks' time in which they wait."""
        return self.timeline.bubble if self.timeline else 0.0

    @cached_property
    def imbalance(self) -> float:
        """The costliest lane's operations over the mean lane's; 1 where all have the same."""
        lanes = [sum(costs) for costs in zip(*self._row_costs, strict=True)]
        return max(lanes) * len(lanes) / sum(lanes)

    @cached_property
    def round_imbalance(self) -> float:
        """The same where lanes wait for each other after every round."""
        total = sum(map(sum, self._row_costs))
        return sum(max(costs) for costs in self._row_costs) * self.layout.data_lanes / total

    @cached_property
    def _row_costs(self) -> list[list[float]]:
        return [[sum(self.costs[sample] for sample, _ in row.samples) for row in rows] for rows in self.rounds]

    def ranks(self, lane: int, context: int | None = None) -> list[int]:
        """The processes of a lane, or those of one of its context ranks: of all pipeline and tensor ranks."""
        layout = self.layout
        contexts = range(layout.cp) if context is None else [context]
        return sorted(
            layout.rank_of(pipe, lane, one, tensor)
            for pipe in range(layout.pp)
            for one in contexts
            for tensor in range(layout.tp)
        )

    def experts_of(self, rank: int) -> Range:
        """The experts that an expert rank has."""
        return part_of(self.experts or 0, self.layout.ep, rank)


def divide(job: Job, samples: Sequence[SampleRef], step: int) -> Division:
    """Divide a step's samples as training will. The job is resolved."""
    layout = job.layout
    schedule = schedule_samples(samples, job.model, layout.data_lanes, job.batch.row_tokens, job.batch.packing)
    rounds = tuple(tuple(_divide_row(row, samples, layout) for row in round_) for round_ in schedule.rounds)
    timeline = simulate(*pipeline_order(layout, schedule)) if layout.pp > 1 else None
    return Division(
        name=job.name,
        step=step,
        layout=layout,
        experts=None if job.model.experts is None else job.model.experts.num_experts,
        samples=tuple(samples),
        costs=tuple(sample_costs(samples, job.model)),
        rounds=rounds,
        kinds=schedule.modalities,
        stages=cut_into_parts(job.model, layout.pp * layout.pp_stages, job.data.context),
        timeline=timeline,
    )


def _divide_row(row: Sequence[int], samples: Sequence[SampleRef], layout: Layout) -> DividedRow:
    sizes = [samples[sample].length for sample in row]
    partition = Partition.of_row(sum(sizes), layout.cp, layout.zigzag)
    shares = []
    for ranges in partition.ranges:
        pieces = tuple(piece for own in _joined(ranges) for piece in _pieces(row, sizes, own))
        held = sum(stop - start for start, stop in ranges)
        shares.append(Share(pieces, Partition.contiguous(held, layout.tp).lengths))
    return DividedRow(tuple(zip(row, sizes, strict=True)), tuple(shares))


def _joined(ranges: Sequence[Range]) -> list[Range]:
    """The same tokens, ranges that touch being one."""
    if len(ranges) == 2 and ranges[0][1] == ranges[1][0]:
        return [(ranges[0][0], ranges[1][1])]
    return list(ranges)


def _pieces(row: Sequence[int], sizes: Sequence[int], own: Range) -> Iterator[Piece]:
    first = 0
    for sample, size in zip(row, sizes, strict=True):
        for start, stop in segments_within([size], own[0] - first, own[1] - first):
            yield Piece(sample, start, stop, first + start)
        first += size
