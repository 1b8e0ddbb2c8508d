"""From a job to what a trainer starts with: the job resolved, the tokenizer and the data, and the first state."""

import time
from collections.abc import Callable
from pathlib import Path

from equigrad import __version__
from equigrad.checkpoint.huggingface import load_weights
from equigrad.config import Job
from equigrad.data.index import Stats
from equigrad.data.stream import Batches, Stream
from equigrad.data.tokenizers import Tokenizer
from equigrad.data.vocabulary import build_tokenizer
from equigrad.files import writing
from equigrad.models.specs import parameter_specs
from equigrad.parallel.ranks import SharedUserError
from equigrad.parallel.world import World
from equigrad.resolve import check_layout, find_weights, resolve_vocabulary, resolve_weights
from equigrad.rl.problems import ProblemStream
from equigrad.rl.trainer import PolicyTrainer
from equigrad.run import Run
from equigrad.trainer import Trainer


def prepare(job: Job, run: Run, world: World, resume: bool) -> tuple[Job, Tokenizer, Batches]:
    """Resolve the job and open its data. Rank 0 makes what is shared (run folder, tokenizer), each machine's first
    rank what is kept on that machine (tokenised sources); the others read it."""

    def make() -> tuple[Job, Tokenizer, Stream | None]:
        resolved = job if resume else resolve_weights(job)
        check_layout(resolved)
        tokenizer = build_tokenizer(resolved.data, run.tokenizer)
        resolved = resolve_vocabulary(resolved, tokenizer)
        if resolved.rl is not None:
            return resolved, tokenizer, None
        progress = _tokenising() if world.is_main else None
        return resolved, tokenizer, Stream(resolved.data, resolved.batch, resolved.seed, tokenizer, progress)

    def create() -> tuple[Job, Tokenizer, Stream | None]:
        if not resume:
            run.check_free()  # again, under the lock: another start may have been faster, and must not be cleared away
            run.clear()
        made = make()
        if not (run.tokenizer / "tokenizer.json").exists():
            with writing(run.tokenizer):
                made[1].save(run.tokenizer)
        asked, got = made[0].data.tokenizer, made[1].vocab_size
        if asked.kind == "bpe" and asked.path is None and got < asked.vocab_size:
            print(
                f"tokenizer: {got:,} tokens of the {asked.vocab_size:,} asked for; the text has no more pairs to merge"
            )
        for stats in made[2].stats if made[2] else ():
            print(_line(stats))
        return made

    first = world.run_where(world.is_main, create)
    second = world.run_where(world.local_rank == 0 and not world.is_main, make)
    rest = world.run_where(world.local_rank != 0, make)
    resolved, tokenizer, stream = first or second or rest
    return resolved, tokenizer, stream or ProblemStream(resolved, tokenizer, world)


def trainer_class(job: Job) -> type[Trainer]:
    """Of the trainer that a job wants."""
    return Trainer if job.rl is None else PolicyTrainer


def agree(job: Job, tokenizer: Tokenizer, stream: Batches, world: World) -> None:
    """Ranks that were started with different words, or see different files, must not work together."""
    facts = {
        "version of equigrad": __version__,
        "job": job.common(),
        "tokenizer": tokenizer.digest,
        "data": [stream.cursor(), stream.digests],
    }
    world.agree(facts, "what they are to do", SharedUserError)


def _tokenising(every: float = 10.0) -> Callable[[str, int, int], None]:
    """Tells now and then how far a long tokenisation is."""
    last = time.monotonic()

    def tell(source: str, documents: int, tokens: int) -> None:
        nonlocal last
        if time.monotonic() - last >= every:
            last = time.monotonic()
            print(f"tokenising {source}: {documents:,} documents, {tokens:,} tokens", flush=True)

    return tell


def _line(stats: Stats) -> str:
    """One line on what a source gives, and on all of it that is not trained on."""
    side = "held out" if stats.held_out else "training"
    text = f"{stats.source}, {side}: {stats.documents:,} documents, {stats.samples:,} samples, {stats.tokens:,} tokens"
    if stats.loss_tokens != stats.tokens:
        text += f" ({stats.loss_tokens:,} in the loss)"
    asides = {"without text to learn": stats.empty, "documents dropped as too long": stats.dropped,
              "samples left out, no token in the loss": stats.left_out}  # fmt: skip
    return "; ".join([text, *(f"{count:,} {what}" for what, count in asides.items() if count)])


def give_state(trainer: Trainer, checkpoint: Path | None) -> None:
    """A checkpoint's state, or given weights, or initial values."""
    if checkpoint is not None:
        trainer.resume(checkpoint)
    elif trainer.job.model.weights is not None:
        found = find_weights(trainer.job.model.weights)
        # Adapters and modules for multi-token prediction may be new to them.
        trainer.initialize(trainer.job.seed, given=parameter_specs(found.model, found.lora))
        load_weights(found, trainer.parameters)
    else:
        trainer.initialize(trainer.job.seed)
