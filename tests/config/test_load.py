"""Job files and overrides: what is read is what was meant, and what cannot be read is named."""

import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equigrad.config import Job, dump_toml, load_job
from equigrad.config.base import Section
from equigrad.config.load import (
    QUICKSTART,
    _toml_value,
    help_text,
    make_job,
    nearest,
    override_value,
    parse_overrides,
    read_toml,
    section_of,
    set_key,
    walk,
)
from equigrad.errors import UserError

CONFIGS = Path(__file__).parents[2] / "configs"
PRESETS = sorted(CONFIGS.glob("*.toml"))
TEXT = st.text(st.characters(codec="utf-8"), max_size=20)


def read_back(job: Job, tmp_path: Path) -> Job:
    file = tmp_path / "job.toml"
    file.write_text(dump_toml(job), encoding="utf-8")
    return load_job(file)


# ---- files


@pytest.mark.parametrize("preset", PRESETS, ids=lambda p: p.stem)
def test_a_dumped_job_reads_back_as_the_same_job(preset: Path, tmp_path: Path) -> None:
    job = load_job(preset)
    assert read_back(job, tmp_path) == job


def test_without_a_file_the_quickstart_is_the_job() -> None:
    assert load_job(None) == load_job(QUICKSTART)
    assert load_job(None).name == "quickstart"


def test_the_quickstart_preset_is_the_embedded_one() -> None:
    assert load_job(CONFIGS / "quickstart.toml") == load_job(None)


@given(
    text=TEXT,
    lr=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    seed=st.integers(0, 2**63 - 1),
    layers=st.lists(st.integers(0, 3), max_size=4),
    steps=st.none() | st.tuples(st.integers(1, 50), st.integers(50, 99)),
    scaling=st.none() | st.just({"kind": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}),
)
def test_any_value_survives_a_dump(
    text: str, lr: float, seed: int, layers: list[int], steps: Any, scaling: Any
) -> None:
    tree: dict[str, Any] = {
        "seed": seed,
        "data": {"sources": [{"path": f"x{text}", "text_key": text}, "builtin:sotu"]},
        "model": {"full_attention_layers": layers, "rope_scaling": scaling},
        "optim": {"lr": lr},
        "observe": {"sample_prompt": text, "profile_steps": steps},
    }
    job = make_job(tree, "a test")
    assert make_job(tomllib.loads(dump_toml(job)), "its dump") == job


def test_a_bare_string_is_a_source_and_a_single_source_needs_no_list() -> None:
    long = make_job({"data": {"sources": [{"path": "a.txt"}]}}, "test")
    for short in ("a.txt", ["a.txt"], {"path": "a.txt"}):
        assert make_job({"data": {"sources": short}}, "test") == long


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no job file at .*/nothing\.toml"):
        load_job(tmp_path / "nothing.toml")


def test_a_folder_is_no_job_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a folder; the job of a run is"):
        load_job(tmp_path)


@pytest.mark.parametrize(("text", "complaint"), [("train = [", "not valid TOML"), ("a = 1\na =\nb = 2", "line 2")])
def test_bad_toml_is_named_with_its_line(text: str, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(UserError, match=complaint) as caught:
        load_job(file)
    assert str(file) in str(caught.value)


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_bytes(b"name = '\xff'")
    with pytest.raises(UserError, match=r"bad\.toml"):
        load_job(file)


# ---- overrides


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("train.steps", "7", 7),
        ("train.steps", "1_000", 1000),
        ("optim.lr", "3e-4", 3e-4),
        ("optim.lr", "1", 1.0),
        ("optim.lr", ".5", 0.5),
        ("data.shuffle", "false", False),
        ("data.shuffle", "True", True),
        ("optim.schedule", "wsd", "wsd"),
        ("optim.schedule", '"wsd"', "wsd"),
        ("observe.sample_prompt", "Call me", "Call me"),
        ("observe.sample_prompt", "12", "12"),
        ("observe.sample_prompt", "true", "true"),
        ("optim.betas", "[0.8, 0.9]", (0.8, 0.9)),
        ("observe.profile_steps", "[2, 3]", (2, 3)),
        ("observe.profile_steps", "none", None),
        ("batch.samples", "None", None),
        ("model.sliding_window", "16", 16),
        ("model.full_attention_layers", "[0, 2]", [0, 2]),
        ("name", "other-1.2", "other-1.2"),
        ("seed", "11", 11),
        ("data.tokenizer.kind", "bytes", "bytes"),
    ],
)
@pytest.mark.parametrize("form", ["two words", "one word"])
def test_an_override_of_each_type_is_read(key: str, text: str, value: Any, form: str) -> None:
    words = [f"--{key}", text] if form == "two words" else [f"--{key}={text}"]
    node: Any = load_job(None, words)
    for part in key.split("."):
        node = getattr(node, part)
    assert node == value
    assert type(node) is type(value)


