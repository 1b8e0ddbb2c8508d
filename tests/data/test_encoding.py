"""Documents become sequences in which exactly the right tokens are in the loss."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Engine
from tokenizers import models, pre_tokenizers

from equigrad.config.data import Source
from equigrad.data import sources
from equigrad.data.encoding import encode
from equigrad.data.sources import Chat, Document, Prompt, Text, documents
from equigrad.data.tokenizers import Tokenizer, byte_tokenizer
from equigrad.errors import UserError

BYTES = byte_tokenizer()
CHAT = [{"role": "user", "content": "é"}, {"role": "assistant", "content": "ü!"}]


def encoded(*documents: Document, tokenizer: Tokenizer = BYTES, eos: bool = True) -> list:
    return [piece for batch in encode(documents, tokenizer, eos) for piece in batch]


@pytest.mark.parametrize("eos", [False, True])
def test_a_text_begins_with_bos_and_ends_with_eos_where_asked(eos: bool) -> None:
    end = [256] if eos else []
    text, empty = encoded(Text("", "aé"), Text("", ""), eos=eos)
    assert text.ids.tolist() == [256, 97, 0xC3, 0xA9, *end]
    assert empty.ids.tolist() == [256, *end]
    assert (text.loss, text.bytes, empty.bytes) == (None, 3, 0)


def test_a_completion_and_the_end_are_in_the_loss() -> None:
    (piece,) = encoded(Prompt("", "a", "bc"))
    assert piece.ids.tolist() == [256, 97, 98, 99, 256]
    assert piece.loss.tolist() == [False, False, True, True, True]
    assert piece.bytes == 2


def test_special_tokens_of_a_prompt_are_tokens_and_of_a_text_are_not(bpe: Tokenizer) -> None:
    (piece,) = encoded(Prompt("", "<|im_start|>", "<|im_end|>"), tokenizer=bpe, eos=False)
    assert len(piece.ids) == 3
    (piece,) = encoded(Text("", "<|im_start|>"), tokenizer=bpe, eos=False)
    assert len(piece.ids) > 5


def test_a_chat_holds_what_its_template_writes(bpe: Tokenizer) -> None:
    (piece,) = encoded(Chat("", CHAT), tokenizer=bpe)
    assert bpe.eos_id not in piece.ids
    assert bpe.decode(piece.ids) == "user\né\nassistant\nü!\n"
    assert bpe.decode(piece.ids[piece.loss]) == "ü!"
    assert piece.bytes == len("ü!<|im_end|>".encode())


def test_something_comes_before_a_first_token_that_is_learned() -> None:
    tokenizer = BYTES.replaced(chat_template="{% generation %}{{ messages[1].content }}{% endgeneration %}")
    (piece,) = encoded(Chat("", CHAT), tokenizer=tokenizer)
    assert piece.ids.tolist() == [256, *"ü!".encode()]
    assert piece.loss.tolist() == [False, True, True, True]


def test_a_chat_that_cannot_be_rendered_names_its_place() -> None:
    tokenizer = BYTES.replaced(chat_template="{{ raise_exception('no') }}")
    with pytest.raises(UserError, match=r"^chat\.jsonl:7: .*: no$"):
        encoded(Chat("chat.jsonl:7", CHAT), tokenizer=tokenizer)


def test_a_text_cut_into_pieces_has_the_tokens_of_the_whole(
    bpe: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "\n".join(d.plain for d, _ in zip(documents(Source(path="builtin:moby-dick")), range(4), strict=False))
    (tmp_path / "a.txt").write_text(text)
    monkeypatch.setattr(sources, "PIECE", 1000)
    pieces = encoded(*documents(Source(path=str(tmp_path / "a.txt"))), tokenizer=bpe)
    assert len(pieces) > 10
    (whole,) = encoded(Text("", text), tokenizer=bpe)
    assert np.array_equal(np.concatenate([piece.ids for piece in pieces]), whole.ids)
    assert sum(piece.bytes for piece in pieces) == whole.bytes


def test_a_tokenizer_that_puts_a_space_in_front_gets_whole_texts() -> None:
    engine = Engine(models.BPE({"▁": 0, "a": 1, "b": 2, "\n": 3, "</s>": 4}, []))
    engine.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer = Tokenizer(engine, "</s>", "</s>")
    (whole,) = encoded(Text("", "a\nb"), tokenizer=tokenizer)
    (joined,) = encoded(Text("", "a\n", last=False), Text("", "b", first=False), tokenizer=tokenizer)
    assert joined.ids.tolist() == whole.ids.tolist() == [4, 0, 1, 3, 2, 4]
    assert joined.last
