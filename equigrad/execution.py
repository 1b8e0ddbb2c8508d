"""Runs the rows of a schedule through this rank's parts of the model: forward and backward, losses alone, or logits.

Without a pipeline that is a loop over rows. With one, rows are its micro-batches, and a program says which part
computes which row when. Either way a row may be empty, and every parameter gets a gradient.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from equigrad.config import Job
from equigrad.data.samples import Reader, Sample, SampleRef
from equigrad.data.stream import Batch
from equigrad.models.balance import Balance
from equigrad.models.decoder import Decoder
from equigrad.numerics.deferred import DeferredWeightGradients
from equigrad.numerics.ops import Ops
from equigrad.numerics.routing import Loads
from equigrad.numerics.row import Row
from equigrad.objectives.language_model import language_model
from equigrad.objectives.load_balance import load_balance
from equigrad.objectives.objective import LanguageModel, Objective
from equigrad.parallel.pipeline import Hidden, run_pipeline
from equigrad.parallel.ranks import gather
from equigrad.parallel.sharding import reduce_gradients
from equigrad.parallel.world import World
from equigrad.rows import RowTensors, further_loss_tokens, row_tensors
from equigrad.schedule.division import pipeline_order
from equigrad.schedule.packing import Schedule
from equigrad.schedule.pipeline import programs

Term = Callable[[Tensor, Mapping[str, Tensor], Ops], tuple[Tensor, Tensor | None]]
"""Losses of a row's tokens, and what is known of them -> a scalar, added up over rows, and what is told besides."""
BalanceTerm = Callable[[Loads], Tensor | None]

_NUMBER = "number"
"""A stream of ``score``: which of all tokens a token is."""
_MOST_NATS = 32
"""All losses of held-out text are below 2^32 nats."""


@dataclass(frozen=True)
class Outcome:
    """What this rank has to tell of some rows; added over all ranks it is the whole.

    loss:    sum of the losses, each over the normaliser, where this rank computes and counts them, else 0
    further: sum of the losses of multi-token prediction, the mean over its modules, where ``loss`` is counted
    tokens:  tokens that it computed, counted once
    sums:    what the objective tells besides, where ``loss`` is counted
    peaks:   the same, of which the largest of all ranks counts
    """

    loss: float
    further: float
    tokens: int
    sums: tuple[float, ...] = ()
    peaks: tuple[float, ...] = ()


class Execution:
    """
    parts:     this rank's, by their numbers among all parts of the model
    balance:   takes up how the routers spread the tokens; not needed where nothing is trained
    objective: what training minimises
    """

    def __init__(
        self,
        job: Job,
        world: World,
        parts: Mapping[int, Decoder],
        balance: Balance | None = None,
        objective: Objective | None = None,
    ) -> None:
        self._job, self._world, self._parts, self._balance = job, world, parts, balance
        self._objective = objective or LanguageModel()
        self._pipeline = world.axis("pp")

    def train(self, stream: Reader, batch: Batch, schedule: Schedule) -> Outcome:
        """Accumulate the gradients of this lane's rows in the parameters."""
        model, layout = self._job.model, self._job.layout
        rows = list(self._rows(stream, batch.samples, schedule, model.mtp_layers, self._objective.streams))
        term = partial(self._objective, normaliser=batch.loss_tokens)
        work = _Work(rows, term, self._balance_term(batch.tokens), batch.temperature)
        if model.mtp_layers:
            depths = range(1, model.mtp_layers + 1)
            work.counts = [further_loss_tokens(stream, batch.samples, depth) for depth in depths]
            work.coefficient = model.mtp_loss_coef
        if self._pipeline.size > 1:
            return self._piped(work, schedule, backward=True)
        losses, (part,) = [], self._parts.values()
        for number in range(len(rows)):
            reduce_gradients(part, layout.reduce_every_round or number == len(rows) - 1)
            loss = work.forward(part, None, number)
            loss.backward()
            losses.append(loss.detach())
        return self._outcome(losses, work)

    def _balance_term(self, tokens: int) -> "BalanceTerm | None":
        """The load-balancing term of a row's loads, its coefficient applied; None where there is none."""
        experts, balance = self._job.model.experts, self._balance
        if experts is None or balance is None:
            return None

        def term(loads: Loads) -> Tensor | None:
            balance.count(loads)
            if not loads or not experts.router_aux_loss_coef:
                return None
            probabilities = [load.probability for load in loads.values()]
            shares = balance.shares(loads)
            return load_balance(probabilities, shares, balance.layers, tokens) * experts.router_aux_loss_coef

        return term

    @torch.no_grad()
    def evaluate(self, stream: Reader, samples: Sequence[SampleRef], schedule: Schedule) -> Outcome:
        """The sum of the losses of this lane's rows."""
        rows = self._rows(stream, samples, schedule)
        if self._pipeline.size > 1:
            return self._piped(_Work(list(rows), _total, None), schedule, backward=False)
        losses, work, (model,) = [], _Work([], _total, None), self._parts.values()
        for row in rows:  # made one by one, for a held-out set may be large
            one = _Work([row], _total, None)
            losses.append(one.forward(model, None, 0))
            work.tokens += one.tokens
        return self._outcome(losses, work)

    @torch.no_grad()
    def score(
        self, stream: Reader, samples: Sequence[SampleRef], schedule: Schedule, temperature: float = 1.0
    ) -> list[np.ndarray]:
        """Of each sample, the log-probability of each of its labels at a temperature, float32 [length]; NaN where that
        is not in the loss. On every rank; a collective."""
        found: list[tuple[np.ndarray, np.ndarray]] = []

        def kept(losses: Tensor, known: Mapping[str, Tensor], ops: Ops) -> tuple[Tensor, None]:
            found.append((known[_NUMBER].long().cpu().numpy(), losses.cpu().numpy()))
            return _total(losses, known, ops)

        starts = np.cumsum([0, *(sample.length for sample in samples)]).tolist()
        numbered = _Numbered(stream, dict(zip(samples, starts, strict=False)))
        work = _Work(list(self._rows(numbered, samples, schedule, known=(_NUMBER,))), kept, None, temperature)
        if self._pipeline.size > 1:
            self._piped(work, schedule, backward=False)
        else:
            for number in range(len(work.rows)):
                work.forward(self._parts[0], None, number)
        whole = np.full(starts[-1], np.nan, np.float32)
        own = found if self._world.axis("tp").rank == 0 else []  # all tensor ranks have the same
        for of_rank in gather(own):
            for numbers, losses in of_rank:
                whole[numbers] = 0.0 - losses
        return np.split(whole, starts[1:-1])

    def _rows(
        self,
        stream: Reader,
        samples: Sequence[SampleRef],
        schedule: Schedule,
        further: int = 0,
        known: Sequence[str] = (),
    ) -> Iterator[RowTensors]:
        for row in schedule.lane(self._world.lane):
            yield row_tensors(stream, [samples[i] for i in row], self._world, further, known)

    def _piped(self, work: "_Work", schedule: Schedule, *, backward: bool) -> Outcome:
        program = programs(*pipeline_order(self._job.layout, schedule, backward))[self._pipeline.rank]
        width, rows = self._job.model.hidden_size, work.rows
        hidden = Hidden(lambda _, row: (rows[row].row.residual_tokens, width), torch.float32, self._world.device)
        stages = {number: _Stage(part, work) for number, part in self._parts.items()}
        losses = run_pipeline(program, stages, hidden, DeferredWeightGradients, self._pipeline.group)
        return self._outcome([losses[number] for number in sorted(losses)], work)

    def _outcome(self, losses: Sequence[Tensor], work: "_Work") -> Outcome:
        sums, peaks = self._objective.sums, self._objective.peaks
        if self._world.axis("tp").rank > 0:  # all tensor ranks have the same
            return Outcome(0.0, 0.0, 0, (0.0,) * sums, (0.0,) * peaks)
        told = torch.stack(work.told) if work.told else torch.zeros(1, sums + peaks)
        tokens = work.tokens if self._pipeline.rank == 0 else 0
        added, largest = told[:, :sums].sum(0).tolist(), told[:, sums:].amax(0).tolist()
        return Outcome(_added(losses), _added(work.further), tokens, tuple(added), tuple(largest))