def test_every_key_can_be_overridden_with_its_own_value() -> None:
    """What a key holds, written as TOML, is taken back as an override."""
    job = load_job(None)
    for key, field in walk(Job):
        node: Any = job
        for part in key.split("."):
            node = getattr(node, part, None)
        if node is not None and section_of(field.annotation) is None:
            assert load_job(None, [f"--{key}", _toml_value(node)]) == job, key


@pytest.mark.parametrize("path", ["notes.txt", "builtin:sotu", "hf:some/name", "a folder/*.jsonl"])
def test_a_bare_source_is_an_override(path: str) -> None:
    assert [s.path for s in load_job(None, ["--data.sources", path]).data.sources] == [path]


def test_several_sources_are_an_override() -> None:
    sources = load_job(None, ["--data.sources", '["a.txt", {path = "b.jsonl", weight = 2}]']).data.sources
    assert [(s.path, s.weight) for s in sources] == [("a.txt", 1.0), ("b.jsonl", 2.0)]


def test_a_table_override_keeps_what_it_does_not_name() -> None:
    tokenizer = load_job(None, ["--data.tokenizer", "{vocab_size = 300}"]).data.tokenizer
    assert (tokenizer.kind, tokenizer.vocab_size) == (load_job(None).data.tokenizer.kind, 300)


def test_the_last_override_of_a_key_counts() -> None:
    assert load_job(None, ["--train.steps", "1", "--train.steps=2"]).train.steps == 2


@given(st.lists(st.tuples(st.sampled_from(["a", "b.c"]), TEXT.filter(lambda t: not t.startswith("--")))))
def test_both_spellings_of_overrides_are_the_same(pairs: list[tuple[str, str]]) -> None:
    two = [word for key, text in pairs for word in (f"--{key}", text)]
    assert parse_overrides(two) == parse_overrides([f"--{key}={text}" for key, text in pairs]) == pairs


@pytest.mark.parametrize("words", [["--train.steps"], ["train.steps", "3"], ["--"]])
def test_half_an_override_is_an_error(words: list[str]) -> None:
    with pytest.raises(UserError):
        parse_overrides(words)


@given(st.sampled_from([key for key, _ in walk(Job)]), TEXT)
def test_no_override_text_escapes_as_anything_but_a_user_error(key: str, text: str) -> None:
    try:
        tree = read_toml(QUICKSTART)
        set_key(tree, key, override_value(key, text), {})
        make_job(tree, "test")
    except UserError:
        pass


# ---- what is wrong, where, and what would be right


@pytest.mark.parametrize(
    ("key", "close"),
    [
        ("train.stps", "train.steps"),
        ("data.sources.1.wieght", "data.sources[].weight"),
        ("model.hiden_size", "model.hidden_size"),
        ("layout.dpshard", "layout.dp_shard"),
        ("steps", "train.steps"),
        ("data.steps", "train.steps"),
        ("optm.lr", "optim.lr"),
        ("traim", "train"),
        ("data.tokeniser", "data.tokenizer"),
        ("optim.beta", "optim.betas"),
    ],
)
def test_an_unknown_key_gets_the_nearest_one(key: str, close: str) -> None:
    assert f"did you mean '{close}'" in nearest(key)


@pytest.mark.parametrize("key", ["zzz.qqq", "data.bogus", "model.5"])
def test_a_key_like_no_other_gets_no_guess(key: str) -> None:
    assert nearest(key) == "; `equigrad train --help` lists every key"


def test_a_section_is_told_from_its_keys() -> None:
    assert nearest("observe") == "; it is a section: set one of its keys, as in --observe.log_every VALUE"


