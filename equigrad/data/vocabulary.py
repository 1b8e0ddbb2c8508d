"""The tokenizer a job asks for: read, or trained on its training documents alone."""

from collections.abc import Iterator
from pathlib import Path

from equigrad.config.data import Data
from equigrad.data.index import is_held_out
from equigrad.data.sources import documents
from equigrad.data.tokenizers import Tokenizer, byte_tokenizer, read_tokenizer, train_bpe
from equigrad.errors import UserError

TRAINING_BYTES = 200 << 20  # more text no longer changes a vocabulary much


def build_tokenizer(data: Data, folder: Path) -> Tokenizer:
    """The tokenizer saved in ``folder``, if there is one, else the one ``data`` asks for (which is not saved here)."""
    config = data.tokenizer
    if (folder / "tokenizer.json").is_file():
        return read_tokenizer(folder)
    if config.path is not None:
        tokenizer = read_tokenizer(Path(config.path).expanduser(), config.bos_token, config.eos_token)
    elif config.kind == "bytes":
        tokenizer = byte_tokenizer()
    else:
        tokenizer = train_bpe(training_texts(data), config.vocab_size)
    tokenizer = tokenizer.replaced(config.bos_token, config.eos_token, _template(config.chat_template))
    return tokenizer if config.path is not None else tokenizer.beginning_texts()


def training_texts(data: Data, limit: int = TRAINING_BYTES) -> Iterator[str]:
    """Text of the training documents, at most ``limit`` UTF-8 bytes, shared among the sources by their weights.

    Raises ``UserError`` in the end where there was none.
    """
    total = sum(source.weight for source in data.sources)
    found = False
    for source in data.sources:
        room, index = limit * source.weight / total, 0
        for document in documents(source):
            if not is_held_out(index, data.held_out_every):
                room -= len(document.plain.encode())
                if room < 0:
                    break
                found = found or bool(document.plain)
                yield document.plain
            index += document.last
    if not found:
        raise UserError(f"{', '.join(s.path for s in data.sources)}: no text to train a tokenizer on")


def _template(path: str | None) -> str | None:
    if path is None:
        return None
    file = Path(path).expanduser()
    if file.exists() and not file.is_file():  # a pipe would never end
        raise UserError(f"data.tokenizer.chat_template {path} is not a file")
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.tokenizer.chat_template {path} cannot be read: {error}") from None
