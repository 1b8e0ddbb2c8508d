"""Runs the rows of a schedule through this rank's parts of the model: forward and backward, losses alone, or logits.

Without a pipeline that is a loop over rows. With one, rows are its micro-batches, and a program says which part
computes which row when. Either way a row may be empty, and every parameter gets a gradient.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from equigrad.config import Job
from equigrad.data.samples import SampleRef
from equigrad.data.stream import Stream
from equigrad.models.decoder import Decoder
from equigrad.numerics.deferred import DeferredWeightGradients
from equigrad.numerics.row import Row
from equigrad.objectives.language_model import language_model
from equigrad.parallel.pipeline import Hidden, run_pipeline
from equigrad.parallel.sharding import reduce_gradients
from equigrad.parallel.world import World
from equigrad.rows import RowTensors, row_tensors
from equigrad.schedule.packing import Schedule
from equigrad.schedule.pipeline import PipelineSchedule, forward_pipeline, pipeline, programs, sized_cost

Term = Callable[[Tensor], Tensor]
"""Losses of a row's tokens -> what is added up over rows, a scalar."""


@dataclass(frozen=True)
class Outcome:
    """What this rank has to tell of some rows; added over all ranks it is the whole.

    loss:     sum of the terms, float64, where this rank computes and counts them, else 0
    tokens:   tokens that it computed, counted once
    """

    loss: float
    tokens: int


class Execution:
    """``parts``: this rank's, by their numbers among all parts of the model."""

    def __init__(self, job: Job, world: World, parts: Mapping[int, Decoder]) -> None:
        self._job, self._world, self._parts, self._pipeline = job, world, parts, world.axis("pp")

    def train(self, stream: Stream, samples: Sequence[SampleRef], schedule: Schedule, normaliser: int) -> Outcome:
        """Accumulate the gradients of this lane's rows in the parameters."""
        rows = self._rows(stream, samples, schedule)
        term = partial(language_model, normaliser=normaliser)
        if self._pipeline.size > 1:
            layout = self._job.layout
            order = pipeline(layout.pp_schedule, self._pipeline.size, layout.pp_stages, len(rows))
            return self._piped(order, rows, samples, schedule, term)
        losses, (model,) = [], self._parts.values()
        for number, row in enumerate(rows):
            reduce_gradients(model, self._job.layout.reduce_every_round or number == len(rows) - 1)
            loss = term(model(row.ids, row.row, row.labels, row.at))
            loss.backward()
            losses.append(loss.detach())
        return self._outcome(losses, rows)

    @torch.no_grad()
    def evaluate(self, stream: Stream, samples: Sequence[SampleRef], schedule: Schedule) -> Outcome:
        """The sum of the losses of this lane's rows."""
        rows = self._rows(stream, samples, schedule)
        if self._pipeline.size > 1:
            order = forward_pipeline(self._pipeline.size, self._job.layout.pp_stages, len(rows))
            return self._piped(order, rows, samples, schedule, _total)
        (model,) = self._parts.values()
        return self._outcome([_total(model(row.ids, row.row, row.labels, row.at)) for row in rows], rows)

    def _rows(self, stream: Stream, samples: Sequence[SampleRef], schedule: Schedule) -> list[RowTensors]:
        lane = schedule.lane(self._world.lane)
        return [row_tensors(stream, [samples[i] for i in row], self._world) for row in lane]

    def _piped(
        self,
        order: PipelineSchedule,
        rows: Sequence[RowTensors],
        samples: Sequence[SampleRef],
        schedule: Schedule,
        term: Term,
    ) -> Outcome:
        """Every lane goes by the same program, made for the longest row of each round."""
        longest = [max(sum(samples[i].length for i in row) for row in round_) for round_ in schedule.rounds]
        program = programs(order, sized_cost([1.0 + tokens for tokens in longest]))[self._pipeline.rank]
        width = self._job.model.hidden_size
        hidden = Hidden(lambda _, row: (rows[row].row.residual_tokens, width), torch.float32, self._world.device)
        stages = {number: _Stage(part, rows, term) for number, part in self._parts.items()}
        losses = run_pipeline(program, stages, hidden, DeferredWeightGradients, self._pipeline.group)
        return self._outcome([losses[number] for number in sorted(losses)], rows)

    def _outcome(self, losses: Sequence[Tensor], rows: Sequence[RowTensors]) -> Outcome:
        counts = self._world.axis("tp").rank == 0  # tensor ranks have the same losses of the same tokens
        loss = float(torch.stack([loss.double() for loss in losses]).sum()) if counts and losses else 0.0
        first = counts and self._pipeline.rank == 0
        return Outcome(loss, sum(len(row.ids) for row in rows) if first else 0)


def _total(losses: Tensor) -> Tensor:
    return losses.double().sum()


@dataclass(frozen=True)
class _Stage:
    """A part of the model as the pipeline sees it."""

    module: Decoder
    rows: Sequence[RowTensors]
    term: Term

    def forward(self, x: Tensor | None, microbatch: int) -> Tensor:
        row = self.rows[microbatch]
        y = self.module(row.ids, row.row, row.labels, row.at, x)
        return self.term(y) if self.module.part.last else y


class WholeModel:
    """The parts of all pipeline ranks as one model that gives logits, as decoding wants it. All ranks call it alike."""

    def __init__(self, world: World, parts: Mapping[int, Decoder]) -> None:
        self._pipeline, self._parts = world.axis("pp"), parts
        one = next(iter(parts.values()))
        self.config, self.ops, self.device = one.config, one.ops, world.device

    def __call__(self, ids: Tensor, row: Row, *, at: Tensor | None = None) -> Tensor:
        """Logits [n, V] of the tokens ``at``, on every rank."""
        pipe, x = self._pipeline, torch.empty(0)
        if pipe.group is None:
            return self._parts[0](ids, row, at=at)
        stages = pipe.size * len(self._parts)
        for stage in range(stages):
            if stage in self._parts:
                x = self._parts[stage](ids, row, at=at, x=x if stage else None)
            source, target = stage % pipe.size, (stage + 1) % pipe.size
            if stage + 1 < stages and pipe.rank == source:
                dist.send(x.contiguous(), group=pipe.group, group_dst=target)
            elif stage + 1 < stages and pipe.rank == target:
                x = torch.empty(row.residual_tokens, self.config.hidden_size, device=self.device)
                dist.recv(x, group=pipe.group, group_src=source)
        count = len(ids) if at is None else len(at)
        last = (stages - 1) % pipe.size
        if pipe.rank != last:
            x = torch.empty(count, self.config.vocabulary, device=self.device)
        dist.broadcast(x := x.float().contiguous(), group=pipe.group, group_src=last)
        return x
