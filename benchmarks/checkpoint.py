"""Checkpoints: share of step time that saving after every tenth step costs, asynchronously and not.

The same trainer (~15M parameters, steps of 1,024 tokens: short ones, in which a save weighs most) runs ten steps
without a save, with an asynchronous one and with a synchronous one, in turns.

    python benchmarks/checkpoint.py
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import arguments, interleaved, pin_threads, show, spread, write

OPTIONS = arguments("checkpoint", __doc__ or "", rounds=6, steps=10)
pin_threads(OPTIONS.threads)

from equigrad.checkpoint.state import Checkpointer  # noqa: E402
from equigrad.config import load_job  # noqa: E402
from equigrad.config.checkpoint import Checkpoint  # noqa: E402
from equigrad.data.stream import Stream  # noqa: E402
from equigrad.data.tokenizers import byte_tokenizer  # noqa: E402
from equigrad.memory.allocator import keep_freed_memory  # noqa: E402
from equigrad.parallel.stop import StopRequest  # noqa: E402
from equigrad.parallel.world import start  # noqa: E402
from equigrad.trainer import Trainer  # noqa: E402

PRESET = Path(__file__).parent.parent / "configs" / "15m.toml"


def main() -> None:
    keep_freed_memory()
    words = ["--data.tokenizer.kind", "bytes", "--model.vocab_size", "4096", "--batch.tokens", "1024",
             "--batch.row_tokens", "1024", "--layout.threads", str(OPTIONS.threads)]  # fmt: skip
    job = load_job(PRESET, words)
    stop = StopRequest()
    with tempfile.TemporaryDirectory() as folder:
        stream = Stream(job.data, job.batch, 0, byte_tokenizer())
        trainer = Trainer(job, Path(folder) / "run", start(job.layout), stream)
        trainer.initialize(0)
        background = trainer.checkpointer
        blocking = Checkpointer(Path(folder) / "blocking", Checkpoint(asynchronous=False))

        def steps(saver: Checkpointer | None) -> Callable[[], Any]:
            def run() -> None:
                for number in range(OPTIONS.steps):
                    trainer.update(trainer.stream.next_batch(), stop)
                    if number == 0 and saver is not None:  # early, so that what goes on behind falls into this round
                        trainer.checkpointer = saver
                        trainer.save()
                if saver is not None:
                    saver.wait()

            return run

        sides = {"none": steps(None), "asynchronous": steps(background), "synchronous": steps(blocking)}
        seconds = interleaved(sides, OPTIONS.rounds, warm_up=1)
        size = sum(f.stat().st_size for f in (Path(folder) / "blocking").rglob("*.safetensors"))
        background.close()
        blocking.close()
    result: dict[str, Any] = {"threads": OPTIONS.threads, "steps": OPTIONS.steps, "bytes_of_kept_checkpoints": size}
    for name in ("asynchronous", "synchronous"):
        shares = [a / b - 1 for a, b in zip(seconds[name], seconds["none"], strict=True)]
        result[name] = spread(shares)
        show(f"share of step time, {name} save every {OPTIONS.steps} steps", result[name])
    write(OPTIONS.json, result)


if __name__ == "__main__":
    main()
