"""Show the progress of data preparation: a bar on a terminal, else a line now and then; nothing for short work."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn, TextIO

from harness.console import Console

if TYPE_CHECKING:
    from tqdm import tqdm

BAR_AFTER_S = 2.0
LINE_EVERY_S = 10.0


@dataclass(frozen=True)
class Speaker:
    """Prints lines to the user. `terminal` is the stream for progress bars, None if the output is no terminal."""

    say: Callable[[str], None]
    terminal: TextIO | None = None

    @classmethod
    def of(cls, console: Console) -> Speaker:
        """Return one that prints to a console, with bars where it is a terminal."""
        return cls(console.say, console.out if console.speaks and console.is_terminal else None)

    def __call__(self, text: str) -> None:
        self.say(text)


class PreparationProgress:
    """Shows how many of `total` parts are done.

    Args:
        total: number of parts.
        doing: the work in a word, for the user: "tokenising".
        say: prints a line; if it is a `Speaker` with a terminal, a bar is drawn instead.
    """

    def __init__(self, total: int, doing: str, say: Callable[[str], None]) -> None:
        self.total = total
        self.doing = doing
        self.say = say
        self._terminal = say.terminal if isinstance(say, Speaker) else None
        self._bar: tqdm[NoReturn] | None = None
        self._begun = self._said = time.monotonic()

    def show(self, done: float) -> None:
        """Show that `done` parts are done (not always a whole number); lines are printed at most every 10 s."""
        now = time.monotonic()
        if self._terminal is not None:
            self._draw(done, now)
        elif now - self._said >= LINE_EVERY_S and 0 < done < self.total:
            self._said = now
            left = timedelta(seconds=round((now - self._begun) / done * (self.total - done)))
            self.say(f"{self.doing}: {done / self.total:.0%}, {left} left")

    def close(self) -> None:
        """Leave the bar as it is, and begin a new line."""
        if self._bar is not None:
            self._bar.close()

    def _draw(self, done: float, now: float) -> None:
        if self._bar is None and now - self._begun >= BAR_AFTER_S:
            from tqdm import tqdm

            form = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
            self._bar = tqdm(
                total=self.total, desc=self.doing, file=self._terminal, dynamic_ncols=True, bar_format=form
            )
            self._bar.start_t -= now - self._begun  # tqdm estimates the time left from the true start of the work
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
