"""From a TOML file and dotted overrides to a checked job, and back. Errors name the file, the key and a fix."""

import difflib
import json
import re
import textwrap
import tomllib
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from equigrad.config.base import Section
from equigrad.config.job import Job
from equigrad.errors import UserError

QUICKSTART = Path(__file__).parent / "quickstart.toml"


def load_job(path: Path | None, overrides: Sequence[str] = ()) -> Job:
    """The job of a TOML file (None: the embedded quickstart) with ``--section.key value`` overrides applied.

    Raises ``UserError`` for a file that cannot be read, unknown keys, wrong types and impossible values.
    """
    tree = read_toml(path or QUICKSTART)
    origin: dict[str, str] = {}
    words = parse_overrides(overrides)
    if path is None and any(key == "model.weights" for key, _ in words):
        del tree["model"], tree["data"]["tokenizer"]  # both come from there
    for key, text in words:
        set_key(tree, key, override_value(key, text), origin)
    return make_job(tree, str(path or "the embedded quickstart"), origin)


def read_toml(path: Path, what: str = "job") -> dict[str, Any]:
    """Parse a TOML file; ``UserError`` with file and line where that fails. ``what`` the file should be of."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"no {what} file at {path}") from None
    except IsADirectoryError:
        hint = f"; the job of a run is {path / 'job.toml'}, and --run {path} --resume goes on with it" * (what == "job")
        raise UserError(f"{path} is a folder{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {what} file {path}: {error}") from None
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, or as many brackets, too
        raise UserError(f"{path}: not valid TOML: {error}") from None


def make_job(tree: dict[str, Any], file: str, origin: dict[str, str] | None = None) -> Job:
    """Check a tree of plain values. ``origin`` tells which keys came from the command line."""
    try:
        return Job.model_validate(tree)
    except ValidationError as error:
        lines = [_explain(e, file, origin or {}) for e in error.errors()]
        raise UserError("\n".join(lines)) from None


def _explain(error: Any, file: str, origin: dict[str, str]) -> str:
    loc = [part for part in error["loc"] if not (isinstance(part, str) and "[" in part)]
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "missing" and isinstance(loc[-1], int):  # a value of a pair
        loc.pop()
    key = ".".join(map(str, loc))
    if error["type"] in ("missing", "too_long") and isinstance(error.get("input"), list):
        message = f"should be {type_name(dict(walk(Job))[key].annotation)}"
    where = _where(key, message, file, origin)
    if error["type"] == "extra_forbidden":
        return f"{where}: unknown key {key!r}{nearest(key)}"
    given = error.get("input")
    shown = "" if isinstance(given, dict | BaseModel) else f" (given: {given!r})"
    return f"{where}: {key}: {message}{shown}" if key else f"{where}: {message}"


def _where(key: str, message: str, file: str, origin: dict[str, str]) -> str:
    """Where the value at ``key`` came from. What is wrong with a section as a whole may come from both places."""
    parts = key.split(".")
    above = next((".".join(parts[:n]) for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in origin), None)
    if above is not None:
        return origin[above]
    below = sorted(k for k in origin if (k.startswith(f"{key}.") if key else k in message))
    return f"{file}, with --{', --'.join(below)}" if below else file


_SYNONYMS = {
    "batch_size": "batch.samples",
    "epochs": "train.steps",
    "learning_rate": "optim.lr",
    "lr": "optim.lr",
    "max_length": "data.context",
    "max_steps": "train.steps",
    "micro_batch_size": "batch.row_tokens",
    "output_dir": "name",
    "save_steps": "checkpoint.every",
    "seq_len": "data.context",
    "sequence_length": "data.context",
}
"""What other systems call some keys."""


def nearest(key: str) -> str:
    """A hint at the valid key or section closest to an unknown one."""
    key = re.sub(r"\.\d+(?=\.)", "[]", key)
    keys = [name for name, _ in walk(Job, entries=True)]
    sections = sorted({name.rpartition(".")[0] for name in keys if "." in name})
    if key in sections:
        inside = next(name for name in keys if name.startswith(f"{key}."))
        return f"; it is a section: set one of its keys, as in --{inside} VALUE"
    section, _, leaf = key.rpartition(".")
    beside = {k.rpartition(".")[2]: k for k in [*keys, *sections] if k.rpartition(".")[0] == section}
    alike = 0.5 if len(leaf) < 4 else 0.6  # one wrong letter of two is half of what there is
    close = [beside[name] for name in difflib.get_close_matches(leaf, beside, 1, alike)]
    close = close or [k for k in keys if k.rpartition(".")[2] == leaf]
    close = [_SYNONYMS[name] for name in difflib.get_close_matches(leaf, _SYNONYMS, 1, 0.85)] or close
    if not beside:  # no such section
        close = close or difflib.get_close_matches(key, [*keys, *sections], 1, 0.75)
    return f"; did you mean {close[0]!r}?" if close else "; `equigrad train --help` lists every key"


def walk(section: type[BaseModel], prefix: str = "", entries: bool = False) -> Iterator[tuple[str, FieldInfo]]:
    """Every field of the tree as (dotted key, field); sections themselves are not listed, their fields are.

    ``entries`` adds the fields of a list's entries, as in ``data.sources[].weight``, which overrides cannot name.
    """
    for name, field in section.model_fields.items():
        inner = section_of(field.annotation)
        if field.annotation is not inner:
            yield prefix + name, field
        if inner is not None and (entries or not is_list(field.annotation)):
            yield from walk(inner, f"{prefix}{name}{'[]' * is_list(field.annotation)}.", entries)


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section inside an annotation such as ``Section``, ``Section | None`` or ``list[Section]``."""
    if isinstance(annotation, type) and not typing.get_args(annotation) and issubclass(annotation, BaseModel):
        return annotation
    found = (section_of(a) for a in typing.get_args(annotation))
    return next((f for f in found if f is not None), None)


