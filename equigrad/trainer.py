"""The training loop, readable as the algorithm: batch -> schedule -> forward and backward -> update -> save."""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from equigrad.build import build_parts
from equigrad.checkpoint.rng import rng_state, set_rng_state
from equigrad.checkpoint.state import Checkpointer, load
from equigrad.config import Job
from equigrad.data.stream import Batch, Batches
from equigrad.errors import UserError
from equigrad.evaluation import HeldOutResult, Stopped, evaluate
from equigrad.execution import Execution, Outcome
from equigrad.models.balance import Balance
from equigrad.models.decoder import Decoder
from equigrad.models.parts import EMBEDDING
from equigrad.models.specs import parameter_specs
from equigrad.numerics.exact.channels import Grids
from equigrad.numerics.ops import COMPUTE_DTYPES
from equigrad.objectives.objective import LanguageModel, Objective
from equigrad.observe.profile import StepProfiler
from equigrad.optim.arithmetic import Arithmetic, Native
from equigrad.optim.exact import Exact, exact_norm
from equigrad.optim.norm import clip, local_square_sum
from equigrad.optim.optimizer import Optimizer
from equigrad.optim.schedule import learning_rate
from equigrad.parallel.placement import Placed, local_part
from equigrad.parallel.ranks import SharedUserError
from equigrad.parallel.sharding import add_ends, add_up
from equigrad.parallel.stop import StopRequest
from equigrad.parallel.world import World
from equigrad.schedule.division import schedule_samples
from equigrad.schedule.packing import Schedule

_MOST_PASSES = 4
"""Of one step in exact numerics: grids are raised to what was seen, and the second pass sees the same."""


