"""The training script of a launch: how to resume it, and which layouts it accepts. No torch here."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from harness.arguments import TrainingArguments
from harness.arguments.words import RESUME, value_of, with_resume
from harness.checkpoint.directories import MANIFEST, METRICS, numbered, set_aside
from harness.checkpoint.integrity import newest_whole
from harness.command_line import expanded, parse
from harness.command_line.fewer_ranks import KINDS, on_fewer_ranks
from harness.config import ConfigCheck
from harness.errors import UserError
from harness.resilience.options import TRAIN, usable_file
from harness.topology.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Start:
    """A command line of the script, for a number of ranks."""

    words: tuple[str, ...]
    ranks: int
    layout: Layout | None = None  # None if unknown, as for a script with arguments of its own

    def __str__(self) -> str:
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        return f"{self.layout} on {ranks}" if self.layout else ranks


class Script:
    """A script and its arguments, which are parsed if they are those of `scripts/train.py`."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = self.plain = tuple(words)  # as typed, and with the flags of config files in place
        self.args: TrainingArguments | None = None
        # Identities of the checkpoints that the output directory held before the run; None if it held no run.
        self.earlier: frozenset[tuple[int, int]] | None = None
        if {"-h", "--help"} & set(words):
            return
        try:
            given = parse(KINDS, words[1:], prog="", description="", epilog="")
            self.plain = (words[0], *expanded(KINDS, words[1:]))
        except (UserError, SystemExit):
            pass  # the ranks will report the error; or the script has arguments of its own
        else:
            self.args = given[1]
        folder = self._folder()
        if folder is not None and ((folder / METRICS).exists() or numbered(folder)):
            self.earlier = frozenset(_identity(path) for _, path in numbered(folder))

    @property
    def is_known(self) -> bool:
        """Whether it is the harness's own. Others may set variables before they import, so no standby runs them."""
        own = Path(__file__).resolve().parents[2] / "scripts" / "train.py"
        return self.words[0] == TRAIN or os.path.realpath(self.words[0]) == str(own)

    @property
    def output_dir(self) -> Path | None:
        """The output directory; None if unknown."""
        return None if self.args is None else Path(self.args.output_dir).absolute()

    @property
    def hang_seconds(self) -> float:
        """Seconds without progress after which the run is ended; 0: never."""
        return (self.args or TrainingArguments).hang_seconds  # the default for a script with arguments of its own

    def require_startable(self, *, module: bool, command: bool) -> None:
        """Raise UserError if there is no such script, module or command; the ranks would find out late."""
        name = self.words[0]
        if command:
            found = shutil.which(name) is not None
            what = "command"
        elif module:
            package = name.partition(".")[0]
            found = package.isidentifier() and PathFinder.find_spec(package, [str(Path.cwd()), *sys.path]) is not None
            what = "module"
        else:
            found = usable_file(name)
            what = "file"
        if not found:
            raise UserError(f"{name}: no such {what}")

    def require_resumable(self) -> None:
        """Raise UserError if the checkpoints of this run cannot be resumed."""
        if self.args is not None and self.args.save_only_model:
            raise UserError("--max_restarts: no run can go on from the checkpoints of --save_only_model: remove one")

    def first(self, ranks: int) -> Start:
        """Return the start as the user typed it."""
        return Start(words=self.words, ranks=ranks)

    def again(self, start: Start) -> Start:
        """Return the start from the newest checkpoint that this launch has saved.

        Before there is one, return `start` itself: `auto` would find a checkpoint of an earlier run.
        """
        folder = self._folder()
        wanted = value_of(self.words, RESUME) if self.args is None else self.args.resume_from_checkpoint
        if wanted != "auto" and (wanted is not None or self.earlier is not None) and folder is not None:
            newest = newest_whole(folder)
            if newest is None or _identity(newest) in (self.earlier or ()):  # nothing saved yet
                if wanted is not None and Path(wanted).resolve().parent != folder.resolve():
                    set_aside(folder / METRICS)  # else the folder would seem to hold another run
                return start
        return Start(words=tuple(with_resume(start.words)), ranks=start.ranks, layout=start.layout)

    def _folder(self) -> Path | None:
        """Return the output directory, also of another script with an --output_dir flag."""
        if self.args is not None:
            return self.output_dir
        given = value_of(self.words, "--output_dir")
        return None if given is None else Path(given).absolute()

    def on_fewer(self, wanted: int, ranks: int) -> Start | None:
        """Return the start on at most `ranks` ranks with the same global batch; None if no layout fits."""
        if self.args is None or (found := on_fewer_ranks(self.plain, wanted, ranks, _config_check())) is None:
            return None
        return Start(words=found[0], ranks=found[1].world_size, layout=found[1])


def _config_check() -> ConfigCheck | None:
    """Return the config check; None if that part is not installed."""
    found = find_spec("harness.checking")
    if found is None or found.origin is None:  # a deleted package may leave a folder of caches: no origin
        return None
    from harness.checking import ConfigRules

    return ConfigRules()


def _identity(checkpoint: Path) -> tuple[int, int]:
    with suppress(OSError):
        found = (checkpoint / MANIFEST).stat()
        return found.st_ino, found.st_mtime_ns
    return 0, 0
