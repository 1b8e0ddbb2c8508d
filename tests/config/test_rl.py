"""The section of reinforcement learning: what a job may say of tasks, and what it is told when it may not."""

import tomllib
from typing import Any

import pytest

from equigrad.config.load import dump_toml, load_job, make_job, section_of, walk
from equigrad.config.rl import Rl
from equigrad.config.tasks import BUILT_IN
from equigrad.errors import UserError


def section(tree: dict[str, Any]) -> Rl:
    rl = make_job({"rl": tree}, "test").rl
    assert rl is not None
    return rl


def test_a_name_is_a_task_and_one_needs_no_list() -> None:
    long = section({"task": [{"name": "countdown", "weight": 1.0}]})
    for short in ("countdown", ["countdown"], {"name": "countdown"}):
        assert section({"task": short}) == long


@pytest.mark.parametrize(
    "name", [*BUILT_IN, "my_task.py:Task", "a/b c.py:T_1", "x.jsonl", "x/*.jsonl.gz", "reasoning-gym:chain_sum"]
)
def test_every_kind_of_task_can_be_named_in_a_file_and_on_the_command_line(name: str) -> None:
    assert [choice.name for choice in section({"task": name}).task] == [name]
    job = load_job(None, ["--rl.task", name])
    assert job.rl is not None
    assert [choice.name for choice in job.rl.task] == [name]


def test_the_section_survives_a_dump() -> None:
    tree = {
        "task": [{"name": "my.py:T", "weight": 2.5, "options": {"a": [1, {"b": "c"}], "d": False}}, "arithmetic"],
        "arithmetic": {"below": [5, 7], "operations": ["multiply"]},
        "verify_timeout_s": 0.5,
    }
    job = make_job({"rl": tree}, "test")
    assert make_job(tomllib.loads(dump_toml(job)), "its dump") == job


@pytest.mark.parametrize(
    ("tree", "complaint"),
    [
        ({"task": "aritmetic"}, "rl.task.0.name: no such task; did you mean 'arithmetic'? (given: 'aritmetic')"),
        ({"task": "chess"}, "there are arithmetic, calculator, countdown, format, sequences, and your own"),
        ({"task": "my_task.py"}, 'no class is named: "my_task.py:Task"'),
        ({"task": "my_task.py:"}, "no such task"),
        ({"task": "reasoning-gym:"}, "no such task"),
        ({"task": ["format", "format"]}, "format: named more than once; give it more weight instead"),
        (
            {"task": {"name": "format", "options": {"words": 3}}},
            "options of format are the keys of the section [rl.format]",
        ),
        ({"task": {"name": "a.jsonl", "options": {"b": 3}}}, "the keys of the section [rl.jsonl]"),
        ({"task": {"name": "a.py:B", "options": {"b": float("nan")}}}, "options are text, numbers, lists and tables"),
        ({"task": []}, "rl.task"),
        ({"task": {"name": "format", "wieght": 3}}, "unknown key 'rl.task.0.wieght'; did you mean 'rl.task[].weight'?"),
        ({"arithmetic": {"belo": [3]}}, "unknown key 'rl.arithmetic.belo'; did you mean 'rl.arithmetic.below'?"),
        ({"aritmetic": {}}, "did you mean 'rl.arithmetic'?"),
        ({"verify_timeout": 3}, "did you mean 'rl.verify_timeout_s'?"),
        ({"arithmetic": {"below": [1]}}, "rl.arithmetic.below.0"),
        ({"arithmetic": {"below": []}}, "rl.arithmetic.below"),
        ({"arithmetic": {"operations": ["divide"]}}, "rl.arithmetic.operations.0"),
        ({"countdown": {"numbers": [1]}}, "rl.countdown.numbers.0"),
        ({"format": {"rules": [6]}}, "rl.format.rules.0"),
        ({"curriculum": {"raise_at": 0.5, "lower_at": 0.5}}, "lower_at 0.5 is not below raise_at 0.5"),
        ({"verify_timeout_s": 0.0}, "rl.verify_timeout_s"),
        ({"verify_workers": 0}, "rl.verify_workers"),
        ({"held_out_every": 1}, "rl.held_out_every"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_what_could_be(tree: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError) as caught:
        section(tree)
    assert complaint in str(caught.value)


def test_every_key_has_a_meaning() -> None:
    for key, field in walk(Rl, entries=True):
        assert field.description, key


def test_every_section_says_what_it_is() -> None:
    for field in Rl.model_fields.values():
        inner = section_of(field.annotation)
        assert inner is None or inner.__doc__