def test_an_unknown_key_in_a_file_names_file_key_and_fix(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text("[train]\nstps = 3\n")
    with pytest.raises(UserError) as caught:
        load_job(file)
    assert str(caught.value) == f"{file}: unknown key 'train.stps'; did you mean 'train.steps'?"


def test_an_unknown_key_on_the_command_line_blames_the_command_line() -> None:
    with pytest.raises(UserError) as caught:
        load_job(None, ["--train.stps", "3"])
    assert str(caught.value) == "command line: unknown key 'train.stps'; did you mean 'train.steps'?"


def test_a_wrong_type_names_origin_key_and_value(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('[optim]\nlr = "fast"\n')
    with pytest.raises(UserError, match=rf"^{file}: optim\.lr: .*number.*'fast'"):
        load_job(file)
    with pytest.raises(UserError, match=r"^command line: optim\.lr: .*number.*'quick'"):
        load_job(file, ["--optim.lr", "quick"])


def test_types_are_not_bent() -> None:
    for section, key, value in (("train", "steps", 2.5), ("train", "steps", "3"), ("data", "shuffle", 1)):
        with pytest.raises(UserError, match=f"{section}.{key}"):
            make_job({section: {key: value}}, "test")


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(UserError) as caught:
        load_job(None, ["--train.stps", "3", "--optim.lr", "x"])
    assert len(str(caught.value).splitlines()) == 2


def test_a_fault_between_keys_names_all_that_took_part() -> None:
    with pytest.raises(UserError) as caught:
        load_job(None, ["--model.max_position_embeddings", "16", "--train.steps", "3"])
    text = str(caught.value)
    assert text.startswith("the embedded quickstart, with --model.max_position_embeddings: ")
    assert "data.context" in text
    assert "train.steps" not in text


def test_a_list_entry_is_named_by_its_place() -> None:
    with pytest.raises(UserError, match=r"^command line: data\.sources\.1\.weight: .*number"):
        load_job(None, ["--data.sources", '["a.txt", {path = "b", weight = "much"}]'])


EXPERTS = ["--model.experts.num_experts", "8"]


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["--layout.ep", "2"], "layout.ep 2 divides experts, and the model has none"),
        (["--layout.ep", "2", *EXPERTS], "dp_shard 1 x cp 1 = 1; layout.ep can be 1"),
        (["--layout.ep", "3", "--layout.dp_shard", "4", *EXPERTS], "dp_shard 4 x cp 1 = 4; layout.ep can be 1, 2, 4"),
        (
            ["--layout.ep", "4", "--layout.dp_shard", "4", "--model.experts.num_experts", "3"],
            "layout.ep 4 is more than model.experts.num_experts 3; layout.ep can be 1, 2",
        ),
        ([*EXPERTS, "--model.experts.num_experts_per_tok", "9"], "num_experts_per_tok 9 is more than num_experts 8"),
        ([*EXPERTS, "--model.experts.shared_expert_gate", "true"], "needs a shared expert"),
        ([*EXPERTS, "--model.experts.decoder_sparse_step", "99"], "layers is sparse"),
        ([*EXPERTS, "--model.experts.mlp_only_layers", "[77]"], "experts.mlp_only_layers must lie in 0.."),
        (["--batch.tokens", "none", "--batch.samples", "0"], "batch.samples"),
        (["--batch.samples", "3"], "not both"),
        (["--batch.row_tokens", "10"], "a whole sample must fit into a row"),
        (["--batch.tokens", "10"], "a whole sample must fit into a step"),
        (["--model.num_attention_heads", "5"], "not a multiple"),
        (["--model.num_key_value_heads", "2"], "not a multiple"),
        (["--model.head_dim", "3"], "even head_dim"),
        (["--model.partial_rotary_factor", "0.01"], "even head_dim x partial_rotary_factor 0.01"),
        (["--model.partial_rotary_factor", "1.5"], "model.partial_rotary_factor"),
        (["--model.linear_attention.linear_num_key_heads", "3"], "linear_num_value_heads 4 is not a multiple"),
        (["--model.full_attention_layers", "[9]"], "full_attention_layers"),
        (["--optim.betas", "[0.9, 1.0]"], "betas"),
        (["--optim.betas", "[1]"], "optim.betas: should be [float, float] (given: [1])"),
        (["--optim.betas", "[1, 2, 3]"], "optim.betas: should be [float, float] (given: [1, 2, 3])"),
        (["--data.held_out_every", "1"], "data.held_out_every: 1 holds out every document"),
        (["--data.sources[0].path", "a.txt"], "set the whole list"),
        (["--observe.profile_steps", "[3, 2]"], "first <= last"),
        (["--data.tokenizer.kind", "file"], "path goes with"),
        (["--data.sources", "[]"], "data.sources"),
        (["--name", "a/b"], "name"),
        (["--name", ".."], "name"),
        (["--seed", "-1"], "seed"),
        (["--train.steps", "nan"], "train.steps"),
        (["--optim.lr", "nan"], "optim.lr"),
        (["--optim.lr", "inf"], "optim.lr"),
        (["--train.steps.more", "1"], "not a section"),
    ],
)
def test_impossible_values_are_refused(overrides: list[str], complaint: str) -> None:
    with pytest.raises(UserError) as caught:
        load_job(None, overrides)
    assert complaint in str(caught.value)


# ---- help


def test_help_lists_every_key_with_type_default_and_doc() -> None:
    text = help_text(100)
    blocks = text.split("\n  ")
    for key, field in walk(Job):
        assert field.description, f"{key} has no docstring"
        assert any(block.lstrip().startswith(f"--{key} {{") for block in blocks), key
    assert "data.sources[].weight" in text
    assert max(map(len, text.splitlines())) <= 100


def test_every_section_says_what_it_is() -> None:
    seen: list[type[Section]] = [Job]
    for section in seen:
        assert section.__doc__
        inner = (section_of(field.annotation) for field in section.model_fields.values())
        seen += [s for s in inner if s is not None and s not in seen]  # type: ignore[misc]


def test_defaults_are_finite_numbers() -> None:
    assert all(not isinstance(f.default, float) or math.isfinite(f.default) for _, f in walk(Job))
