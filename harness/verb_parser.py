"""The command line of a verb of `ds-harness`."""

from __future__ import annotations

import argparse
from typing import NoReturn


class VerbParser(argparse.ArgumentParser):
    """Reads a verb's arguments; unusable ones are one line on standard error, and exit code 2.

    Args:
        example: for the end of --help.
    """

    def __init__(
        self, verb: str, description: str, example: str = "", *, usage: str | None = None, allow_abbrev: bool = True
    ) -> None:
        super().__init__(
            prog=f"ds-harness {verb}",
            description=description,
            epilog=example,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            usage=usage,
            allow_abbrev=allow_abbrev,
        )

    def error(self, message: str) -> NoReturn:
        """Say what cannot be used, and end."""
        self.exit(2, f"{self.prog}: {message} (see --help)\n")