def _added(values: Sequence[Tensor]) -> float:
    """Their sum in float64."""
    return float(torch.stack([value.double() for value in values]).sum()) if values else 0.0


class _Numbered:
    """A reader whose tokens know which of all tokens they are. ``starts``: of each sample, the number of its first."""

    def __init__(self, reader: Reader, starts: Mapping[SampleRef, int]) -> None:
        self._reader, self._starts = reader, starts

    def read(self, ref: SampleRef) -> Sample:
        sample = self._reader.read(ref)
        return Sample({**sample.streams, _NUMBER: self._starts[ref] + np.arange(len(sample))})


def _total(losses: Tensor, known: Mapping[str, Tensor], ops: Ops) -> tuple[Tensor, None]:
    return ops.total(losses, _MOST_NATS), None


class _Work:
    """What is to be computed of some rows, and the further terms of the loss that came of it.

    tokens:      this rank's, of all rows
    told:        what the objective tells of each row besides
    temperature: of the loss
    further:     losses of multi-token prediction, one for each row, the mean over the modules
    counts:      the normaliser of each module
    coefficient: what their mean is multiplied by
    """

    def __init__(
        self, rows: Sequence[RowTensors], term: Term, balance_term: "BalanceTerm | None", temperature: float = 1.0
    ) -> None:
        self.rows, self._term, self._balance_term, self._temperature = rows, term, balance_term, temperature
        self.tokens = sum(len(row.ids) for row in self.rows)
        self.told: list[Tensor] = []
        self.further: list[Tensor] = []
        self.counts: list[int] = []
        self.coefficient = 0.0

    def forward(self, part: Decoder, x: Tensor | None, number: int) -> Tensor:
        """One row through one part: the residual stream that leaves it, or the row's term of the loss."""
        row, loads = self.rows[number], Loads()
        y = part(row.ids, row.row, row.labels, row.at, x, loads, row.ahead, self._temperature)
        if part.part.last:
            own, *further = y if row.ahead else (y,)
            y, told = self._term(own, row.known, part.ops)
            if told is not None:
                self.told.append(told)
            if further:
                # No label at all is so far ahead: then none is counted, and the sum over none is zero.
                modules = len(further)
                each = zip(further, self.counts, strict=True)
                term = sum(language_model(loss, part.ops, max(n, 1) * modules) for loss, n in each)
                assert isinstance(term, Tensor)
                self.further.append(term.detach())
                y = _WithTerm.apply(y, term * self.coefficient)
        balance = None if self._balance_term is None else self._balance_term(loads)
        if balance is None:
            return y
        return _WithTerm.apply(y, balance)


class _WithTerm(torch.autograd.Function):
    """``y``, and in the backward pass the gradient of a term of the loss that depends on what made ``y``."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, term: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        return dy, torch.ones((), device=dy.device)


@dataclass(frozen=True)
class _Stage:
    """A part of the model as the pipeline sees it."""

    module: Decoder
    work: _Work

    def forward(self, x: Tensor | None, microbatch: int) -> Tensor:
        return self.work.forward(self.module, x, microbatch)


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
