"""How far the preparation of data is: a bar on a terminal, else a line now and then, nothing if it is soon done."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn, TextIO

if TYPE_CHECKING:
    from tqdm import tqdm

BAR_AFTER_S = 2.0
LINE_EVERY_S = 10.0


@dataclass(frozen=True)
class Speaker:
    """Says lines to the user; `terminal`: where bars are drawn, None where that is no terminal."""

    say: Callable[[str], None]
    terminal: TextIO | None = None

    def __call__(self, text: str) -> None:
        self.say(text)


class PreparationProgress:
    """Shows how much of `total` parts is done.

    Args:
        total: of parts, of which fractions may be done.
        doing: what is done to them, for the user: "tokenising".
        say: prints a line; a `Speaker` may have a terminal.
    """

    def __init__(self, total: int, doing: str, say: Callable[[str], None]) -> None:
        self.total, self.doing, self.say = total, doing, say
        self._terminal = say.terminal if isinstance(say, Speaker) else None
        self._bar: tqdm[NoReturn] | None = None
        self._begun = self._said = time.monotonic()

    def show(self, done: float) -> None:
        """Show that so much of the parts is done, if it was not shown just now."""
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
            self._bar.start_t -= now - self._begun  # the time left is reckoned from the beginning
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
