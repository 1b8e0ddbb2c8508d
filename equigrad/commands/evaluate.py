"""``equigrad eval``: token-weighted held-out loss, perplexity and bits per byte."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from equigrad.checkpoint.weights import Weights
from equigrad.config import Job, load_job
from equigrad.config.load import make_job, override_value, parse_overrides, set_key
from equigrad.errors import UserError
from equigrad.files import write_json
from equigrad.parallel.environment import process_env
from equigrad.resolve import check_context, check_layout, find_weights


def main(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Evaluate on the held-out side of the run's data, or of the job and overrides that were given."""
    from equigrad.parallel.launch import launch, run_worker

    weights = find_weights(arguments.model)
    job = _job(weights, arguments, overrides)
    check_context(job, weights)
    check_layout(job)
    env = process_env()
    if env is None and job.layout.world_size > 1:
        words = ["eval", arguments.model, *overrides]
        for option in ("job", "json"):
            words += [f"--{option}", value] if (value := getattr(arguments, option)) else []
        return launch(job.layout.world_size, words, stops=False)
    if env is None or env.world_size == 1:
        return _evaluate(weights, job, arguments)
    return run_worker(env.rank, lambda: _evaluate(weights, job, arguments))


def _job(weights: Weights, arguments: argparse.Namespace, overrides: Sequence[str]) -> Job:
    from equigrad.commands.models import own_job

    if arguments.job:
        job = load_job(Path(arguments.job), overrides)
        return job.model_copy(update={"model": weights.model, "lora": weights.lora})
    tree = own_job(weights).model_dump(exclude_none=True)
    tree["layout"] = {}  # of this command, not of the training run
    origin: dict[str, str] = {}
    for key, text in parse_overrides(overrides):
        set_key(tree, key, override_value(key, text), origin)
    return make_job(tree, str(weights.folder), origin)


def _evaluate(weights: Weights, job: Job, arguments: argparse.Namespace) -> int:
    from equigrad.commands.models import open_parts, own_tokenizer
    from equigrad.data.stream import Stream
    from equigrad.evaluation import evaluate
    from equigrad.execution import Execution
    from equigrad.parallel.world import start
    from equigrad.prepare import agree
    from equigrad.resolve import resolve_vocabulary

    world = start(job.layout)
    tokenizer = own_tokenizer(weights)
    job = resolve_vocabulary(job, tokenizer)
    stream = world.run_where(world.local_rank == 0, lambda: Stream(job.data, job.batch, job.seed, tokenizer))
    if stream is None:
        stream = Stream(job.data, job.batch, job.seed, tokenizer)
    agree(job, tokenizer, stream, world)
    held_out = stream.held_out()
    if not held_out.samples:
        documents = sum(s.documents for s in stream.stats)
        raise UserError(
            f"nothing is held out: data.held_out_every is {job.data.held_out_every}, of {documents} documents, and"
            " data.held_out_sources is empty; give --data.held_out_sources FILE (--data.held_out_every 0 beside it"
            " leaves the rest out)"
        )
    result = evaluate(Execution(job, world, open_parts(weights, job, world)), stream, held_out, job, world).record()
    if world.is_main:
        print(f"held-out loss     {result['held_out_loss']:.6f} nats per token")
        print(f"perplexity        {result['held_out_perplexity']:.4f}")
        print(f"bits per byte     {result['held_out_bits_per_byte']:.6f}")
        print(f"in the loss       {result['tokens']:,} tokens, {result['bytes']:,} bytes")
        if arguments.json:
            write_json(Path(arguments.json), result)
    world.close()
    return 0
