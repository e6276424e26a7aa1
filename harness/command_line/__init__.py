"""Parse a command line, or a `--config` file, into the arguments of a run.

Flags of other programs, HuggingFace's first, are understood where they ask for what the harness does, and refused with
the flag to use instead where they do not.
"""

from harness.command_line.parsing import Parser, add_flags, expanded, parse

__all__ = ["Parser", "add_flags", "expanded", "parse"]
