"""The command line: which commands there are, and how each one's words are read. Thin, and torch-free until needed."""

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NamedTuple

from equigrad import __version__
from equigrad.commands import words
from equigrad.errors import UserError


class Command(NamedTuple):
    """
    takes:       adds its words to a parser, and says what it does
    main:        module in ``commands`` and function, which gives the exit code
    overridable: whether its words may set keys of the job; then its function gets them too
    """

    takes: Callable[[argparse.ArgumentParser], None]
    main: str
    overridable: bool = False

    @property
    def text(self) -> str:
        """What it does, in a line."""
        return self.takes.__doc__ or ""


COMMANDS = {
    "train": Command(words.train, "train.main", overridable=True),
    "schedule": Command(words.schedule, "schedule.main", overridable=True),
    "simulate": Command(words.simulate, "simulate.main"),
    "verify": Command(words.verify, "verify.main", overridable=True),
    "eval": Command(words.evaluate, "evaluate.main", overridable=True),
    "generate": Command(words.generate, "generate.main"),
    "serve": Command(words.serve, "serve.main"),
    "import": Command(words.import_, "exchange.import_main"),
    "export": Command(words.export, "exchange.export_main"),
    "tokenizer": Command(words.tokenizer, "tokenizer.main"),
    "info": Command(words.info, "info.main"),
    "report": Command(words.report, "info.report_main"),
    "audit": Command(words.audit, "audit.main"),
    "plan": Command(words.plan, "plan.main", overridable=True),
}

_HELP = f"""equigrad {__version__}: trains language models; the answer does not depend on how the work was divided.

usage: equigrad COMMAND ...

{chr(10).join(f"  {name:<10} {command.text}" for name, command in COMMANDS.items())}

`equigrad COMMAND --help` tells more. Exit codes: 0 done, 2 something that was given is wrong, 1 anything else
(audit: 1 contradicted, 3 unverifiable)."""

_KEYS = """\
Every key of a job, to be set in its file or as an override. Defaults are those of a job file that leaves the key out;
without a job file the embedded quickstart is the job, and it sets some of them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    if hasattr(sys.stdout, "reconfigure"):  # what a terminal cannot show must not end a run
        sys.stdout.reconfigure(errors="backslashreplace")
    if given[:1] == ["--"]:  # `torchrun -m equigrad -- train ...`: some versions of argparse pass it on
        given = given[1:]
    if not given or given[0] in ("-h", "--help", "help"):
        print(_HELP)
        return 0
    if given[0] in ("-V", "--version"):
        print(f"equigrad {__version__}")
        return 0
    try:
        return _dispatch(given[0], given[1:])
    except UserError as error:
        print(f"equigrad: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("equigrad: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 1


def _dispatch(command: str, given: list[str]) -> int:
    if command not in COMMANDS:
        from difflib import get_close_matches

        close = get_close_matches(command, COMMANDS, 1)
        hint = f"; did you mean {close[0]!r}?" if close else f"; commands: {', '.join(COMMANDS)}"
        raise UserError(f"unknown command {command!r}{hint}")
    chosen, parser = COMMANDS[command], parser_of(command)
    if command == "train" and {"-h", "--help"} & set(given):
        from shutil import get_terminal_size
        from textwrap import fill

        from equigrad.config.load import help_text

        width = get_terminal_size().columns - 2  # as argparse does
        print(f"{parser.format_help()}\n{fill(_KEYS, width)}\n\n{help_text(width)}")
        return 0
    own, overrides = split_overrides(given) if chosen.overridable else (given, [])
    arguments = parser.parse_args(own)
    for word in [*overrides, *(getattr(arguments, "prompt", None) or [])]:
        if any("\ud800" <= character <= "\udfff" for character in word):  # how Python holds bytes that are no text
            raise UserError(f"{word!a} is not UTF-8")
    module, function = chosen.main.split(".")
    main = getattr(import_module(f"equigrad.commands.{module}"), function)
    return int(main(arguments, overrides) if chosen.overridable else main(arguments))


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Part ``--section.key value`` (and the top-level ``--name``, ``--seed``) from the command's own words."""
    own: list[str] = []
    overrides: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        key, equals, _ = word.removeprefix("--").partition("=")
        if word.startswith("--") and ("." in key or key in ("name", "seed")):
            overrides.append(word)
            if not equals and rest:
                overrides.append(rest.pop(0))
        else:
            own.append(word)
    return own, overrides


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        option = message.partition("unrecognized arguments: --")[2].partition(" ")[0].partition("=")[0]
        if option and COMMANDS[self.prog.split()[-1]].overridable:
            from equigrad.config.load import nearest

            own = [known.removeprefix("--") for action in self._actions for known in action.option_strings]
            hint = f"; did you mean --{option}s?" if f"{option}s" in own else nearest(option)
            raise UserError(f"unknown option --{option}{hint}")
        raise UserError(f"{message}; see `{self.prog} --help`")


def parser_of(command: str) -> argparse.ArgumentParser:
    """What reads a command's own words."""
    parser = _Parser(prog=f"equigrad {command}", description=COMMANDS[command].text, allow_abbrev=False)
    COMMANDS[command].takes(parser)
    return parser
