"""The training loop, readable as the algorithm: batch -> schedule -> forward and backward -> update -> save."""

import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from equigrad.build import build_model
from equigrad.checkpoint.rng import rng_state, set_rng_state
from equigrad.checkpoint.state import Checkpointer, load
from equigrad.config import Job
from equigrad.data.stream import Batch, Stream
from equigrad.errors import UserError
from equigrad.evaluation import Evaluation, evaluate
from equigrad.models.balance import Balance
from equigrad.numerics.routing import Loads
from equigrad.objectives.language_model import language_model
from equigrad.objectives.load_balance import load_balance
from equigrad.observe.profile import StepProfiler
from equigrad.optim.adamw import AdamW
from equigrad.optim.norm import clip, local_square_sum
from equigrad.optim.schedule import learning_rate
from equigrad.parallel.launch import StopRequest
from equigrad.parallel.placement import Placed, local_part
from equigrad.parallel.sharding import add_up, reduce_gradients
from equigrad.parallel.world import World
from equigrad.rows import row_tensors, schedule_samples
from equigrad.schedule.packing import Schedule


class Trainer:
    """One run on this rank. Its whole state is: parameters, optimizer, loads, data cursor, counters, generators."""

    def __init__(self, job: Job, folder: Path, world: World, stream: Stream) -> None:
        self.job, self.folder, self.world, self.stream = job, folder, world, stream
        self.model = build_model(job, world)
        self.parameters = self.model.placed()
        self.optimizer = AdamW(job.optim, self.parameters, self.model.specs)
        self.balance = Balance(job.model, self.parameters, world.device, world.rank)
        self.checkpointer = Checkpointer(folder / "checkpoints", job.checkpoint)
        self.step = 0
        self.counters: dict[str, Any] = {"tokens": 0, "skipped": 0, "skipped_in_a_row": 0}
        self.counters |= {"step_seconds": 0.0, "wall_seconds": 0.0}

    def run(self, observer: "Observer", stop: StopRequest) -> bool:
        """Train up to ``train.steps``. Returns whether that was reached; False: a stop was asked for."""
        job, saved = self.job, self.step if self.step else -1
        profiler = StepProfiler(job.observe.profile_steps if self.world.is_main else None, self.folder)
        stopped, mark = False, time.perf_counter()
        with closing(profiler), closing(self.checkpointer):
            while self.step < job.train.steps and not stopped:
                began = time.perf_counter()
                self.counters["wall_seconds"] += began - mark
                mark = began
                with profiler.step(self.step + 1):
                    batch = self.stream.next_batch()
                    record, stopped = self.update(batch, stop)
                seconds = time.perf_counter() - began
                self.counters["step_seconds"] += seconds
                observer.step(record | {"step_seconds": seconds}, batch)
                if job.train.eval_every and self.step % job.train.eval_every == 0 and self.step < job.train.steps:
                    observer.evaluation(self.step, self.evaluate(job.train.eval_tokens))
                if job.checkpoint.every and self.step % job.checkpoint.every == 0:
                    self.save()
                    saved = self.step
            if saved != self.step:
                self.save()
        self.counters["wall_seconds"] += time.perf_counter() - mark
        return self.step >= job.train.steps

    def update(self, batch: Batch, stop: StopRequest) -> tuple[dict[str, Any], bool]:
        """One step: gradients of the batch, checks on all ranks together, update, counters.

        Returns the step's record and whether any rank was asked to stop. A step that is empty or not finite is refused
        before any state changes.
        """
        job, world = self.job, self.world
        if batch.loss_tokens == 0:
            raise RuntimeError(f"step {self.step + 1} has no token in the loss; nothing was changed")
        schedule = schedule_samples(batch.samples, job.model, world.lanes, job.batch.row_tokens, job.batch.packing)
        world.agree([schedule.digest, self.stream.cursor()], f"the schedule of step {self.step + 1}")
        shares, executed = self.forward_backward(batch, schedule)
        gradients = self.gradients()
        square = float(local_square_sum(gradients.values()))
        loss, balance, square, executed_tokens, asked = world.sum([*shares, square, float(executed), float(stop.asked)])
        counts = world.add(self.balance.take())
        norm = square**0.5
        lr = learning_rate(job.optim, self.step, job.train.steps)
        self._apply(gradients, loss, norm, lr, counts)
        self.step += 1
        self.counters["tokens"] += batch.tokens
        record = {"kind": "step", "step": self.step, "loss": loss, "lr": lr, "grad_norm": norm, "tokens": batch.tokens,
                  "executed_tokens": int(executed_tokens), "loss_tokens": batch.loss_tokens,
                  "total_tokens": self.counters["tokens"], "skipped": self.counters["skipped"]}  # fmt: skip
        if self.balance.layers:
            record |= {"balance_loss": balance} | self.balance.metrics(counts)
        return record, asked > 0

    def forward_backward(self, batch: Batch, schedule: Schedule) -> tuple[list[float], int]:
        """Accumulate the gradients of this lane's rows. Returns this rank's share of the loss and of the load-balancing
        term, and the tokens it computed."""
        rows = schedule.lane(self.world.lane)
        shares, executed = [], 0
        for number, row in enumerate(rows):
            reduce_gradients(self.model, self.job.layout.reduce_every_round or number == len(rows) - 1)
            tensors = row_tensors(self.stream, [batch.samples[i] for i in row], self.world)
            loads = Loads()
            losses = self.model(tensors.ids, tensors.row, tensors.labels, tensors.at, loads)
            terms = [language_model(losses, batch.loss_tokens), self._balance_term(loads, batch.tokens)]
            torch.stack(terms).sum().backward()
            shares.append(torch.stack(terms).detach().double())
            self.balance.count(loads)
            executed += len(tensors.ids)
        loss, balance = torch.stack(shares).sum(0).tolist()
        # Of the loss all tensor ranks have the same share; of the routers' tokens each has its own.
        return ([loss, balance], executed) if self.world.counts else ([0.0, balance], 0)

    def _balance_term(self, loads: Loads, tokens: int) -> torch.Tensor:
        """A row's share of the load-balancing term, its coefficient applied."""
        experts = self.job.model.experts
        if experts is None or not experts.router_aux_loss_coef:
            return torch.zeros((), device=self.world.device)
        probabilities = [load.probability for load in loads.layers]
        return load_balance(probabilities, self.balance.shares(), tokens) * experts.router_aux_loss_coef

    def gradients(self) -> dict[str, Placed]:
        """The accumulated gradients, each in its parameter's place."""
        local = {n: local_part(p.grad) for n, p in self.model.named_parameters() if p.grad is not None}
        add_up([g for n, g in local.items() if self.model.specs[n].tensor is None], self.world.axis("tp"))
        return {n: Placed(self.parameters[n].placement, gradient) for n, gradient in local.items()}

    def _apply(self, gradients: dict[str, Placed], loss: float, norm: float, lr: float, counts: torch.Tensor) -> None:
        """Update the parameters and what is known of the experts, or refuse the step if it is not finite."""
        job, finite = self.job, torch.isfinite(torch.tensor([loss, norm])).all()
        if finite:
            if job.optim.clip_norm > 0:
                clip(gradients.values(), norm, job.optim.clip_norm)
            self.optimizer.step(gradients, lr)
            self.balance.update(counts)
            self.counters["skipped_in_a_row"] = 0
        self.model.zero_grad(set_to_none=True)
        if finite:
            return
        what = f"step {self.step + 1}: loss {loss}, gradient norm {norm}"
        if job.train.non_finite == "stop":
            raise UserError(
                f"{what}: not finite, nothing was changed, checkpoints least of all."
                ' Lower optim.lr, look at the data, or leave such steps out with train.non_finite = "skip"'
            )
        self.counters["skipped"] += 1
        self.counters["skipped_in_a_row"] += 1
        if self.counters["skipped_in_a_row"] > job.train.max_skips:
            raise UserError(
                f"{what}: not finite, more than train.max_skips = {job.train.max_skips} in a row; the run stops"
            )

    def evaluate(self, max_tokens: int | None = None) -> Evaluation | None:
        """Held-out loss; None where nothing is held out."""
        held_out = self.stream.held_out(max_tokens)
        return evaluate(self.model, self.stream, held_out, self.job, self.world) if held_out.samples else None

    def state(self) -> dict[str, Placed]:
        """Every tensor of the run, under the names that checkpoints use."""
        model = {f"model.{n}": p.renamed(f"model.{n}") for n, p in self.parameters.items()}
        optimizer = {f"optim.{n}": p.renamed(f"optim.{n}") for n, p in self.optimizer.state().items()}
        return model | optimizer | self.balance.state()

    def save(self) -> None:
        """Checkpoint the state after the current step."""
        meta = {"step": self.step, "counters": self.counters, "cursor": self.stream.cursor(),
                "updates": self.optimizer.updates}  # fmt: skip
        self.checkpointer.save(self.step, self.state(), meta, {"rng": rng_state()})

    def resume(self, checkpoint: Path) -> None:
        """Take up the state of a checkpoint, written on any layout."""
        manifest = load(checkpoint, self.state())
        meta = manifest.meta
        self.step, self.counters = meta["step"], meta["counters"]
        self.optimizer.updates = meta["updates"]
        self.stream.seek(meta["cursor"])
        if len(manifest.rank_meta) == self.world.size:  # on another layout the generators start anew
            set_rng_state(manifest.rank_meta[self.world.rank]["rng"])


class Observer:
    """What the loop tells the outside. The default says nothing; the command line shows, writes and reports."""

    def step(self, record: dict[str, Any], batch: Batch) -> None:
        """After every step, on every rank."""

    def evaluation(self, step: int, result: Evaluation | None) -> None:
        """After every evaluation, on every rank."""
