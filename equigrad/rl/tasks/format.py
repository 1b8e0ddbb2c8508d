"""Words in a given form: how many, which first, in which case, what between them, what around them.

Levels raise the number of rules that hold together. Judged is the form alone: any words will do.
"""

import re
from typing import Any

from equigrad.config.tasks import Format
from equigrad.rl.tasks.answers import answer_text, shown
from equigrad.rl.tasks.draws import Draw
from equigrad.rl.tasks.protocol import Conversation, Problem, Question, Task, Verdict

RULES = ("first", "words", "case", "separator", "brackets")
"""In the order in which levels add them."""
FIRST = (
    "apple", "autumn", "bird", "book", "bread", "bridge", "candle", "castle", "chair", "circle", "cloud", "coat",
    "coffee", "corner", "desert", "door", "dream", "eagle", "earth", "engine", "feather", "field", "fire", "flower",
    "forest", "garden", "glass", "gold", "grass", "harbor", "hill", "horse", "house", "ice", "island", "kettle",
    "ladder", "lake", "lamp", "letter", "light", "lion", "market", "meadow", "mirror", "moon", "morning",
    "mountain", "music", "night", "ocean", "orange", "paper", "pencil", "piano", "rain", "river", "road", "rose",
    "salt", "ship", "silver", "snow", "spring", "star", "stone", "summer", "table", "tower", "train", "tree",
    "valley", "village", "water", "wheel", "wind", "window", "winter", "wood",
)  # fmt: skip

_WORD = re.compile("[A-Za-z]+")
_FILLER = ("red", "blue", "green", "grey", "black", "white", "brown", "pink")


class FormatTask(Task):
    """Facts: ``rules``, the wanted form. The reward is the share of its rules that are kept; these are the parts."""

    def __init__(self, config: Format, long: bool) -> None:
        self._config, self._long = config, long
        self.levels = len(config.rules)

    def draw(self, draw: Draw, level: int) -> Question:
        form: dict[str, Any] = {
            "first": draw.choice(FIRST),
            "words": draw.between(1, self._config.words),
            "case": draw.choice(("lower", "upper")),
            "separator": draw.choice(("-", ", ", " / ", "_")),
            "brackets": draw.choice(("[]", "()", "{}", '""')),
        }
        rules = {rule: form[rule] for rule in RULES[: self._config.rules[level]]}
        prompt = " ".join(f"{rule}={value}" for rule, value in rules.items()) + "\n"
        if self._long:
            prompt = f"{_wording(rules)} Put it between <answer> and </answer>.\n"
        return Question(prompt, {"rules": rules}, f"{form['first']} {form['words']}")

    def verify(self, conversation: Conversation) -> Verdict:
        rules = conversation.problem.facts["rules"]
        text = answer_text(conversation.completion)
        kept = _kept(text, rules)
        parts = {rule: float(kept[rule]) for rule in rules}
        broken = [rule for rule in rules if not kept[rule]]
        reason = f"{shown(text)} breaks: {', '.join(broken)}" if broken else f"{shown(text)} keeps all rules"
        return Verdict(sum(parts.values()) / len(parts), reason, parts=parts)

    def solution(self, question: Question | Problem) -> tuple[str, ...]:
        rules = question.facts["rules"]
        words = [rules["first"], *(_FILLER[i % len(_FILLER)] for i in range(rules["words"] - 1))]
        opening, closing = rules.get("brackets", "  ")
        text = opening + rules.get("separator", " ").join(words) + closing
        return ((text.upper() if rules.get("case") == "upper" else text.lower()).strip(),)


def _kept(text: str, rules: dict[str, Any]) -> dict[str, bool]:
    """Which rules a text keeps; those that are not asked for are not told."""
    opening, closing = rules.get("brackets", ("", ""))
    bracketed = len(text) > 1 and text.startswith(opening) and text.endswith(closing)
    inside = text[len(opening) : len(text) - len(closing)] if bracketed else text
    words = _WORD.findall(inside)
    letters = "".join(words)
    return {
        "first": bool(words) and words[0].lower() == rules["first"],
        "words": len(words) == rules["words"],
        "case": letters != "" and letters == (letters.upper() if rules.get("case") == "upper" else letters.lower()),
        "separator": inside != "" and inside == rules.get("separator", "").join(words),
        "brackets": bracketed,
    }


def _wording(rules: dict[str, Any]) -> str:
    """The rules as sentences."""
    sentences = {
        "first": f'Begin with the word "{rules["first"]}".',
        "words": f"Write {rules['words']} words in all." if rules["words"] > 1 else "Write that one word alone.",
        "case": f"Use {rules.get('case')} case letters only.",
        "separator": f'Put "{rules.get("separator")}" between words, and nothing else.',
        "brackets": f"Put {' and '.join(rules.get('brackets', ''))} around it all.",
    }
    return " ".join(sentences[rule] for rule in rules)
