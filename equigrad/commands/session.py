"""One training session in one process: prepare the run, train, and leave summary and report."""

from contextlib import closing, nullcontext
from typing import Any

from equigrad.audit.recorder import Recorder
from equigrad.checkpoint.digest import digest
from equigrad.checkpoint.folder import latest
from equigrad.config import Job
from equigrad.data.stream import Batch, Batches
from equigrad.data.tokenizers import Tokenizer
from equigrad.evaluation import HeldOutResult, Stopped
from equigrad.execution import WholeModel
from equigrad.files import write_json, writing
from equigrad.memory.allocator import keep_freed_memory
from equigrad.models.generate import generate
from equigrad.models.specs import flops_per_token, parameter_count
from equigrad.numerics.ops import COMPUTE_DTYPES
from equigrad.observe.metrics import MetricsLog, Sinks, open_sinks
from equigrad.observe.peak import Peak, device_peak, memory_mb
from equigrad.observe.progress import Progress, open_progress
from equigrad.observe.text import duration
from equigrad.parallel.ranks import SharedUserError
from equigrad.parallel.stop import StopRequest
from equigrad.parallel.world import World, start
from equigrad.prepare import agree, give_state, prepare, trainer_class
from equigrad.run import Run
from equigrad.trainer import Observer, Trainer


def train_session(job: Job, run: Run, resume: bool) -> int:
    """Train until done or asked to stop; called on every rank. Returns the exit code."""
    keep_freed_memory()
    world = start(job.layout)
    with world.run_where(world.is_main, run.lock) or nullcontext():
        _train(job, run, resume, world)
    world.close()
    return 0


def _train(job: Job, run: Run, resume: bool, world: World) -> None:
    job, tokenizer, stream = prepare(job, run, world, resume)
    with closing(stream):
        _train_on(stream, tokenizer, job, run, resume, world)


def _train_on(stream: Batches, tokenizer: Tokenizer, job: Job, run: Run, resume: bool, world: World) -> None:
    agree(job, tokenizer, stream, world)
    trainer = trainer_class(job)(job, run.folder, world, stream)
    # Only now, for the trainer has put in order what an interrupted save may have left.
    checkpoint = latest(run.folder / "checkpoints") if resume else None
    world.agree({"checkpoint": checkpoint and checkpoint.name}, "where to resume")
    if resume and checkpoint is None:
        world.run_where(world.is_main, run.check_restart)
    give_state(trainer, checkpoint)
    if trainer.step > job.train.steps:
        raise SharedUserError(f"train.steps is {job.train.steps}, but {run.folder} has {trainer.step} steps behind it")
    if world.sum([float(world.is_main and trainer.step == job.train.steps and run.summary.exists())])[0]:
        trainer.checkpointer.close()
        if world.is_main:
            _tell(run, job)
        return
    peak = device_peak(world.device, COMPUTE_DTYPES[job.numerics.dtype]) if world.is_main else None
    progress = _progress(trainer, run, peak) if peak is not None else None
    with StopRequest() as stop, _sinks(trainer, run, progress) as sinks, closing(_rollouts(trainer, run)) as rollouts:
        recorder = Recorder(trainer, run.folder) if job.audit.enabled else None
        # Only now does the folder hold this run: nothing that could still go wrong has changed it.
        world.run_where(world.is_main, lambda: _begin(trainer, run))
        observer = _Observer(trainer, sinks, rollouts, peak, progress, recorder)
        held_out, finished = None, trainer.run(observer, stop)
        if finished:
            try:
                held_out = trainer.evaluate(observer, stop=stop)
            except Stopped:
                finished = False
    if finished:
        _finish(trainer, run, tokenizer, held_out)
    elif world.is_main:
        how = f"equigrad train --run {run.folder} --resume"
        print(f"stopped after step {trainer.step}; its checkpoint is saved. --resume continues the run: {how}")


def _begin(trainer: Trainer, run: Run) -> None:
    run.write_job(trainer.job)
    if trainer.step < trainer.job.train.steps:
        run.forget_end()


def _progress(trainer: Trainer, run: Run, peak: Peak) -> Progress:
    """What is shown of the run, from here on."""
    job, step = trainer.job, trainer.step
    processes = f", {trainer.world.size} processes ({job.layout.degrees})" if trainer.world.size > 1 else ""
    size = f"{parameter_count(job.model, job.lora):,} parameters"
    if job.lora is not None:
        size += f" ({parameter_count(job.model, job.lora, trained=True):,} of them trained)"
    title = f"{run.folder}: {size} on {trainer.world.device.type}{processes}"
    if job.rl is not None and job.rl.warmup.steps:
        last = min(job.rl.warmup.steps, job.train.steps)
        title += f", steps 1 to {last} imitate" + (" and none earns a reward" if last == job.train.steps else "")
    if not job.checkpoint.every:
        title += ", saved at the end only"
    if step:
        title += f", resumed after step {step}"
    return open_progress(job.train.steps, step, title, peak.source)


def _sinks(trainer: Trainer, run: Run, progress: Progress | None) -> Sinks:
    """Rank 0 writes and shows; the others are silent."""
    if progress is None:
        return Sinks([])
    with writing(run.folder):
        return open_sinks(trainer.job, run.folder, trainer.step or None, progress)


