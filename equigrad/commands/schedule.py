"""``equigrad schedule``: draws how one step of a job is divided. In one process and without torch, for any layout."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

from equigrad.config import load_job
from equigrad.data.stream import Stream
from equigrad.data.vocabulary import build_tokenizer
from equigrad.errors import UserError
from equigrad.files import write_json, write_text
from equigrad.resolve import resolve_vocabulary, resolve_weights
from equigrad.schedule.division import Division, divide
from equigrad.schedule.pipeline import Action
from equigrad.schedule.svg import draw_svg
from equigrad.schedule.text import ASCII, draw_text


def main(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Draw the step on the terminal, and into files where asked."""
    division = division_of(Path(arguments.job) if arguments.job else None, overrides, arguments.step)
    text = draw_text(division, max(60, min(get_terminal_size((160, 24)).columns, 160)))
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = text.translate(ASCII)
    print(text, end="")
    if arguments.svg:
        write_text(Path(arguments.svg), draw_svg(division))
    if arguments.json:
        write_json(Path(arguments.json), record(division))
    return 0


def division_of(path: Path | None, overrides: Sequence[str], step: int) -> Division:
    """How a step of a job is divided. Tokenises the job's sources where the cache lacks them, as training does."""
    if step < 1:
        raise UserError(f"--step must be at least 1, not {step}")
    job = load_job(path, overrides)
    if step > job.train.steps:
        raise UserError(f"train.steps is {job.train.steps}: there is no step {step}")
    job = resolve_weights(job)
    tokenizer = build_tokenizer(job.data, Path("/nonexistent"))
    job = resolve_vocabulary(job, tokenizer)
    stream = Stream(job.data, job.batch, job.seed, tokenizer)
    for _ in range(step):
        batch = stream.next_batch()
    return divide(job, batch.samples, step)


def record(division: Division) -> dict[str, Any]:
    """The whole division as JSON values, nothing left out."""
    layout = division.layout
    found = {
        "name": division.name,
        "step": division.step,
        "layout": layout.model_dump(),
        "tokens": division.tokens,
        "executed_tokens": division.executed_tokens,
        "loss_tokens": division.loss_tokens,
        "empty_rows": division.empty_rows,
        "imbalance": division.imbalance,
        "round_imbalance": division.round_imbalance,
        "samples": [sample._asdict() | {"cost": c} for sample, c in zip(division.samples, division.costs, strict=True)],
        "rows": [
            {
                "round": number,
                "lane": lane,
                "modality": division.kinds[number],
                "tokens": row.tokens,
                "samples": [sample for sample, _ in row.samples],
                "context": [
                    {"ranks": division.ranks(lane, context), "tokens": share.tokens, "tensor": share.tensor,
                     "pieces": [asdict(piece) for piece in share.pieces]}
                    for context, share in enumerate(row.shares)
                ],
            }
            for number, rows in enumerate(division.rounds)
            for lane, row in enumerate(rows)
        ],
        "stages": [{"rank": stage % layout.pp, "blocks": [part.start, part.stop]}
                   for stage, part in enumerate(division.stages)],
    }  # fmt: skip
    if division.timeline is not None:
        found |= {
            "bubble": division.bubble,
            "time": division.timeline.time,
            "pipeline": [
                [asdict(span.action) | {"start": span.start, "end": span.end} for span in spans
                 if isinstance(span.action, Action)]
                for spans in division.timeline.spans
            ],
        }  # fmt: skip
    return found
