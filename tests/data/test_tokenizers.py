"""Tokenizers lose nothing, are the same on every run, and mean the same to `transformers`."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Engine
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from equigrad.data.chat import CHATML
from equigrad.data.tokenizers import Tokenizer, _without_long_words, byte_tokenizer, read_tokenizer, train_bpe
from equigrad.errors import UserError
from tests.data.conftest import CORPUS
from tests.jobs import full_disk

BYTES = byte_tokenizer()


@given(st.text())
@settings(deadline=None)
def test_a_byte_tokenizer_is_the_utf8_bytes(text: str) -> None:
    (ids,) = BYTES.encode_batch([text])
    assert ids.tolist() == list(text.encode())
    assert BYTES.decode([BYTES.bos_id, *ids, BYTES.eos_id]) == text


def test_a_byte_tokenizer_has_257_tokens_and_the_last_begins_and_ends_a_text() -> None:
    assert (BYTES.vocab_size, BYTES.bos_id, BYTES.eos_id) == (257, 256, 256)


def test_the_bytes_of_a_character_share_its_offsets() -> None:
    ((_, offsets),) = BYTES.encode_with_offsets(["aé😀"])
    assert offsets.tolist() == [[0, 1]] + [[1, 2]] * 2 + [[2, 3]] * 4


def test_incomplete_utf8_decodes_to_replacement_characters() -> None:
    assert BYTES.decode("é".encode()[:1]) == "\ufffd"


@given(st.text())
@settings(deadline=None)
def test_bpe_gives_back_every_text(bpe: Tokenizer, text: str) -> None:
    (ids,) = bpe.encode_batch([text])
    assert ids.dtype == np.int32
    assert bpe.decode(ids) == text


@pytest.mark.parametrize("text", ["<|endoftext|>", "a<|im_end|>b"])
def test_the_name_of_a_special_token_in_a_text_is_ordinary_text(bpe: Tokenizer, text: str) -> None:
    for tokenizer in (BYTES, bpe):
        (ids,) = tokenizer.encode_batch([text])
        assert tokenizer.eos_id not in ids
        assert tokenizer.decode(ids) == text


def test_special_tokens_of_a_rendered_text_are_tokens(bpe: Tokenizer) -> None:
    ((ids, offsets),) = bpe.encode_with_offsets(["<|im_start|>a<|im_end|>"])
    assert bpe.decode(ids) == "a"
    assert offsets.tolist() == [[0, 12], [12, 13], [13, 23]]


def test_a_chat_prompt_ends_where_the_assistant_begins_and_its_turn_where_the_template_says(bpe: Tokenizer) -> None:
    prompt = bpe.chat_prompt([{"role": "user", "content": "Hi"}])
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    (ids,) = bpe.encode_batch([prompt], special=True)
    assert ids.tolist() == bpe.encode_with_offsets([prompt])[0][0].tolist()
    assert [bpe.decode(ids), bpe.turn_ends()] == ["user\nHi\nassistant\n", {2}]
    assert BYTES.turn_ends() == set()  # <|im_end|> is ordinary text there


def test_training_gives_the_same_vocabulary_in_every_process(bpe: Tokenizer) -> None:
    program = "from equigrad.data.tokenizers import train_bpe; from tests.data.conftest import CORPUS;"
    program += "print(train_bpe(iter(CORPUS), 320).digest)"
    for seed in ("1", "2"):
        environment = {"PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": seed, "PATH": ""}
        run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert run.stdout.strip() == bpe.digest, run.stderr


def test_a_vocabulary_has_the_size_asked_for_or_what_the_text_gives(bpe: Tokenizer) -> None:
    assert bpe.vocab_size == 320
    assert train_bpe([], 320).vocab_size == 259
    assert train_bpe([], 320).digest != bpe.digest


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_saved_tokenizers_load_here_and_in_transformers(kind: str, bpe: Tokenizer, tmp_path: Path) -> None:
    tokenizer = BYTES if kind == "bytes" else bpe
    tokenizer.save(tmp_path)
    loaded = read_tokenizer(tmp_path)
    assert loaded.digest == tokenizer.digest
    assert loaded.chat_template == tokenizer.chat_template == CHATML
    reference = AutoTokenizer.from_pretrained(tmp_path)
    assert (reference.bos_token_id, reference.eos_token_id) == (tokenizer.bos_id, tokenizer.eos_id)
    for text, ids in zip(CORPUS, tokenizer.encode_batch(CORPUS), strict=True):
        ordinary = text.replace("<|endoftext|>", "")
        assert reference(ordinary)["input_ids"] == [tokenizer.bos_id, *tokenizer.encode_batch([ordinary])[0].tolist()]
        assert reference.decode(ids) == text
    messages = [{"role": "user", "content": "Hi"}]
    assert reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True).endswith("assistant\n")


def test_replaced_settings_survive_saving(bpe: Tokenizer, tmp_path: Path) -> None:
    bpe.replaced(eos_token="<|im_end|>", chat_template="{{ messages }}").save(tmp_path)
    loaded = read_tokenizer(tmp_path)
    assert (loaded.bos_token, loaded.eos_token, loaded.chat_template) == (
        "<|endoftext|>",
        "<|im_end|>",
        "{{ messages }}",
    )
    assert loaded.digest != bpe.digest


def word_level(*specials: str) -> Engine:
    engine = Engine(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    engine.pre_tokenizer = pre_tokenizers.Whitespace()
    engine.add_special_tokens(list(specials))
    return engine


@pytest.mark.parametrize(
    ("config", "special_map", "expected"),
    [
        ({"bos_token": "<x>", "eos_token": {"content": "<y>"}}, {"eos_token": "<z>"}, ("<x>", "<y>")),
        ({"bos_token": None, "eos_token": "<y>"}, {}, ("<y>", "<y>")),  # as Qwen does
        ({"eos_token": None}, {"bos_token": "<x>", "eos_token": "<z>"}, ("<x>", "<z>")),
        (None, None, ("<s>", "</s>")),  # well-known names
    ],
)
def test_begin_and_end_of_text_come_from_the_files_beside(
    config: dict | None, special_map: dict | None, expected: tuple[str, str], tmp_path: Path
) -> None:
    names = ("<x>", "<y>", "<z>") if config else ("<s>", "</s>")
    word_level(*names).save(str(tmp_path / "tokenizer.json"))
    if config:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(special_map))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = read_tokenizer(path)
        assert (loaded.bos_token, loaded.eos_token) == expected
    assert read_tokenizer(tmp_path, eos_token=names[0]).eos_token == names[0]


def test_a_chat_template_comes_from_its_own_file_or_the_config(bpe: Tokenizer, tmp_path: Path) -> None:
    bpe.save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}))
    assert read_tokenizer(tmp_path).chat_template == "D"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert read_tokenizer(tmp_path).chat_template == "J"


def test_truncation_and_padding_of_a_tokenizer_file_are_off(tmp_path: Path) -> None:
    engine = word_level("<s>")
    engine.enable_truncation(2)
    engine.enable_padding()
    engine.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 3)])
    engine.save(str(tmp_path / "tokenizer.json"))
    lengths = [len(ids) for ids in read_tokenizer(tmp_path, eos_token="<s>").encode_batch(["a b a b", "a"])]
    assert lengths == [4, 1]


def test_only_tokenizers_that_leave_the_beginning_of_a_text_alone_may_cut_it(bpe: Tokenizer) -> None:
    metaspace = Engine(models.BPE({"▁": 0, "a": 1, "b": 2, "\n": 3, "</s>": 4}, []))
    metaspace.pre_tokenizer = pre_tokenizers.Metaspace()
    metaspace.decoder = decoders.Metaspace()
    assert not Tokenizer(metaspace, "</s>", "</s>").cuts_at_lines
    assert bpe.cuts_at_lines
    assert BYTES.cuts_at_lines


def test_what_is_wrong_with_a_tokenizer_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no tokenizer at"):
        read_tokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json is not a tokenizer"):
        read_tokenizer(tmp_path)
    word_level("<x>").save(str(file))
    with pytest.raises(UserError, match=r"data\.tokenizer\.eos_token"):
        read_tokenizer(tmp_path)
    with pytest.raises(UserError, match="no token '<nope>'"):
        read_tokenizer(tmp_path, eos_token="<nope>")
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer_config\.json cannot be read"):
        read_tokenizer(tmp_path)


def test_a_tokenizer_that_cannot_be_written_in_full_leaves_the_old_one(bpe: Tokenizer, tmp_path: Path) -> None:
    BYTES.save(tmp_path)
    with full_disk(5_000), pytest.raises(OSError, match="File too large"):
        bpe.save(tmp_path)
    assert read_tokenizer(tmp_path).digest == BYTES.digest
    bpe.save(tmp_path)
    assert read_tokenizer(tmp_path).digest == bpe.digest
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]


def test_cutting_long_words_loses_nothing_and_leaves_other_text_alone() -> None:
    words = "a b" + "x" * 1024 + "\n" + "y" * 2049 + " " * 3000 + "z"
    assert [*_without_long_words("a short text\n" * 999)] == ["a short text\n" * 999]
    assert "".join(_without_long_words(words)) == words
    assert max(len(word) for part in _without_long_words(words) for word in part.split()) == 1024
