"""JSONL tasks: every record once an epoch, in one split; answers by value or by letter."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from equigrad.config.tasks import Jsonl
from equigrad.errors import UserError
from equigrad.rl.tasks.jsonl import JsonlTask
from equigrad.rl.tasks.protocol import Question
from tests.rl.tasks.given import place, verdict, write


def task(tmp_path: Path, records: list[Any], **keys: str) -> JsonlTask:
    file = write(tmp_path / "tasks.jsonl", "".join(json.dumps(record) + "\n" for record in records))
    return JsonlTask(str(file), Jsonl(**keys))


def test_every_record_comes_once_an_epoch_in_its_split_and_in_a_new_order(tmp_path: Path) -> None:
    made = task(tmp_path, [{"prompt": f"{n} or {n % 40}?", "answer": n} for n in range(120)])
    held_out = {str(made.question(place(n, "held_out")).prompt) for n in range(120)}
    train = 120 - len(held_out)
    assert 2 < len(held_out) < 30
    epochs = [[str(made.question(place(e * train + n)).prompt) for n in range(train)] for e in range(3)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert set(epochs[0]) | held_out == {f"{n} or {n % 40}?" for n in range(120)}
    assert not set(epochs[0]) & held_out


def test_equal_prompts_are_in_one_split(tmp_path: Path) -> None:
    made = task(tmp_path, [{"prompt": f"{n % 30}?", "answer": n} for n in range(90)])
    held_out = Counter(str(made.question(place(n, "held_out", every=5)).prompt) for n in range(3))
    train = {str(made.question(place(n, every=5)).prompt) for n in range(90)}
    assert not set(held_out) & train


@pytest.mark.parametrize(
    ("answer", "said", "reward"),
    [
        (7, "7", 1), (7, "so 3+4 = 7", 1), (7, "<answer>7.0</answer>", 1), (7, "8", 0), (7, "seven", 0),
        (0.1, "0.1", 1), (0.1, "0.1000000000000000055", 0), (-2.5, "-2.5", 1), (1e22, "1" + "0" * 22, 1),
        ("72", "it is = 72", 1), ("72", "72.0", 1), ("Paris", "Paris", 1), ("Paris", " Paris\n", 1),
        ("Paris", "paris", 0),
        ("Paris", "I think <answer>Paris</answer>.", 1), ("Paris", "Paris or London", 0),
        (["Paris", "Lutetia"], "Lutetia", 1),
        ([7, "seven"], "seven", 1), ([7, "seven"], "eight", 0), ("", "", 1),
    ],
)  # fmt: skip
def test_numbers_are_compared_by_value_and_text_by_letter(
    tmp_path: Path, answer: Any, said: str, reward: float
) -> None:
    made = task(tmp_path, [{"prompt": "?", "answer": answer}])
    (question,) = made._questions
    assert verdict(made, question, said).reward == reward


def test_the_first_answer_is_the_reference_solution(tmp_path: Path) -> None:
    for answer in (7, "Paris", -0.25, ["a", "b"]):
        made = task(tmp_path, [{"prompt": "?", "answer": answer}])
        (question,) = made._questions
        assert verdict(made, question, *made.solution(question)).reward == 1


def test_keys_can_be_named_and_prompts_can_be_chats(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    made = task(tmp_path, [{"messages": chat, "gold": 4, "more": None}], prompt="messages", answer="gold")
    assert made._questions == [Question(chat, {"answers": [4]})]


def test_a_glob_names_several_files_and_they_may_be_compressed(tmp_path: Path) -> None:
    for number in range(2):
        line = json.dumps({"prompt": f"{number}?", "answer": number}) + "\n"
        write(tmp_path / f"{number}.jsonl", line)
        (tmp_path / f"{number}.jsonl.gz").write_bytes(gzip.compress(line.encode()))
    for pattern in ("*.jsonl", "*.jsonl.gz"):
        assert [q.prompt for q in JsonlTask(str(tmp_path / pattern), Jsonl())._questions] == ["0?", "1?"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"prompt": "a"}', "tasks.jsonl:2: no key 'answer'; the keys are 'prompt'; [rl.jsonl] says which to read"),
        ('{"answer": "a"}', "no key 'prompt'"),
        ('{"prompt": "a", "answer": true}', "'answer' must be text, a number, or a list of them"),
        ('{"prompt": "a", "answer": []}', "must be text, a number"),
        ('{"prompt": "a", "answer": {"b": 1}}', "must be text, a number"),
        ('{"prompt": "", "answer": 1}', "tasks.jsonl:2: the prompt is empty"),
        ('{"prompt": 7, "answer": 1}', "a prompt is text, or a list of"),
        ('{"prompt": "a", "answer": NaN}', "not all JSON data"),
        ("{", "tasks.jsonl:2: not valid JSON"),
    ],
)
def test_a_bad_record_is_named_with_its_line(tmp_path: Path, line: str, complaint: str) -> None:
    file = write(tmp_path / "tasks.jsonl", f'{{"prompt": "ok", "answer": 1}}\n{line}\n')
    with pytest.raises(UserError) as caught:
        JsonlTask(str(file), Jsonl())
    assert complaint in str(caught.value)


def test_a_missing_file_and_an_empty_split_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nothing\.jsonl: no such file"):
        JsonlTask(str(tmp_path / "nothing.jsonl"), Jsonl())
    made = task(tmp_path, [{"prompt": "a", "answer": 1}])
    with pytest.raises(UserError, match="none of its 1 records belongs to the split"):
        [made.question(place(0, split, every=2)) for split in ("train", "held_out")]
