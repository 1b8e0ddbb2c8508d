"""``equigrad train``: find the run folder, start workers if the layout needs them, train, and leave a summary."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from equigrad.config import Job, dump_toml, load_job
from equigrad.config.load import parse_overrides
from equigrad.errors import UserError
from equigrad.resolve import check_adapters, resolve_weights
from equigrad.run import Run, resumed_job


def main(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Everything that can be wrong with the words, the job and the folder is found here, before torch loads."""
    job, run, resume = _job_and_run(arguments, overrides)
    if arguments.dry_run:
        return _dry_run(job)
    _check_extras(job)
    if resume:
        _check_resumable(run)
    elif job.model.weights is None:
        check_adapters(job)
    # Both imports are torch-free until something is started.
    from equigrad.parallel.environment import process_env
    from equigrad.parallel.launch import launch, run_worker
    from equigrad.resolve import check_layout, resolve_weights

    env = process_env()
    if env is None:  # else one of the ranks tells, while it prepares
        check_layout(job if resume else resolve_weights(job))
    if env is None and job.layout.world_size > 1:
        return launch(job.layout.world_size, _words(arguments, overrides))
    from equigrad.commands.session import train_session

    if env is None or env.world_size == 1:
        return train_session(job, run, resume)
    return run_worker(env.rank, lambda: train_session(job, run, resume))


def _job_and_run(arguments: argparse.Namespace, overrides: Sequence[str]) -> tuple[Job, Run, bool]:
    """The job, its run folder, and whether there is a run in it to go on with."""
    from equigrad.parallel.environment import process_env

    path = Path(arguments.job) if arguments.job else None
    name = dict(parse_overrides(overrides)).get("name")
    run = Run(Path(arguments.run or Path("runs") / (name or load_job(path).name)))
    if arguments.resume and run.exists():
        return resumed_job(run, path, overrides), run, True
    given = load_job(path, overrides)
    env = process_env()
    if not arguments.dry_run and (env is None or env.rank == 0):
        run.check_free()
        if arguments.resume:
            print(f"there is no run in {run.folder} yet: a new one begins, {path or 'the embedded quickstart'}")
    return given, run, False


def _check_extras(job: Job) -> None:
    """``UserError`` now rather than after minutes of preparation."""
    paths = [source.path for source in (*job.data.sources, *job.data.held_out_sources)]
    wanted = {
        "tensorboard": ("tensorboard", job.observe.tensorboard),
        "wandb": ("wandb", job.observe.wandb_project is not None),
        "datasets": ("data", any(path.startswith("hf:") for path in paths)),
        "pyarrow": ("data", any(path.endswith(".parquet") for path in paths)),
    }
    for package, (extra, asked) in wanted.items():
        if asked and find_spec(package) is None:
            raise UserError(f"the job asks for {package}, which is not installed: pip install 'equigrad[{extra}]'")


def _check_resumable(run: Run) -> None:
    """``UserError`` for a latest checkpoint that is damaged, or that holds weights alone."""
    from equigrad.checkpoint.folder import latest
    from equigrad.checkpoint.manifest import read_manifest

    checkpoint = latest(run.folder / "checkpoints")
    if checkpoint is not None and "cursor" not in read_manifest(checkpoint).meta:
        raise UserError(
            f"{run.folder} holds imported weights and no training to resume; start a run from them:"
            f" equigrad train --model.weights '{run.folder}' --run ANOTHER_FOLDER"
        )


def _words(arguments: argparse.Namespace, overrides: Sequence[str]) -> list[str]:
    """The words that make a worker do this very job."""
    words = ["train", *([arguments.job] if arguments.job else []), *overrides]
    if arguments.run:
        words += ["--run", arguments.run]
    return words + ["--resume"] * arguments.resume


def _dry_run(job: Job) -> int:
    """Print the resolved job and its size. Nothing is written; a tokenizer is not trained for it."""
    from equigrad.data.sources import check
    from equigrad.memory.estimate import estimate
    from equigrad.models.specs import flops_per_token, parameter_count

    for source in [*job.data.sources, *job.data.held_out_sources]:
        check(source)
    job = resolve_weights(job)
    if job.model.vocab_size is None:
        size = _vocabulary(job)
        job = job.model_copy(update={"model": job.model.model_copy(update={"vocab_size": size})})
    memory = estimate(job, _alive(job))
    tokens = f"at most {job.most_tokens:,}"
    print(dump_toml(job))
    trained = f" ({parameter_count(job.model, job.lora, trained=True):,} of them trained)" if job.lora else ""
    print(f"# parameters        {parameter_count(job.model, job.lora):,}{trained}")
    print(f"# tokens per step   {tokens}")
    print(f"# steps             {job.train.steps:,}")
    flops = flops_per_token(job.model, (job.data.context + 1) / 2, job.lora)
    print(f"# operations        {flops:.3g} per token, forward and backward")
    print(f"# processes         {job.layout.describe()}")
    parts = {name: size for name, size in asdict(memory).items() if size}
    print(f"# memory per rank   {memory.total / 2**20:,.0f} MiB estimated, tensors alone: "
          + ", ".join(f"{name} {size / 2**20:,.0f}" for name, size in parts.items()))  # fmt: skip
    return 0


def _alive(job: Job) -> Sequence[int]:
    """How many rows' activations each pipeline rank holds at one time, in a step of full rows."""
    from equigrad.schedule.pipeline import pipeline, simulate

    layout = job.layout
    if layout.pp == 1:
        return (1,)
    rows = -(-job.most_tokens // (job.batch.row_tokens * layout.data_lanes))
    return simulate(pipeline(layout.pp_schedule, layout.pp, layout.pp_stages, rows)).alive


def _vocabulary(job: Job) -> int:
    tokenizer = job.data.tokenizer
    if tokenizer.kind == "bpe":
        return tokenizer.vocab_size
    from equigrad.data.vocabulary import build_tokenizer

    return build_tokenizer(job.data, Path("/nonexistent")).vocab_size
