"""Write docs/verbs.md, the page of all verbs, from their own help: python scripts/write_verbs.py [FILE]."""

import argparse
import sys
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import get_type_hints
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from harness.cli import VERBS, main
from harness.command_line.fewer_ranks import KINDS
from harness.command_line.parsing import known_flags
from harness.config.values.typed import takes

HEAD = """# All verbs of `ds-harness`

`ds-harness VERB --help` prints the same. Dashes equal underscores, and a boolean is written `--NAME`, `--NAME true`,
`--NAME false` or `--no_NAME`. Written by `python scripts/write_verbs.py`.

A verb exits with 0 when its work is done, with 1 and one line on standard error when you have something to correct,
such as a file that is missing or a config that does not run, and with 2 for unknown flags and for values that an
argument does not take. Three exit with 1 for these as well: `train`, `launch`, and `dry-run` for the flags of a run.

`train` and `launch` exit with the code of their ranks, with 1 if a signal has killed one, and with 128 + N after a
signal N to themselves.
"""
PAGES = {
    "train": "quick-start.md",
    "check": "check.md",
    "explain": "rules/README.md",
    "schema": "check.md",
    "resolve": "layouts.md",
    "models": "models.md",
    "verify": "numbers.md",
    "plan": "planning.md",
    "estimate": "planning.md",
    "checkpoint": "checkpoints.md",
    "checkpoint merge": "lora.md",
    "generate": "quick-start.md",
    "report": "report.md",
    "dry-run": "dry-run.md",
    "cluster": "hosts.md",
    "launch": "when-things-break.md",
}


class HelpAsked(Exception):
    """Carries the parser whose help was asked for out of the verb."""


def parser_of(verb: str) -> argparse.ArgumentParser:
    """Return the parser that a verb makes for itself."""

    def keep(self: argparse.ArgumentParser, *_: object) -> None:
        raise HelpAsked(self)

    with mock.patch.object(argparse.ArgumentParser, "print_help", keep):
        try:
            main([*verb.split(), "--help"])
        except HelpAsked as asked:
            parser: argparse.ArgumentParser = asked.args[0]
            return parser
    raise SystemExit(f"{verb} --help prints no help of argparse")


def kind_of(read: object) -> str:
    """Return in a word what an argument takes, from the function that reads it: as argparse has it in `type`."""
    if isinstance(read, partial):  # argument_in_type's first argument is the type
        read = read.args[0] if read.args else read.func
    if isinstance(read, FunctionType):
        read = get_type_hints(read).get("return", str)
    kinds = {int: "whole number", float: "number", Path: "path"}
    return next((word for kind, word in kinds.items() if takes(read, kind)), "text")


def row(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Return the table row of an argument: its names, the values that it takes, its meaning."""
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    choices = " \\| ".join(f"`{choice}`" for choice in action.choices or ())
    metavar = " ".join([action.metavar or ""] if not isinstance(action.metavar, tuple) else action.metavar)
    if not action.option_strings:
        names, metavar = f"`{metavar or action.dest}`", ""
    kinds = " \\| ".join(f"`{kind}`" for kind in metavar.split("|")) if metavar else kind_of(action.type)
    values = choices or (kinds if action.option_strings and action.nargs != 0 else "")
    text = parser._get_formatter()._expand_help(action) if action.help else ""  # noqa: SLF001 - %(default)s filled in
    text = text.removesuffix(": " + ", ".join(map(str, action.choices or ())))  # the values are listed already
    return f"| {names} | {values} | {text.replace('|', chr(92) + '|')} |"


def section(verb: str) -> str:
    """Return the section of a verb: what it does, its example, its arguments."""
    parser = parser_of(verb)
    actions = [action for action in parser._actions if "--help" not in action.option_strings]  # noqa: SLF001
    elsewhere = known_flags(KINDS) if verb == "train" else {}  # docs/flags.md has them
    shown = [action for action in actions if action.help != argparse.SUPPRESS and action.dest not in elsewhere]
    rows = [row(parser, action) for action in shown]
    example = (parser.epilog or "").partition("example:\n")
    after = " ".join(example[0].split())
    commands = "\n".join(line[2:] if line.startswith("  ") else line for line in example[2].splitlines())
    parts = [
        f"## {verb}\n",
        f"{' '.join((parser.description or '').split())} Read on: [{PAGES[verb]}]({PAGES[verb]}).\n",
        *([f"{after}\n"] if after else []),
        *(["The flags of a run are those of [Every flag](flags.md); those of a launch:\n"] if elsewhere else []),
        *([f"```\n{commands}\n```\n"] if commands else []),
        *(["| argument | values | meaning |\n|---|---|---|", *rows, ""] if rows else []),
    ]
    return "\n".join(parts)


def page() -> str:
    """Return the page in Markdown."""
    table = [f"| [`{verb}`](#{verb}) | {text} |" for verb, (_, text) in VERBS.items()]
    return "\n".join([HEAD, "| verb | what it does |\n|---|---|", *table, "", *map(section, PAGES)])


def write() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, default=Path("docs/verbs.md"))
    parser.parse_args().file.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    write()