def is_list(annotation: Any) -> bool:
    """Whether an annotation is that of a list."""
    return typing.get_origin(annotation) is list


def parse_overrides(words: Sequence[str]) -> list[tuple[str, str]]:
    """Split ``--a.b value`` and ``--a.b=value`` into (key, text) pairs."""
    pairs, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or len(word) == 2:
            raise UserError(f"unexpected argument {word!r}; overrides look like --section.key value")
        key, equals, text = word[2:].partition("=")
        if not equals:
            if not rest:
                raise UserError(f"--{key} needs a value")
            text = rest.pop(0)
        pairs.append((key, text))
    return pairs


def override_value(key: str, text: str) -> Any:
    """The value of an override: TOML, ``none`` for an optional key, or the bare text where the key takes a string."""
    field = dict(walk(Job)).get(key)
    kinds = _kinds(field.annotation) if field is not None else set()
    if text.lower() in ("none", "null") and type(None) in kinds:
        return None
    if kinds & {str} and not kinds & {int, float, bool}:
        return _toml(text) if text[:1] in "\"'" and text[:1] else text
    value = _toml(text)
    return text if value is None else value


def _kinds(annotation: Any) -> set[Any]:
    """The plain types that an annotation admits; a ``Literal`` of strings admits ``str``."""
    if typing.get_origin(annotation) is typing.Literal:
        return {type(v) for v in typing.get_args(annotation)}
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return set().union(*(_kinds(a) for a in typing.get_args(annotation)))
    return {typing.get_origin(annotation) or annotation}


def _toml(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        pass
    try:
        return float(text)  # .5 and 5. are not TOML
    except ValueError:
        return {"true": True, "false": False}.get(text.lower())


def set_key(tree: dict[str, Any], key: str, value: Any, origin: dict[str, str]) -> None:
    """Put a value at a dotted key, making the tables on the way; ``None`` takes the key out."""
    if "[" in key:
        raise UserError(f"--{key}: entries of a list cannot be set one by one; set the whole list")
    *path, leaf = key.split(".")
    node: Any = tree
    for part in path:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise UserError(f"--{key}: {part!r} is not a section{nearest(key)}")
    if value is None:
        node.pop(leaf, None)
    elif isinstance(value, dict) and isinstance(node.get(leaf), dict):
        node[leaf].update(value)
    else:
        node[leaf] = value
    origin[key] = "command line"


def dump_toml(section: Section) -> str:
    """The whole section as TOML text that reads back to the same values; keys without a value are left out."""
    lines: list[str] = []
    _dump_table(section.model_dump(exclude_none=True), "", lines)
    return "\n".join(lines).strip() + "\n"


def _dump_table(table: dict[str, Any], prefix: str, lines: list[str]) -> None:
    lines += [f"{k} = {_toml_value(v)}" for k, v in table.items() if not isinstance(v, dict)]
    for key, inner in table.items():
        if isinstance(inner, dict):
            lines += ["", f"[{prefix}{key}]"]
            _dump_table(inner, f"{prefix}{key}.", lines)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {_toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    return str(value)


def type_name(annotation: Any) -> str:
    """A field's type as a reader would write it."""
    if typing.get_origin(annotation) is typing.Literal:
        return " | ".join(json.dumps(v) for v in typing.get_args(annotation))
    if isinstance(annotation, types.UnionType):
        return " | ".join(type_name(a) for a in typing.get_args(annotation))
    if typing.get_origin(annotation) in (list, tuple):
        return f"[{', '.join(type_name(a) for a in typing.get_args(annotation))}]"
    return {"NoneType": "none", "str": "text", "bool": "true | false"}.get(annotation.__name__, annotation.__name__)


def default_text(field: FieldInfo) -> str:
    """A field's default as TOML."""
    default = field.get_default(call_default_factory=True)
    if default is None:
        return "none"
    if isinstance(default, list) and default and isinstance(default[0], Section):
        return _toml_value([d.model_dump(exclude_defaults=True) for d in default])
    return "{}" if isinstance(default, Section) else _toml_value(default)


def help_text(width: int) -> str:
    """Every key of the job with its type, default and meaning, in lines of at most ``width`` characters where words
    allow."""
    lines: list[str] = []
    shown: set[int] = set()
    for key, field in walk(Job, entries=True):
        if id(field) in shown:  # two lists with the same kind of entry
            continue
        shown.add(id(field))
        doc = " ".join((field.description or "").split()).replace("``", "")
        option = key if "[]" in key else f"--{key}"
        default = "required" if field.is_required() else f"default: {default_text(field)}"
        head = f"{option} {{{type_name(field.annotation)}}}  ({default})"
        for text, first, rest in ((head, "  ", " " * 6), (doc, " " * 8, " " * 8)):
            wrapper = textwrap.TextWrapper(width, first, rest, break_long_words=False, break_on_hyphens=False)
            lines += wrapper.wrap(text)
    return "\n".join(lines)
