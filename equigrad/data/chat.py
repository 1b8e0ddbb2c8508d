"""Chats as text, and which characters of it the assistant wrote. Knows no tokens, only character spans.

Templates are Jinja, as in Hugging Face tokenizers: same sandbox, same globals, same ``{% generation %}`` tag.
"""

import json
import secrets
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import jinja2
import numpy as np
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from equigrad.errors import UserError

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

Span = tuple[int, int]  # first character, and the one after the last

# Put around a {% generation %} block while rendering and removed at once. Random, so that no text can contain it.
_MARK = f"\ufdd0{secrets.token_hex(16)}\ufdd0"


@dataclass(frozen=True)
class Rendered:
    """A chat as the model sees it.

    Worked example, ChatML: user "Hi", assistant "Yo" gives the text
    ``<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nYo<|im_end|>\\n`` and one span, over ``Yo<|im_end|>``.
    """

    text: str
    spans: tuple[Span, ...]
    """What the assistant wrote, in order, the end of its turn included."""


class ChatTemplate:
    """A Jinja chat template; ``tokens`` are the names it may use (``bos_token``, ``eos_token``)."""

    def __init__(self, source: str, **tokens: str) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"chat template, line {error.lineno}: {error.message}") from None
        self._tokens = tokens

    def text(self, messages: list[dict], tools: list | None = None, add_generation_prompt: bool = False) -> str:
        """The chat as text, with ``add_generation_prompt`` up to where the assistant begins to write."""
        return self._render(messages, tools, add_generation_prompt).replace(_MARK, "")

    def render(self, messages: list[dict], tools: list | None = None) -> Rendered:
        """The chat as text, and what of it the assistant wrote.

        A template with ``{% generation %}`` blocks says so itself. Otherwise a turn of the assistant is what its
        message adds to the chat so far with the generation prompt. Raises ``UserError`` where the template cannot
        render the chat, or where the text so far is not a prefix of the text with the message.
        """
        parts = self._render(messages, tools, False).split(_MARK)
        text = "".join(parts)
        if len(parts) > 1:  # text outside and inside of generation blocks alternates
            ends = accumulate(map(len, parts))
            return Rendered(text, tuple(pairwise(ends))[::2])
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        return Rendered(text, tuple(self._turn(text, messages[: i + 1], tools) for i in turns))

    def _turn(self, text: str, messages: list[dict], tools: list | None) -> Span:
        before = self.text(messages[:-1], tools, add_generation_prompt=True)
        through = self.text(messages, tools)
        if not (text.startswith(through) and through.startswith(before)):
            raise UserError(
                f"message {len(messages)}: the chat template writes earlier turns differently once later ones follow,"
                " so what the assistant wrote cannot be told; mark it in the template with"
                " {% generation %}...{% endgeneration %}"
            )
        # A visible end of turn (<|im_end|>) ends what the assistant writes; white space after it is the template's.
        # Where nothing visible follows the content, white space is all that ends the turn.
        visible, content = through.rstrip(), messages[-1].get("content")
        bare = isinstance(content, str) and content.strip() and visible.endswith(content.rstrip())
        return len(before), len(through) if bare else max(len(visible), len(before))

    def _render(self, messages: list[dict], tools: list | None, add_generation_prompt: bool) -> str:
        try:
            return self._template.render(
                messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **self._tokens
            )
        except Exception as error:  # the template is the user's program: whatever fails in it is theirs to mend
            raise UserError(f"the chat template cannot render this chat: {error}") from None


def token_mask(offsets: np.ndarray, spans: tuple[Span, ...]) -> np.ndarray:
    """Which tokens overlap a span, bool [n]. ``offsets`` [n, 2]: first character and the one after the last."""
    mask = np.zeros(len(offsets), bool)
    for start, end in spans:
        mask |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
    return mask


class _Generation(Extension):
    """``{% generation %}...{% endgeneration %}`` marks what the assistant wrote."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        return f"{_MARK}{caller()}{_MARK}"


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False} | options)  # Jinja's own filter escapes HTML characters


@lru_cache(1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment
