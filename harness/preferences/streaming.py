"""Preferences as a stream: pairs are made while training reads them, for losses without a reference.

A pair of which nothing is left to compare within a sample's length is left out, as a conversation without an answer is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from harness.data.chat import ConversationEncoder
from harness.data.formats import Extent
from harness.data.inputs.datasets import SampleForm
from harness.data.streaming.iterable import IterableRows, Row, Rows
from harness.data.streaming.rows import FileRows
from harness.data.streaming.source import PositionedSamples, SampleMaker, StreamedSource, StreamPosition, neighbours
from harness.data.tokenizer import Tokenizer, identity, padding_id
from harness.errors import UserError
from harness.preferences.items import KIND, items, rows_of
from harness.preferences.samples import as_sample, compared

_MOST_UNUSED = 10_000  # pairs in a row with nothing to compare, before the stream gives up


class PairRows(FileRows):
    """The pairs of files, as items; after the last file the first one follows."""

    def __init__(self, files: Sequence[Path], say: Callable[[str], None]) -> None:
        super().__init__(files, KIND, say)

    def _rows_of(self, extent: Extent) -> Iterator[Row]:
        return items(rows_of(extent), labels=False)


class IterablePairs(IterableRows):
    """The pairs of an IterableDataset, as items."""

    def __init__(self, dataset: Iterable[Row], name: str, say: Callable[[str], None]) -> None:
        super().__init__(dataset, name, say=say)
        for _ in self.samples_of(self.first, 1):  # before training
            pass

    def samples_of(self, row: Row, count: int) -> Iterator[Row]:
        """Yield the item of row number `count` (from 1). UserError if it is not a pair."""
        return items([(f"{self.name}, row {count}", row)], labels=False)


class PairSamples(SampleMaker):
    """A sample of each pair, both sequences padded on the right to `block_size`."""

    def __init__(self, tokenizer: Tokenizer, form: SampleForm) -> None:
        self._encode = ConversationEncoder(tokenizer)
        self._pad = padding_id(tokenizer, form.vocabulary)
        self._size = form.block_size
        self.key = (KIND, form.block_size, self._encode.template, self._pad)

    def samples(self, rows: Rows, origin: StreamPosition) -> PositionedSamples:
        """Yield the samples from a position on."""
        sample = origin.sample
        unused = 0
        for _, item, following, _ in neighbours(rows, origin):
            places = (("first", "place"), ("second", "second_place"))
            first, second = (self._encode(item[text], item[place]).cut(self._size) for text, place in places)
            if first is not None and second is not None and compared(first, second):
                sample += 1
                unused = 0
                yield as_sample(first, second, self._size, self._pad), StreamPosition(sample, *following)
                continue
            unused += 1
            if unused > _MOST_UNUSED:
                raise UserError(
                    f"{item['place']}: of {unused} pairs in a row nothing is left to compare within the first "
                    f"{self._size} tokens: raise --block_size"
                )


def stream(rows: Rows, tokenizer: Tokenizer, form: SampleForm) -> StreamedSource:
    """Return the stream of the samples of these rows."""
    return StreamedSource(rows, PairSamples(tokenizer, form), identity(tokenizer))
