"""Text to token ids and back. Knows nothing of where text comes from.

There is one class. A byte tokenizer is a byte-level BPE without merges, so it is saved, loaded and read by
``transformers`` like any other.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Engine

from equigrad.data.chat import CHATML, ChatTemplate
from equigrad.errors import UserError
from equigrad.files import in_one_piece

END_OF_TEXT = "<|endoftext|>"
CHAT_TOKENS = ("<|im_start|>", "<|im_end|>")

# How Qwen2 cuts text into words before BPE: GPT-4's pattern with single digits.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Training a BPE takes time with the square of a word's length: a sequence of genes, say, is cut into words of this many
# characters, which leaves the vocabulary of any other text as it is.
_LONGEST_WORD = 1024
_LONG_WORD = re.compile(rf"(?<!\S)\S{{{_LONGEST_WORD},}}|(?<!\s)\s{{{_LONGEST_WORD},}}")
_WELL_KNOWN = {
    "bos_token": ("<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>"),
    "eos_token": (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>"),
}


class Tokenizer:
    """A ``tokenizers`` engine with its begin-of-text and end-of-text tokens and its chat template."""

    def __init__(self, engine: Engine, bos_token: str, eos_token: str, chat_template: str = CHATML) -> None:
        """Raises ``UserError`` where the vocabulary lacks ``bos_token`` or ``eos_token``."""
        engine.no_truncation()  # some tokenizer.json files cut or pad every text
        engine.no_padding()
        self._engine = engine
        self.bos_token, self.eos_token, self.chat_template = bos_token, eos_token, chat_template
        self.bos_id, self.eos_id = self._id(bos_token), self._id(eos_token)

    def _id(self, token: str) -> int:
        found = self._engine.token_to_id(token)
        if found is None:
            raise UserError(f"the tokenizer's vocabulary has no token {token!r}; name one that it has")
        return found

    @cached_property
    def vocab_size(self) -> int:
        """1 + the largest token id."""
        return 1 + max(self._engine.get_vocab(with_added_tokens=True).values())

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all that decides the tokens of a text."""
        definition = [json.loads(self._engine.to_str()), self.bos_token, self.eos_token]
        return hashlib.sha256(json.dumps(definition, sort_keys=True).encode()).hexdigest()

    @cached_property
    def cuts_at_lines(self) -> bool:
        """Whether text may be encoded line by line; not so where every text gets a space in front (SentencePiece)."""
        whole, first, second = self.encode_batch(["a\nb", "a\n", "b"])
        return np.array_equal(whole, np.concatenate([first, second]))

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template, compiled."""
        return ChatTemplate(self.chat_template, bos_token=self.bos_token, eos_token=self.eos_token)

    def encode_batch(self, texts: Sequence[str], special: bool = False) -> list[np.ndarray]:
        """Ids (int32 [n]) of each text, without begin and end of text.

        ``<|endoftext|>`` in a text is thirteen characters; with ``special``, for rendered chats, it is a token.
        """
        self._engine.encode_special_tokens = not special
        encodings = self._engine.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Ids (int32 [n]) of each rendered text, special tokens in it being tokens, and their characters.

        Offsets (int64 [n, 2]) hold a token's first character and the one after its last; the tokens of one character
        share it.
        """
        self._engine.encode_special_tokens = False
        encodings = self._engine.encode_batch(list(texts), add_special_tokens=False)
        return [(np.array(e.ids, np.int32), np.array(e.offsets, np.int64).reshape(-1, 2)) for e in encodings]

    def chat_prompt(self, messages: list[dict]) -> str:
        """The chat as text, up to where the assistant begins to write; encode it with ``special``."""
        return self.template.text(messages, add_generation_prompt=True)

    def turn_ends(self) -> set[int]:
        """The special token, if any, with which the template ends the assistant's turn: where generation stops."""
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        (ids,) = self.encode_batch([self.template.text(chat).rstrip()], special=True)
        added = self._engine.get_added_tokens_decoder()
        return {i for i in ids[-1:].tolist() if i in added and added[i].special}

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens, special tokens left out; incomplete UTF-8 becomes U+FFFD."""
        return self._engine.decode([int(i) for i in ids], skip_special_tokens=True)

    def token_text(self, token: int) -> str:
        """What a token says, alone: its text, or the name of a special one; part of a character is U+FFFD."""
        return self.decode([token]) or (self._engine.id_to_token(token) or "")

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json``: ``read_tokenizer`` and ``transformers`` load them."""
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "chat_template": self.chat_template,
            "clean_up_tokenization_spaces": False,
        }
        for name, text in {
            "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
            "tokenizer.json": self._engine.to_str(pretty=True),
        }.items():
            with in_one_piece(folder / name) as aside:
                aside.write_text(text, encoding="utf-8")

    def beginning_texts(self) -> "Tokenizer":
        """The same, so set that ``transformers`` begins a text as models here learn it: with begin-of-text."""
        begin = [(self.bos_token, self.bos_id)]
        self._engine.post_processor = processors.TemplateProcessing(single=f"{self.bos_token} $A", special_tokens=begin)
        return self

    def replaced(
        self, bos_token: str | None = None, eos_token: str | None = None, chat_template: str | None = None
    ) -> "Tokenizer":
        """The same vocabulary with other special tokens or another chat template, where given."""
        return Tokenizer(
            self._engine,
            bos_token or self.bos_token,
            eos_token or self.eos_token,
            chat_template or self.chat_template,
        )


