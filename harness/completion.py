"""Complete command lines of `ds-harness` in a shell, by argcomplete (the extra `completion`).

To complete a line, the shell starts `ds-harness` without arguments and with the line in environment variables. The verb
of the line is then asked for its help; its parser does not print it, but writes the words that fit.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection, Iterable

_PROGRAM = "_ARGCOMPLETE"  # set by the shell: position of the program in the line, from 1
_LINE = "COMP_LINE"


def is_asked() -> bool:
    """Return whether a shell has started this process to complete a line."""
    return {_PROGRAM, _LINE} <= os.environ.keys()


def arguments_for_help(verbs: Iterable[str]) -> list[str]:
    """Return the arguments that print the help of the line's verb; while there is none, complete the verb and end."""
    from argcomplete.lexers import split_line

    words = split_line(os.environ[_LINE], int(os.environ["COMP_POINT"]))[3]
    program = int(os.environ[_PROGRAM])
    verb = words[program] if len(words) > program else ""
    if verb not in verbs:
        parser = argparse.ArgumentParser()
        parser.add_argument("verb", choices=sorted(verbs))
        parser.add_argument("--version", action="version")
        complete(parser, has_positionals=True)
    os.environ[_PROGRAM] = str(program + 1)
    return [verb, "--help"]


def propose(action: argparse.Action, values: Collection[str]) -> None:
    """Let a shell propose these values of an argument, which reads and checks its value itself."""
    action.completer = lambda **_: values  # type: ignore[attr-defined]  # where argcomplete looks for them


def complete(parser: argparse.ArgumentParser, *, has_positionals: bool) -> None:
    """Write the words that may follow in the line, and end the process.

    Args:
        parser: reads the words behind the program, or behind the verb.
        has_positionals: whether an empty word may be an argument; flags are then proposed only behind a dash.
    """
    import argcomplete

    argcomplete.autocomplete(parser, always_complete_options=not has_positionals)
