"""``equigrad generate``: continue prompts, in one batch with a cache of keys and values."""

import argparse
import math
from pathlib import Path

from equigrad.errors import UserError
from equigrad.files import write_json
from equigrad.resolve import find_weights


def main(arguments: argparse.Namespace) -> int:
    """Print each prompt's continuation."""
    if not 0 <= arguments.temperature < math.inf or not 0 < arguments.top_p <= 1 or arguments.max_tokens < 0:
        raise UserError("--temperature and --max-tokens must be numbers from 0 on, and --top-p in (0, 1]")
    weights, prompts = find_weights(arguments.model), _prompts(arguments)
    from equigrad.commands.models import open_parts, own_job, own_tokenizer
    from equigrad.config.layout import Layout
    from equigrad.models.generate import generate
    from equigrad.parallel.world import start
    from equigrad.resolve import resolve_vocabulary

    tokenizer = own_tokenizer(weights)
    job = resolve_vocabulary(own_job(weights), tokenizer)
    job = job.model_copy(update={"layout": Layout(device=job.layout.device)})
    model = open_parts(weights, job, start(job.layout))[0]
    texts = [tokenizer.chat_prompt([{"role": "user", "content": p}]) if arguments.chat else p for p in prompts]
    begin = [] if arguments.chat else [tokenizer.bos_id]
    ids = [begin + encoded.tolist() for encoded in tokenizer.encode_batch(texts, special=arguments.chat)]
    stop = {tokenizer.eos_id} | (tokenizer.turn_ends() if arguments.chat else set())
    outputs = generate(
        model, ids, arguments.max_tokens, arguments.temperature, arguments.top_p, arguments.seed, sorted(stop)
    )
    results = [{"prompt": p, "text": tokenizer.decode(o)} for p, o in zip(prompts, outputs, strict=True)]
    shown = [r["text"] if arguments.chat else r["prompt"] + r["text"] for r in results]
    print("\n---\n".join(shown))
    if arguments.json:
        write_json(Path(arguments.json), results)
    return 0


def _prompts(arguments: argparse.Namespace) -> list[str]:
    prompts = list(arguments.prompt or [])
    if arguments.prompt_file:
        try:
            prompts += Path(arguments.prompt_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read {arguments.prompt_file}: {error}") from None
    return prompts or [""]
