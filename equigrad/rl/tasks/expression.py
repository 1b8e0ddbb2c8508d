"""Arithmetic that a model wrote, evaluated exactly and without running it: ``+ - * /``, parentheses, decimal numbers.

There is no power, so a result has no more digits than the text has characters, and the limit on these limits all.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

LONGEST = 200
"""Characters of an expression."""
DEEPEST = 20
"""Parentheses and signs inside each other."""

_TOKEN = re.compile(r"[ \t\r\n]*([0-9]+(?:\.[0-9]+)?|[-+*/()])")


class ExpressionError(ValueError):
    """A text is no expression, or one without a value. The message says why."""


@dataclass(frozen=True)
class Expression:
    """``2*(3+0.5)`` has the value 7 and the numbers ("2", "3", "0.5")."""

    value: Fraction
    numbers: tuple[str, ...]
    """As they are written, from left to right."""
    signed: bool
    """Whether a sign stands before a number or parenthesis, as in ``-2`` or ``3*-(1+1)``."""


def evaluate(text: str) -> Expression:
    """The value of an expression. Raises ``ExpressionError``."""
    if len(text) > LONGEST:
        raise ExpressionError(f"{len(text)} characters are more than {LONGEST}")
    tokens, at, end = [], 0, len(text.rstrip(" \t\r\n"))
    while at < end:
        match = _TOKEN.match(text, at)
        if match is None:
            raise ExpressionError(f"{text[at:].lstrip()[:1]!r} is neither digit, + - * / nor parenthesis")
        tokens.append(match[1])
        at = match.end()
    parser = _Parser(tokens)
    value = parser.sum(0)
    if parser.next is not None:
        raise ExpressionError(f"{parser.next!r} is not expected where it stands")
    return Expression(value, tuple(parser.numbers), parser.signed)


def decimal_text(value: Fraction) -> str:
    """A value as short as exact text can be: ``84``, ``-0.125``, or ``1/3`` where decimals have no end."""
    rest, places = value.denominator, 0
    for prime in (2, 5):
        power = 0
        while rest % prime == 0:
            rest, power = rest // prime, power + 1
        places = max(places, power)
    if rest != 1 or places == 0:
        return str(value)
    digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
    return f"{'-' * (value < 0)}{digits[:-places]}.{digits[-places:]}"


class _Parser:
    """Recursive descent over the tokens; values are computed on the way."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._at = 0
        self.numbers: list[str] = []
        self.signed = False

    @property
    def next(self) -> str | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _take(self) -> str:
        token = self.next
        if token is None:
            raise ExpressionError("it ends too early" if self._tokens else "it is empty")
        self._at += 1
        return token

    def sum(self, depth: int) -> Fraction:
        value = self._product(depth)
        while self.next in ("+", "-"):
            value = value + self._product(depth) if self._take() == "+" else value - self._product(depth)
        return value

    def _product(self, depth: int) -> Fraction:
        value = self._factor(depth)
        while self.next in ("*", "/"):
            if self._take() == "*":
                value *= self._factor(depth)
            else:
                divisor = self._factor(depth)
                if divisor == 0:
                    raise ExpressionError("division by zero")
                value /= divisor
        return value

    def _factor(self, depth: int) -> Fraction:
        if depth == DEEPEST:
            raise ExpressionError(f"more than {DEEPEST} parentheses or signs inside each other")
        token = self._take()
        if token == "-":
            self.signed = True
            return -self._factor(depth + 1)
        if token == "(":
            value = self.sum(depth + 1)
            if self._take() != ")":
                raise ExpressionError("a parenthesis is not closed")
            return value
        if token in "+*/)":
            raise ExpressionError(f"{token!r} is not expected where it stands")
        self.numbers.append(token)
        return Fraction(token)
