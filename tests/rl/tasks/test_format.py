"""Forms: each rule is kept or broken by itself."""

import pytest

from equigrad.config.tasks import Format
from equigrad.rl.tasks.draws import Draw
from equigrad.rl.tasks.format import RULES, FormatTask
from equigrad.rl.tasks.protocol import Question
from tests.rl.tasks.given import verdict

TASK = FormatTask(Format(), long=False)
RULED = Question("", {"rules": {"first": "river", "words": 3, "case": "upper", "separator": "-", "brackets": "[]"}})


@pytest.mark.parametrize(
    ("said", "broken"),
    [
        ("[RIVER-A-B]", set()),
        ("[RIVER-A-B", {"brackets", "separator"}),
        ("RIVER-A-B", {"brackets"}),
        ("[RIVER-A]", {"words"}),
        ("[RIVER-A-B-C]", {"words"}),
        ("[A-RIVER-B]", {"first"}),
        ("[River-A-B]", {"case"}),
        ("[RIVER A B]", {"separator"}),
        ("[-RIVER-A-B]", {"separator"}),
        ("[RIVER-A-B]!", {"brackets", "separator"}),
        ("[RIVER-Ä-B]", {"words", "separator"}),
        ("[]", {"first", "words", "case", "separator"}),
        ("[", set(RULES)),
        ("", set(RULES)),
    ],
)
def test_the_reward_is_the_share_of_rules_that_are_kept(said: str, broken: set[str]) -> None:
    found = verdict(TASK, RULED, said)
    assert {rule for rule, kept in found.parts.items() if not kept} == broken
    assert found.reward == pytest.approx(1 - len(broken) / 5)
    assert all(rule in found.reason for rule in broken)


def test_levels_add_rules() -> None:
    for level in range(4):
        assert tuple(TASK.draw(Draw(level), level).facts["rules"]) == RULES[: level + 2]