class Trainer:
    """One run on this rank. Its whole state: parameters, optimizer, loads, grids, data cursor, counters, generators."""

    def __init__(
        self, job: Job, folder: Path, world: World, stream: Batches, objective: Objective | None = None
    ) -> None:
        """``objective``: what is minimised; by default the cross-entropy of the tokens in the loss."""
        self.job, self.folder, self.world, self.stream = job, folder, world, stream
        self.objective = objective or LanguageModel()
        if job.model.mtp_layers and objective is not None:
            raise UserError(
                f"model.mtp_layers = {job.model.mtp_layers}: multi-token prediction imitates every token in the loss;"
                " train it with cross-entropy alone"
            )
        self.parts = build_parts(job, world)
        self.specs = parameter_specs(job.model, job.lora)
        self.parameters = {name: placed for part in self.parts.values() for name, placed in part.placed().items()}
        self.balance = Balance(job.model, self.parameters, world.device, world.rank)
        self.execution = Execution(job, world, self.parts, self.balance, self.objective)
        self.grids: Grids | None = next(iter(self.parts.values())).grids
        self.redone = 0
        """How many steps were done once more since this process began, because a value had left its grid."""
        self.optimizer = Optimizer(job.optim, self.parameters, self.specs, self._arithmetic(), world.axis("stage"))
        self._update_cost = (0.0, 0)
        """Seconds, and bytes sent to orthogonalise matrices, of this rank's last update; 0 where it was refused."""
        self.checkpointer = Checkpointer(folder / "checkpoints", job.checkpoint)
        self._configuration = job.common()
        self.shown: Sequence[dict[str, Any]] = ()
        """Records of what the last step trained on, for people to read; on the first rank."""
        self.step = 0
        self.counters: dict[str, Any] = {"tokens": 0, "skipped": 0, "skipped_in_a_row": 0}
        self.counters |= {"step_seconds": 0.0, "wall_seconds": 0.0}

    @property
    def model(self) -> Decoder:
        """The whole model, where there is no pipeline."""
        (model,) = self.parts.values()
        return model

    def initialize(self, seed: int, given: Collection[str] = ()) -> None:
        """Give the parameters, but those that are ``given``, their initial values, the same on every layout."""
        for part in self.parts.values():
            part.initialize(seed, given)

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
                try:
                    with profiler.step(self.step + 1), self._held():
                        batch = self.next_batch(stop)
                        record, stopped = self.update(batch, stop)
                except Stopped:
                    break
                seconds = time.perf_counter() - began
                self.counters["step_seconds"] += seconds
                observer.step(record | {"step_seconds": seconds}, batch)
                if job.checkpoint.every and self.step % job.checkpoint.every == 0:
                    self.save()
                    saved = self.step
                last = stopped or self.step >= job.train.steps
                if job.train.eval_every and self.step % job.train.eval_every == 0 and not last:
                    try:
                        self.evaluate(observer, job.train.eval_tokens, stop)
                    except Stopped:
                        stopped = True
            if saved != self.step:
                self.save()
        self.counters["wall_seconds"] += time.perf_counter() - mark
        return self.step >= job.train.steps

    def next_batch(self, stop: StopRequest) -> Batch:
        """What the next step trains on. Raises ``Stopped``, on all ranks, where that takes time and a rank was asked to
        stop."""
        return self.stream.next_batch()

    @contextmanager
    def _held(self) -> Iterator[None]:
        """A step that fails leaves the stream where it was: its batch is the next one still."""
        cursor = self.stream.cursor()
        try:
            yield
        except Exception:
            self.stream.seek(cursor)
            raise

    def update(self, batch: Batch, stop: StopRequest) -> tuple[dict[str, Any], bool]:
        """One step: gradients of the batch, checks on all ranks together, update, counters.

        Returns the step's record and whether any rank was asked to stop. A step that is empty or not finite is refused
        before any state changes.
        """
        job, world = self.job, self.world
        schedule = schedule_samples(batch.samples, job.model, world.lanes, job.batch.row_tokens, job.batch.packing)
        self._agree(batch, schedule)
        own, gradients, counts, probability = self._forward_and_backward(batch, schedule)
        norm = self.norm(gradients)
        figures = [own.loss, own.further, float(own.tokens), float(stop.asked), *own.sums]
        loss, further, executed, asked, *sums = world.sum(figures)
        peaks = torch.tensor(own.peaks, dtype=torch.float64, device=world.device)
        world.largest(peaks)
        balance = self.balance.term(probability, batch.tokens)
        lr = self.learning_rate()
        self._apply(gradients, loss, norm, lr, counts)
        self.step += 1
        self.counters["tokens"] += batch.tokens
        record = {"kind": "step", "step": self.step, "loss": loss, "lr": lr, "grad_norm": norm, "tokens": batch.tokens,
                  "executed_tokens": int(executed), "loss_tokens": batch.loss_tokens,
                  "total_tokens": self.counters["tokens"], "skipped": self.counters["skipped"]}  # fmt: skip
        record |= self.objective.figures(sums, peaks.tolist()) | dict(batch.facts)
        record["optimizer_seconds"], sent = self._update_cost
        if job.optim.orthogonal:
            record["optimizer_bytes"] = sent
        if job.model.mtp_layers:
            record["mtp_loss"] = further
        if self.balance.layers:
            record |= {"balance_loss": balance} | self.balance.metrics(counts)
        return record, asked > 0

    def learning_rate(self) -> float:
        """Of the next update."""
        return learning_rate(self.job.optim, self.step, self.job.train.steps)

    def _agree(self, batch: Batch, schedule: Schedule) -> None:
        """Before any work, and on all ranks alike: everyone means the same step, and there is something to learn."""
        facts = {
            "schedule": {"samples": batch.samples, "rounds": schedule.rounds},
            "normaliser": {"loss tokens": batch.loss_tokens, "tokens": batch.tokens},
            "contents": batch.contents,
            "data cursor": self.stream.cursor(),
            "configuration": self._configuration,
        }
        self.world.agree(facts, f"step {self.step + 1}")
        if batch.loss_tokens == 0:
            raise SharedUserError(
                f"step {self.step + 1} has no token in the loss: {len(batch.samples)} samples, {batch.tokens} tokens;"
                " nothing was changed"
            )

    def _forward_and_backward(
        self, batch: Batch, schedule: Schedule
    ) -> tuple[Outcome, dict[str, Placed], torch.Tensor, torch.Tensor]:
        """This rank's outcome and gradients, and the step's global loads. Where a value left its grid on any rank, all
        do it again with grids that were raised: nothing else has changed."""
        for _ in range(_MOST_PASSES):
            own = self.execution.train(self.stream, batch, schedule)
            counts, probability = (self.world.add(part) for part in self.balance.take())
            gradients = self.gradients()
            if self.grids is None or self.grids.end_step(self.world.largest):
                return own, gradients, counts, probability
            self._drop_gradients()
            del gradients  # or the next ones would lie beside them
            self.redone += 1
        raise RuntimeError(f"step {self.step + 1}: values leave their grids however far these are raised")

    def _drop_gradients(self) -> None:
        for part in self.parts.values():
            part.zero_grad(set_to_none=True)

    def norm(self, gradients: Mapping[str, Placed]) -> float:
        """The global norm of a step's gradients, before they are clipped. Who wants to see them overrides this."""
        if self.grids is None:
            return self.world.sum([float(local_square_sum(gradients.values()))])[0] ** 0.5
        shapes = {n: spec.shape for n, spec in self.specs.items() if spec.trained}
        return exact_norm(gradients, shapes, self.world.largest, self.world.add, self.world.device)

    def gradients(self) -> dict[str, Placed]:
        """The accumulated gradients, each in its parameter's place and summed over all ranks that have a part of it."""
        local = {n: local_part(p.grad) for n, p in self._named() if p.grad is not None}
        partial = [n for n in local if self.specs[n].tensor is None]
        add_up([local[n] for n in partial], self.world.axis("tp"))
        if self.job.model.embedding_at_end and EMBEDDING in local:
            add_ends(local[EMBEDDING], self.world.axis("pp"))
        if self.grids is not None:
            for gradient in local.values():
                gradient.add_(0.0)  # a zero has no sign, whoever added it up
        return {n: Placed(self.parameters[n].placement, gradient) for n, gradient in local.items()}

    def _arithmetic(self) -> Arithmetic:
        """How the optimizer computes."""
        stage = self.world.axis("stage")
        if self.grids is not None:
            return Exact(stage.add, stage.largest)
        compute = COMPUTE_DTYPES[self.job.numerics.dtype]
        return Native(stage.add, None if compute == torch.float32 else compute)

    def _named(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """This rank's parameters; no name is in two of its parts."""
        for part in self.parts.values():
            yield from part.named_parameters()

    def _apply(self, gradients: dict[str, Placed], loss: float, norm: float, lr: float, counts: torch.Tensor) -> None:
        """Update the parameters and what is known of the experts, or refuse the step if it is not finite."""
        job, finite = self.job, torch.isfinite(torch.tensor([loss, norm])).all()
        self._update_cost = (0.0, 0)
        if finite:
            if job.optim.clip_norm > 0:
                clip(gradients.values(), norm, job.optim.clip_norm)
            began, sent = time.perf_counter(), self.optimizer.sent
            self.optimizer.step(gradients, lr)
            if self.world.device.type != "cpu":
                torch.accelerator.synchronize()  # what is reported is done, not asked for
            self._update_cost = time.perf_counter() - began, self.optimizer.sent - sent
            self.balance.update(counts)
            self.counters["skipped_in_a_row"] = 0
        self._drop_gradients()
        if finite:
            return
        what = f"step {self.step + 1}: loss {loss}, gradient norm {norm}"
        if job.train.non_finite == "stop":
            raise SharedUserError(
                f"{what}: not finite, nothing was changed, checkpoints least of all."
                ' Lower optim.lr, look at the data, or leave such steps out with train.non_finite = "skip"'
            )
        self.counters["skipped"] += 1
        self.counters["skipped_in_a_row"] += 1
        if self.counters["skipped_in_a_row"] > job.train.max_skips:
            raise SharedUserError(
                f"{what}: not finite, more than train.max_skips = {job.train.max_skips} in a row; the run stops"
            )

    def evaluate(
        self, observer: "Observer", max_tokens: int | None = None, stop: StopRequest | None = None
    ) -> HeldOutResult | None:
        """Held-out loss; None where nothing is held out. Raises ``Stopped``, on all ranks, where one was asked to."""
        held_out = self.stream.held_out(max_tokens)
        if not held_out.samples:
            return None
        observer.evaluating()
        result = evaluate(self.execution, self.stream, held_out, self.job, self.world, stop)
        observer.evaluation(self.step, result)
        return result

    def state(self) -> dict[str, Placed]:
        """Every tensor of the run, under the names that checkpoints use."""
        model = {f"model.{n}": p.renamed(f"model.{n}") for n, p in self.parameters.items()}
        optimizer = {f"optim.{n}": p.renamed(f"optim.{n}") for n, p in self.optimizer.state().items()}
        grids = {} if self.grids is None else self.grids.state(self.world.rank)
        return model | optimizer | self.balance.state() | grids

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
        if self.grids is not None:
            self.grids.prepare()
        self.world.run_where(True, lambda: self.stream.seek(meta["cursor"]))
        if len(manifest.rank_meta) == self.world.size:  # on another layout the generators start anew
            set_rng_state(manifest.rank_meta[self.world.rank]["rng"])


class Observer:
    """What the loop tells the outside. The default says nothing; the command line shows, writes and reports."""

    def step(self, record: dict[str, Any], batch: Batch) -> None:
        """After every step, on every rank."""

    def evaluating(self) -> None:
        """Before every evaluation, on every rank."""

    def evaluation(self, step: int, result: HeldOutResult) -> None:
        """After every evaluation, on every rank."""
