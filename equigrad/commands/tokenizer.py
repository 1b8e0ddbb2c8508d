"""``equigrad tokenizer train``: a byte-level BPE of one's own documents."""

import argparse
from pathlib import Path

from equigrad.config.data import Data, Source, TokenizerConfig
from equigrad.data.vocabulary import build_tokenizer
from equigrad.errors import UserError
from equigrad.files import writing


def main(arguments: argparse.Namespace) -> int:
    """Train on all documents of the sources and save ``tokenizer.json``."""
    if arguments.vocab_size < 259:
        raise UserError("--vocab-size must be at least 259: 256 bytes and the special tokens")
    out = Path(arguments.out)
    if (out / "tokenizer.json").exists():
        raise UserError(f"{out / 'tokenizer.json'} exists already")
    data = Data(
        sources=[Source(path=path) for path in arguments.sources],
        tokenizer=TokenizerConfig(kind="bpe", vocab_size=arguments.vocab_size),
    )
    tokenizer = build_tokenizer(data, out)
    with writing(out):
        tokenizer.save(out)
    print(f"{out / 'tokenizer.json'}: {tokenizer.vocab_size} tokens")
    return 0
