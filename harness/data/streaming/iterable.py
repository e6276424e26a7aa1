"""Read rows without end, as an IterableDataset's pass after pass.

Each row comes with its section (the file or the pass) and its number there, so that a stream can resume at it.
"""

from __future__ import annotations

import copy
import itertools
import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from harness.batches.same_data import tensor_digest
from harness.batches.stream import fingerprint
from harness.config.values.json_object import JsonObject
from harness.errors import UserError
from harness.parallel.generators import own_generators, seed_of

Row: TypeAlias = Any
"""A document of a file, or an item of a user's data set."""
_END = object()


Mark = JsonObject
"""A point of a section at which reading can start: the number of its `row`, and how to get there."""
_MARKS = 64  # marks kept: a stream reads a little ahead, and a checkpoint needs marks before the stream's position
_ROWS_PER_STATE = 256  # rows between two calls of `state_dict`, which may be slow


class Rows(ABC):
    """An endless sequence of rows.

    Attributes:
        key: a fingerprint of the data.
        say: prints a line of progress while rows are skipped.
    """

    key: str
    say: Callable[[str], None]

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self._marks: deque[tuple[int, Mark]] = deque(maxlen=_MARKS)

    @abstractmethod
    def since(self, section: int, mark: Mark) -> Iterator[tuple[int, int, Row]]:
        """Yield (section, number, row) from a mark of a section on, without end; {} is the section's first row."""

    def mark(self, section: int, row: int) -> Mark:
        """Return the latest mark before `row`; {} if there is none. Text needs the row before as its context."""
        found = [mark for number, mark in self._marks if number == section and mark["row"] < row]
        return max(found, key=lambda mark: mark["row"], default={})

    def _note(self, section: int, mark: Mark) -> None:
        self._marks.append((section, mark))


class IterableRows(Rows):
    """The rows of an IterableDataset; its `set_epoch`, if there is one, is called with the number of each pass.

    The global generators are seeded by pass and row, so every rank reads the same. A data set with `state_dict` and
    `load_state_dict` resumes at a row; for others the earlier rows are read and skipped.

    Args:
        dataset: iterated anew for each pass.
        name: the argument's name, for messages.

    Attributes:
        first: the first row of the first pass.
    """

    def __init__(self, dataset: Iterable[Row], name: str, *, say: Callable[[str], None] = lambda _: None) -> None:
        super().__init__(say)
        self._dataset: Any = dataset
        self.name = name
        self._fresh: JsonObject | None = _state_of(dataset)
        self.first: Row = next(self._pass(0), None)
        if self.first is None:
            raise UserError(f"{name} is empty: it must give at least one sample")
        self.key = fingerprint("iterable", type(dataset).__name__, tensor_digest(self.first))

    def since(self, section: int, mark: Mark) -> Iterator[tuple[int, int, Row]]:
        """Yield the rows of all passes; a section is a pass. UserError if a pass is empty."""
        for number in itertools.count(section):
            row = mark.get("row", 0)
            item = mark.get("item", 0)
            for found in self._pass(number, mark):
                item += 1
                for each in self.samples_of(found, item):
                    yield number, row, each
                    row += 1
                if item % _ROWS_PER_STATE == 0 and (state := self._state()) is not None:
                    self._note(number, {"row": row, "item": item, "state": state})
            if item == 0:
                raise UserError(
                    f"{self.name} gives no sample in pass {number + 1}: its __iter__ must begin anew each time"
                )
            mark = {}

    def samples_of(self, row: Row, count: int) -> Iterator[Row]:  # noqa: ARG002
        """Yield what row number `count` (from 1) of a pass gives: the row itself."""
        yield row

    def _state(self) -> JsonObject | None:
        return None if self._fresh is None else _state_of(self._dataset)

    def _pass(self, number: int, mark: Mark | None = None) -> Iterator[Row]:
        """Yield the rows of a pass, from a mark on if one is given."""
        mark = mark or {}
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(number)
        with own_generators(seed_of("pass", number)):
            if self._fresh is not None:
                # A new pass begins from the state before the first one; copied, as the data set may change the dict.
                self._dataset.load_state_dict(copy.deepcopy(mark.get("state", self._fresh)))
            items = iter(self._dataset)
        for row in itertools.count(mark.get("item", 0)):
            with own_generators(seed_of("row", number, row)):
                found = next(items, _END)
            if found is _END:
                return
            yield found


def _state_of(dataset: object) -> JsonObject | None:
    """Return the state of a data set; None unless it can be saved as JSON and leads back to the same row."""
    if not (callable(getattr(dataset, "state_dict", None)) and callable(getattr(dataset, "load_state_dict", None))):
        return None
    held: list[object] = [getattr(dataset, "_ex_iterable", None)]
    while held:  # `datasets` does not save the content of a shuffle buffer, so such a state would lose rows
        one = held.pop()
        if type(one).__name__ == "BufferShuffledExamplesIterable":
            return None
        held += [found for name in ("ex_iterable", "ex_iterables") for found in _listed(getattr(one, name, None))]
    try:
        state = dataset.state_dict()  # type: ignore[attr-defined]  # its presence was checked above
        written = json.loads(json.dumps(state))
        return written if isinstance(written, dict) and bool(written == state) else None
    except Exception:  # user code may raise anything; rows are skipped one by one instead
        return None


def _listed(value: object) -> Sequence[object]:
    if value is None:
        return []
    return value if isinstance(value, list | tuple) else [value]
