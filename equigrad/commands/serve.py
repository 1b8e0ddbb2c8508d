"""``equigrad serve``: a model behind OpenAI's interface."""

import argparse
import sys
from pathlib import Path

from equigrad.errors import UserError
from equigrad.resolve import find_weights


def main(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    if min(arguments.slots, arguments.version + 1) < 1 or not 0 <= arguments.port < 65536:
        raise UserError("--slots is at least 1, --version at least 0, and --port from 0 to 65535")
    weights = find_weights(arguments.model)
    from equigrad.build import build_replica
    from equigrad.checkpoint.huggingface import load_weights
    from equigrad.commands.models import own_job, own_tokenizer
    from equigrad.config.layout import Layout
    from equigrad.parallel.stop import StopRequest
    from equigrad.parallel.world import start
    from equigrad.resolve import resolve_vocabulary
    from equigrad.rl.engine.embedded import EmbeddedEngine, Limits
    from equigrad.rl.engine.server import Server
    from equigrad.rl.engine.service import Service

    tokenizer = own_tokenizer(weights)
    job = resolve_vocabulary(own_job(weights), tokenizer)
    kind = arguments.numerics or job.numerics.kind
    job = job.model_copy(update={"layout": Layout(device=job.layout.device),
                                 "numerics": job.numerics.model_copy(update={"kind": kind})})  # fmt: skip
    world = start(job.layout)
    model = build_replica(job, world.device)
    placed = model.placed()
    load_weights(weights, placed)
    capacity = arguments.context or job.model.max_position_embeddings
    limits = Limits(arguments.slots, capacity)
    tensors = {name: one.tensor for name, one in placed.items()}
    engine = EmbeddedEngine(model, limits, tensors, arguments.version, decode=tokenizer.decode)
    name = arguments.name or Path(arguments.model).resolve().name
    with Service(engine) as service, StopRequest() as stop:
        server = Server(service, job.model, tokenizer, capacity, name, arguments.host, arguments.port)
        with server.running() as url:
            print(f"{name} on {url}, version {arguments.version}, {kind} numerics; Ctrl-C ends it", flush=True)
            stop.wait()
    print("stopped", file=sys.stderr)
    return 0