def _rollouts(trainer: Trainer, run: Run) -> Sinks:
    """What reinforcement learning trained on."""
    if trainer.job.rl is None or not trainer.world.is_main:
        return Sinks([])
    with writing(run.folder):
        return Sinks([MetricsLog(run.rollouts, trainer.step or None)])


class _Observer(Observer):
    """Completes each step's record with what only the outside knows, and hands it to the sinks of rank 0; before that,
    the trajectory gets its line."""

    def __init__(
        self,
        trainer: Trainer,
        sinks: Sinks,
        rollouts: Sinks,
        peak: Peak | None,
        progress: Progress | None,
        recorder: Recorder | None,
    ) -> None:
        self._trainer, self._sinks, self._peak, self._progress = trainer, sinks, peak, progress
        self._rollouts, self._recorder = rollouts, recorder

    def step(self, record: dict[str, Any], batch: Batch) -> None:
        if self._recorder is not None:
            self._recorder.step(record, batch)
        job, world = self._trainer.job, self._trainer.world
        with writing(self._trainer.folder):
            for group in self._trainer.shown:
                self._rollouts.log(group)
        if self._peak is None or (record["step"] % job.observe.log_every and record["step"] != job.train.steps):
            return
        rate = batch.tokens / record["step_seconds"]
        # Mean number of keys that a query of this batch sees.
        context = sum(s.length * (s.length + 1) / 2 for s in batch.samples) / batch.tokens
        used = flops_per_token(job.model, context, job.lora) * rate / world.size
        self._log(
            record
            | {
                "tokens_per_second": rate,
                "mfu": used / self._peak.flops,
                "memory_mb": memory_mb(world.device),
                "elapsed": self._trainer.counters["wall_seconds"] + record["step_seconds"],
            }
        )

    def evaluating(self) -> None:
        if self._progress is not None:
            self._progress.evaluating()

    def evaluation(self, step: int, result: HeldOutResult) -> None:
        if self._peak is not None:
            self._log({"kind": "eval", "step": step} | result.record())

    def _log(self, record: dict[str, Any]) -> None:
        with writing(self._trainer.folder):
            self._sinks.log(record)


def _finish(trainer: Trainer, run: Run, tokenizer: Tokenizer, held_out: HeldOutResult | None) -> None:
    """Leave sample, digest, summary and report of a finished run."""
    job, counters = trainer.job, trainer.counters
    sample = _sample(trainer, tokenizer)
    parameter_digest = digest(trainer.parameters)
    if not trainer.world.is_main:
        return
    if sample is not None:
        write_json(run.folder / "sample.json", sample)
    seconds, in_steps = counters["wall_seconds"], counters["step_seconds"]
    summary = {
        "name": job.name,
        "steps": trainer.step,
        "tokens": counters["tokens"],
        "skipped": counters["skipped"],
        "wall_seconds": round(seconds, 3),
        "tokens_per_second": round(counters["tokens"] / in_steps, 1) if in_steps else None,
        "held_out_loss": None,
        "held_out_bits_per_byte": None,
        "parameters": parameter_count(job.model, job.lora),
        "parameter_digest": parameter_digest,
    }
    if held_out is not None:
        summary |= held_out.summary()
    run.write_summary(summary)
    _tell(run, job)


def _tell(run: Run, job: Job) -> None:
    """What a finished run's summary says, and its report."""
    summary = run.read_summary()
    print(f"done: {summary['steps']} steps, {summary['tokens']:,} tokens in {duration(summary['wall_seconds'])}")
    if summary["held_out_loss"] is not None:
        bits, loss = summary["held_out_bits_per_byte"], summary["held_out_loss"]
        print(f"held-out text: {bits:.3f} bits per byte, loss {loss:.4f} per token"
              f" ({summary['held_out_tokens']:,} tokens in the loss, {summary['held_out_bytes']:,} bytes)")  # fmt: skip
    if summary.get("held_out_reward") is not None:
        reward, solved, count = (summary[f"held_out_{key}"] for key in ("reward", "solved", "problems"))
        print(f"held-out problems: mean reward {reward:.3f}, {solved:.1%} of {count:,} solved")
    print(f"parameter digest {summary['parameter_digest']}")
    if job.observe.report:
        from equigrad.observe.report import write_report

        with writing(run.folder):
            print(f"report: {write_report(run.folder)}")


def _sample(trainer: Trainer, tokenizer: Tokenizer) -> dict[str, str] | None:
    """A continuation of ``observe.sample_prompt``, made by all ranks together."""
    observe, model = trainer.job.observe, WholeModel(trainer.world, trainer.parts)
    prompt = [tokenizer.bos_id, *tokenizer.encode_batch([observe.sample_prompt])[0].tolist()]
    room = trainer.job.model.max_position_embeddings - len(prompt)
    length = min(observe.sample_tokens, room)
    if length <= 0:
        return None
    seed, stop, world = trainer.job.seed, [tokenizer.eos_id], trainer.world
    ids = generate(model, [prompt], length, 0.8, 0.95, seed, stop, world.axis("tp"), world.axis("ep"))[0]
    return {"prompt": observe.sample_prompt, "text": tokenizer.decode(ids)}
