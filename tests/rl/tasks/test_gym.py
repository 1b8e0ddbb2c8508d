"""reasoning-gym behind the same door; without the package, an error that says how to get it."""

import importlib.util

import pytest

from equigrad.errors import UserError
from equigrad.rl.tasks.protocol import Conversation
from equigrad.rl.tasks.registry import Tasks
from tests.rl.tasks.given import rl

INSTALLED = importlib.util.find_spec("reasoning_gym") is not None
needs_gym = pytest.mark.skipif(not INSTALLED, reason="reasoning-gym is not installed")


@pytest.mark.skipif(INSTALLED, reason="reasoning-gym is installed")
def test_without_the_package_the_extra_is_named() -> None:
    with pytest.raises(UserError, match=r"reasoning-gym is not installed; .* 'equigrad\[gym\]'"):
        Tasks(rl("reasoning-gym:chain_sum"), seed=0)


CHAIN = {"name": "reasoning-gym:chain_sum", "options": {"min_terms": 2, "max_terms": 2, "max_digits": 1}}


@needs_gym
def test_problems_and_scores_are_the_packages_and_splits_are_apart() -> None:
    with Tasks(rl(CHAIN, verify_workers=1, wording="long"), seed=0) as tasks:
        state = tasks.begin()
        for index in range(20):
            problem = tasks.problem(index, state)
            assert problem == tasks.problem(index, state)
            assert "<answer>" in str(problem.prompt)
            right = problem.facts["answer"]
            left, symbol, other = str(problem.prompt).partition(" =")[0].split()[-3:]
            assert int(right) == (int(left) + int(other) if symbol == "+" else int(left) - int(other))
            asked = Conversation(problem)
            for said, full in (
                (right, True),
                (f"so <answer>{right}</answer>", True),
                (f"{right}1", False),
                ("", False),
            ):
                found = tasks.verify(asked.said("model", said)).result(60)
                assert not found.failed, found
                assert (found.reward == 1) == full
        train, held_out = ({str(tasks.problem(n, state, s).prompt) for n in range(80)} for s in ("train", "held_out"))
        assert len(train) > 40
        assert len(held_out) > 5
        assert not train & held_out


@needs_gym
@pytest.mark.parametrize(
    ("task", "complaint"),
    [
        ("reasoning-gym:chain_summ", "has no dataset 'chain_summ'; it has "),
        ({"name": "reasoning-gym:chain_sum", "options": {"no_such": 1}}, "no_such"),
        ({"name": "reasoning-gym:chain_sum", "options": {"min_terms": 9, "max_terms": 2}}, "max_terms must be"),
    ],
    ids=["name", "option", "value"],
)
def test_names_and_options_that_it_does_not_have_are_the_users_to_mend(task: object, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        Tasks(rl(task, verify_workers=1), seed=0)
