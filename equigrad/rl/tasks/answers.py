"""Which text of a completion counts as the answer, and which number it is. What is not plainly a number is none.

The answer is what stands in the last ``<answer>...</answer>``; without such tags it is the whole completion, and where
a number is asked for, only what follows the last ``=``. White space around it does not count. Everything here is linear
in the length of the completion, so these functions need no time limit.
"""

import re
from fractions import Fraction

from equigrad.rl.tasks.protocol import Verdict

MOST_DIGITS = 100
"""Digits before and after the point. Python converts longer ones in quadratic time, and refuses those beyond 4,300."""

_NUMBER = re.compile(rf"[+-]?[0-9]{{1,{MOST_DIGITS}}}(\.[0-9]{{1,{MOST_DIGITS}}})?")
_SPACE = " \t\r\n"
_OPENS, _CLOSES = "<answer>", "</answer>"


def answer_text(completion: str) -> str:
    """The answer of a completion, white space around it removed."""
    tagged = _tagged(completion)
    return (completion if tagged is None else tagged).strip(_SPACE)


def parse_number(text: str) -> Fraction | None:
    """The number that a text is, if it is one: ASCII digits, perhaps a sign before them, perhaps a point and digits
    after. ``007``, ``+7``, ``7.0`` are 7; ``1,000``, ``1e3``, ``1/2``, ``7 km`` and digits of other scripts are none.
    """
    return Fraction(text) if _NUMBER.fullmatch(text) else None


def judge_number(completion: str, expected: int | Fraction) -> Verdict:
    """1 for the right number, 0 for everything else. Parts: ``format`` (it is a number), ``correct``."""
    tagged = _tagged(completion)
    text = (completion.rpartition("=")[2] if tagged is None else tagged).strip(_SPACE)
    number = parse_number(text)
    if number is None:
        return Verdict(0.0, f"no number: {shown(text)}", parts={"format": 0.0, "correct": 0.0})
    right = number == expected
    reason = f"{shown(text)} is right" if right else f"{shown(text)} is wrong, it is {expected}"
    return Verdict(float(right), reason, parts={"format": 1.0, "correct": float(right)})


def shown(text: str) -> str:
    """A text as a reason quotes it, at most some sixty characters of it."""
    return repr(text) if len(text) <= 60 else f"{text[:60]!r}..."


def _tagged(completion: str) -> str | None:
    """What stands in the last pair of tags. Searched from the end, as a pattern would look at each opening tag."""
    end = completion.rfind(_CLOSES)
    start = completion.rfind(_OPENS, 0, max(end, 0))
    return None if start < 0 else completion[start + len(_OPENS) : end]