def byte_tokenizer() -> Tokenizer:
    """One token a byte: ids 0 to 255 are the bytes, 256 begins and ends a text."""
    engine = Engine(models.BPE({character: byte for byte, character in enumerate(_byte_characters())}, []))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    engine.decoder = decoders.ByteLevel()
    engine.add_special_tokens([END_OF_TEXT])
    return Tokenizer(engine, END_OF_TEXT, END_OF_TEXT).beginning_texts()


def _byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level BPE: itself where printable, else from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE of ``vocab_size`` tokens (fewer where the texts have too few pairs), the same on every run.

    The special tokens come first (``<|endoftext|>``, which begins and ends a text, ``<|im_start|>``, ``<|im_end|>``),
    then the 256 bytes, then the merges.
    """
    engine = Engine(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, *CHAT_TOKENS],
        initial_alphabet=_byte_characters(),
        show_progress=False,
    )
    engine.train_from_iterator(chain.from_iterable(map(_without_long_words, texts)), trainer)
    return Tokenizer(engine, END_OF_TEXT, END_OF_TEXT).beginning_texts()


def _without_long_words(text: str) -> Iterator[str]:
    """The text, cut where a run of characters without white space, or of nothing else, is too long."""
    start = 0
    for run in _LONG_WORD.finditer(text):
        for end in range(run.start() + _LONGEST_WORD, run.end(), _LONGEST_WORD):
            yield text[start:end]
            start = end
    yield text[start:]


def read_tokenizer(path: Path, bos_token: str | None = None, eos_token: str | None = None) -> Tokenizer:
    """A ``tokenizer.json``, or the folder that holds one, with the settings beside it.

    Begin and end of text are those given, else those of ``tokenizer_config.json``, else of
    ``special_tokens_map.json``, else well-known names. A tokenizer without a begin-of-text token begins with its
    end-of-text token, as Qwen does. Raises ``UserError`` where there is neither, or a file is missing or malformed.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"no tokenizer at {file}")
    try:
        engine = Engine.from_file(str(file))
    except Exception as error:  # the engine raises bare Exception
        raise UserError(f"{file} is not a tokenizer.json: {error}") from None
    config = _read_json(file.with_name("tokenizer_config.json"))
    declared = _read_json(file.with_name("special_tokens_map.json")) | {k: v for k, v in config.items() if v}

    def find(role: str) -> str | None:
        token = declared.get(role)
        token = token.get("content") if isinstance(token, dict) else token
        return token or next((name for name in _WELL_KNOWN[role] if engine.token_to_id(name) is not None), None)

    eos_token = eos_token or find("eos_token")
    bos_token = bos_token or find("bos_token") or eos_token
    if eos_token is None or bos_token is None:
        raise UserError(f"{file} names no end-of-text token; set data.tokenizer.eos_token to a token of its vocabulary")
    return Tokenizer(engine, bos_token, eos_token, _own_template(file.parent, config) or CHATML)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"{file}: expected a JSON object")
    return found


def _own_template(folder: Path, config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates
        template = next((t["template"] for t in template if t["name"] == "default"), None)
    return template
