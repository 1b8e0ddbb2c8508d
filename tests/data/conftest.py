"""Fixtures of the data tests."""

import gzip
import json
from pathlib import Path

import pytest

from equigrad.data.tokenizers import Tokenizer, train_bpe

CORPUS = [
    "Call me Ishmael. Some years ago, never mind how long precisely, I thought I would sail about a little.\n",
    "def f(x):\n    return x + 1\n\n\nIt's 2024; naïve café 北京 😀 they'll say <|endoftext|> aloud.\r\n",
]


@pytest.fixture(scope="session")
def bpe() -> Tokenizer:
    """A byte-level BPE of 320 tokens with chat tokens."""
    return train_bpe(CORPUS, 320)


def write_jsonl(path: Path, *records: object) -> Path:
    """One JSON value a line, compressed where the name ends in ``.gz``."""
    raw = "".join(json.dumps(record) + "\n" for record in records).encode()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path
