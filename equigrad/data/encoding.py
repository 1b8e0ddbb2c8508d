"""Documents -> token sequences with loss membership. Knows nothing of files, spans or contexts."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from equigrad.data.chat import ChatTemplate, Rendered, token_mask
from equigrad.data.sources import Chat, Document, Prompt, Text
from equigrad.data.tokenizers import Tokenizer
from equigrad.errors import UserError

BATCH = 1 << 20
"""Characters after which a batch of documents goes to the tokenizer, which encodes its texts in parallel."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """The sequence s of a document, or a piece of it. Worked example, bytes: prompt "a", completion "bc", with EOS:
    ids [256, 97, 98, 99, 256], loss [0, 0, 1, 1, 1], bytes 2."""

    ids: np.ndarray
    """int32 [n]."""
    loss: np.ndarray | None
    """Whether each token is in the loss as a label, bool [n]; never the first token. None: all but the first are."""
    bytes: int
    """UTF-8 bytes of the text that is in the loss."""
    last: bool = True
    """Whether the document ends here."""


def encode(documents: Iterable[Document], tokenizer: Tokenizer, append_eos: bool) -> Iterator[list[Encoded]]:
    """Encode documents of one kind, a batch at a time.

    Text and prompts begin with BOS, and end with EOS where ``append_eos``; a chat holds the tokens its template writes.
    """
    eos = [tokenizer.eos_id] if append_eos else []
    if not tokenizer.cuts_at_lines:
        documents = _joined(documents)
    for batch in _batches(documents):
        if isinstance(batch[0], Text):
            yield _texts(cast(list[Text], batch), tokenizer, eos)
        elif isinstance(batch[0], Prompt):
            yield _prompts(cast(list[Prompt], batch), tokenizer, eos)
        else:
            yield _chats(cast(list[Chat], batch), tokenizer)


def _texts(batch: list[Text], tokenizer: Tokenizer, eos: list[int]) -> list[Encoded]:
    encoded = []
    for piece, ids in zip(batch, tokenizer.encode_batch([piece.text for piece in batch]), strict=True):
        sequence = _sequence([tokenizer.bos_id] if piece.first else [], ids, eos if piece.last else [])
        encoded.append(Encoded(sequence, None, len(piece.text.encode()), piece.last))
    return encoded


def _prompts(batch: list[Prompt], tokenizer: Tokenizer, eos: list[int]) -> list[Encoded]:
    # Special tokens are tokens here: whoever prepares prompts writes them as the model shall see them.
    prompts = tokenizer.encode_batch([record.prompt for record in batch], special=True)
    completions = tokenizer.encode_batch([record.completion for record in batch], special=True)
    encoded = []
    for record, prompt, completion in zip(batch, prompts, completions, strict=True):
        ids = _sequence([tokenizer.bos_id], prompt, completion, eos)
        encoded.append(Encoded(ids, np.arange(len(ids)) > len(prompt), len(record.completion.encode())))
    return encoded


def _chats(batch: list[Chat], tokenizer: Tokenizer) -> list[Encoded]:
    chats = [_rendered(chat, tokenizer.template) for chat in batch]
    encoded = []
    for chat, (ids, offsets) in zip(chats, tokenizer.encode_with_offsets([c.text for c in chats]), strict=True):
        loss = token_mask(offsets, chat.spans)
        if loss[:1].any():  # something must come before a token that is to be predicted
            ids, loss = _sequence([tokenizer.bos_id], ids), np.append(False, loss)
        encoded.append(Encoded(ids, loss, sum(len(chat.text[a:b].encode()) for a, b in chat.spans)))
    return encoded


def _rendered(chat: Chat, template: ChatTemplate) -> Rendered:
    try:
        return template.render(chat.messages, chat.tools)
    except UserError as error:
        raise UserError(f"{chat.where}: {error}") from None


def _sequence(*parts: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.concatenate([np.asarray(part, np.int32) for part in parts])


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.plain) + 64  # a floor, so that empty documents do not pile up
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _joined(documents: Iterable[Document]) -> Iterator[Document]:
    """Whole documents only, for tokenizers whose encoding of pieces is not that of the whole."""
    pieces: list[str] = []
    for document in documents:
        if isinstance(document, Text):
            pieces.append(document.text)
            if not document.last:
                continue
            document = replace(document, text="".join(pieces), first=True)
            pieces = []
        yield document
