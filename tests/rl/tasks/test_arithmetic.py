"""Arithmetic: its problems are the whole table, and its splits part it."""

from itertools import product

from equigrad.config.tasks import Arithmetic
from equigrad.rl.tasks.arithmetic import ArithmeticTask
from equigrad.rl.tasks.draws import Draw
from equigrad.rl.tasks.protocol import Split, key_of
from tests.rl.tasks.given import place


def table(split: Split, below: int, count: int) -> set[str]:
    task = ArithmeticTask(Arithmetic(below=[below]), long=False)
    return {str(task.question(place(n, split)).prompt) for n in range(count)}


def test_both_splits_together_are_the_whole_table_and_no_sum_is_in_both() -> None:
    everything = {f"{a}{symbol}{b}=" for a, b in product(range(9), repeat=2) for symbol in "+-"}
    train, held_out = table("train", 9, 1500), table("held_out", 9, 150)
    assert train | held_out == everything
    assert not train & held_out
    assert len(held_out) < len(train)


def test_order_and_operation_do_not_change_the_split() -> None:
    task = ArithmeticTask(Arithmetic(below=[4], operations=["add", "subtract", "multiply"]), long=False)
    keys: dict[frozenset[str], set[str]] = {}
    for n in range(500):
        question = task.draw(Draw(n), 0)
        operands = str(question.prompt).rstrip("=").replace("+", " ").replace("*", " ").replace("-", " ").split()
        keys.setdefault(frozenset(operands), set()).add(key_of(question))
    assert len(keys) == 10
    assert all(len(found) == 1 for found in keys.values())


def test_levels_raise_the_bound_and_answers_are_pythons() -> None:
    task = ArithmeticTask(Arithmetic(below=[10, 100], operations=["add", "subtract", "multiply"]), long=False)
    largest = [0, 0]
    for level, n in product(range(2), range(400)):
        question = task.draw(Draw(level, n), level)
        text = str(question.prompt).removesuffix("=")
        assert eval(text) == question.facts["answer"]
        largest[level] = max(
            largest[level], *map(int, text.replace("+", " ").replace("*", " ").replace("-", " ").split())
        )
    assert largest == [9, 99]
