"""Lists: each kind is what Python makes of the list in the prompt."""

import pytest

from equigrad.config.tasks import Sequences
from equigrad.rl.tasks.draws import Draw
from equigrad.rl.tasks.protocol import Question
from equigrad.rl.tasks.sequences import SequencesTask
from tests.rl.tasks.given import verdict


@pytest.mark.parametrize("items", ["letters", "numbers"])
def test_the_answer_is_what_python_makes_of_the_prompt(items: str) -> None:
    task = SequencesTask(Sequences(items=items, lengths=[2, 9]), long=False)
    seen = set()
    for n in range(60):
        question = task.draw(Draw(n), n % 2)
        kind, *given = str(question.prompt).removesuffix(" =\n").split()
        assert len(given) == (2, 9)[n % 2]
        key = int if items == "numbers" else ord
        expected = {"copy": given, "reverse": list(reversed(given)), "sort": sorted(given, key=key)}[kind]
        assert question.facts["answer"] == expected
        seen.add(kind)
    assert seen == {"copy", "reverse", "sort"}


def test_parts_tell_how_much_is_in_place() -> None:
    task = SequencesTask(Sequences(), long=False)
    question = Question("copy a b c d =\n", {"answer": list("abcd")})
    for said, in_place in (
        ("a b c d", 1),
        ("a b d c", 0.5),
        ("a b", 0.5),
        ("a b c d e f g h", 0.5),
        ("abcd", 0),
        ("", 0),
    ):
        found = verdict(task, question, said)
        assert found.parts == {"correct": float(said == "a b c d"), "in_place": in_place}
