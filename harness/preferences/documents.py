"""Read preferences from files or data sets, and tokenise them in pairs of sequences.

Rows become items on disk, one a sample; items become documents, two a sample, which `harness.data` tokenises and masks
as it does a prompt with its completion. Of a labelled completion the second document is its prompt with the completion
of another item, by which KTO estimates how far the model has moved.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from harness.arguments.themes.preferences import PreferenceArguments
from harness.batches.collate import MapDataset
from harness.batches.stream import fingerprint
from harness.data.chat import ConversationEncoder
from harness.data.files.documents import content_digest, copied
from harness.data.files.extents import planned
from harness.data.files.sources import find_files
from harness.data.formats import Extent
from harness.data.on_disk.cache import Preparation, cache_error, fingerprint_of, prepared_folder, set_fingerprint
from harness.data.samples import make_samples
from harness.data.tokenizer import Tokenizer, padding_id
from harness.errors import UserError
from harness.preferences.items import items, rows_of
from harness.preferences.samples import PreferenceSamples, compared
from harness.wording import counted

if TYPE_CHECKING:
    from datasets import Dataset, Features

# Part of the cache keys. Increase it when a code change gives other items or documents for the same rows.
_FORMAT = 1
_ROWS_AT_ONCE = 64


def read_items(sources: Sequence[str], of: PreferenceArguments, say: Callable[[str], None]) -> Dataset:
    """Return the items of files, mapped from disk. UserError for a row that cannot be used."""
    files = [file.absolute() for source in sources for file in find_files(source)]

    def read(extents: Sequence[Extent]) -> Iterator[dict[str, object]]:
        for extent in extents:
            try:
                yield from items(rows_of(extent), labels=not of.loss.paired)
            except OSError as error:
                raise UserError(f"cannot read {extent.file}: {error.strerror or error}") from error

    try:
        prepared = prepared_folder(None)
        content = content_digest(files, prepared)
        folder = prepared / fingerprint("preferences", _FORMAT, of.loss.paired, *files, content)
        found = copied(folder, planned(files, folder), read, _features(), say=say)
    except OSError as error:
        raise cache_error(error, None) from error
    return _ordered(found)


def items_of(dataset: MapDataset, name: str, of: PreferenceArguments) -> Dataset:
    """Return the items of a user's data set of dicts, in memory. UserError, naming `name[i]`, for an unusable row."""
    from datasets import Dataset

    rows = ((f"{name}[{index}]", dataset[index]) for index in range(len(dataset)))
    made = list(items(rows, labels=not of.loss.paired))
    if not made:
        raise UserError(f"{name} is empty: give at least one row")
    table = Dataset.from_list(made, features=_features())
    set_fingerprint(table, fingerprint(*(value for row in made for value in row.values())))
    return _ordered(table)


def _features() -> Features:
    from datasets import Features, Value

    text = Value("large_string")
    flag = Value("bool")
    return Features(
        {"first": text, "second": text, "place": text, "second_place": text, "desirable": flag, "later": flag}
    )


def _ordered(found: Dataset) -> Dataset:
    """Return items with rejected completions of pairs behind all chosen ones, so that neighbours have other prompts."""
    if not len(found):
        raise UserError("there are no preferences: give at least one row")
    later = np.asarray(found["later"], dtype=bool)
    if not later.any():
        return found
    return found.select([*np.flatnonzero(~later).tolist(), *np.flatnonzero(later).tolist()])


def tokenised(
    found: Dataset,
    tokenizer: Tokenizer,
    of: PreferenceArguments,
    *,
    block_size: int,
    micro_batch: int,
    vocabulary: int,
    how: Preparation,
) -> PreferenceSamples:
    """Tokenise items into samples of two sequences.

    Args:
        block_size: tokens that a longer sequence is cut to.
        micro_batch: samples among which KTO's items exchange their completions.

    Raises:
        UserError: a completion has no token within `block_size`, or both of a pair are equal there.
    """
    documents = _documents(found, 0 if of.loss.paired else micro_batch, how)
    try:
        sequences = make_samples(documents, tokenizer, block_size, how, vocabulary=vocabulary).conversations
    except UserError:
        _require_completions(documents, tokenizer, block_size)
        raise
    if len(sequences) < len(documents):
        _require_completions(documents, tokenizer, block_size)
    samples = PreferenceSamples(
        sequences=sequences,
        labels=np.asarray(found["desirable"], dtype=np.float32),
        block_size=block_size,
        pad=padding_id(tokenizer, vocabulary),
    )
    if of.loss.paired:
        _require_unequal(samples, found, block_size)
    return samples


def _documents(found: Dataset, group: int, how: Preparation) -> Dataset:
    """Return two documents an item; the second of a labelled one has the completion of another item of its `group`."""
    from datasets import Features, Value

    folder = how.folder("preference documents", _FORMAT, fingerprint_of(found), group)
    shards = [range(start, min(start + 65536, len(found))) for start in range(0, len(found), 65536)]

    def read(shard: range) -> Iterator[dict[str, object]]:
        for index in shard:
            item = found[index]
            yield {"conversation": item["first"], "place": item["place"]}
            if group:
                other = found[_neighbour(index, len(found), group)]
                yield {"conversation": exchanged(item["first"], other["first"], item["place"]), "place": item["place"]}
            else:
                yield {"conversation": item["second"], "place": item["second_place"]}

    text = Value("large_string")
    try:
        return copied(folder, shards, read, Features({"conversation": text, "place": text}), say=how.say, workers=1)
    except OSError as error:
        raise how.error(error) from error


def _neighbour(index: int, count: int, group: int) -> int:
    """Return the item whose completion item `index` gets: the one before it in its group, the last for the first.

    As in TRL, groups are consecutive; an item that is alone in the last group gets that of the item before.
    """
    start = index - index % group
    size = min(group, count - start)
    return index - 1 if size == 1 else start + (index - start - 1) % size


def exchanged(first: str, other: str, place: str) -> str:
    """Return a document with the prompt of `first` and the completion of `other`, documents as JSON."""
    own = json.loads(first)
    theirs = json.loads(other)
    if ("messages" in own) != ("messages" in theirs):
        raise UserError(f"{place}: some prompts are texts and others are messages: give all in one form")
    if "messages" not in own:
        return json.dumps({"prompt": own["prompt"], "completion": theirs["completion"]}, ensure_ascii=False)
    begin = own["answers_from"]
    of_other = theirs["answers_from"]
    messages = [*own["messages"][:begin], *theirs["messages"][of_other:]]
    unlearnt = [index - of_other + begin for index in theirs.get("unlearnt", ()) if index >= of_other]
    kept = {name: own[name] for name in own if name not in ("messages", "unlearnt")}
    return json.dumps({**kept, "messages": messages, "unlearnt": unlearnt}, ensure_ascii=False)


def _require_completions(documents: Dataset, tokenizer: Tokenizer, block_size: int) -> None:
    """Raise UserError for the first document of which nothing is left to train on within `block_size` tokens."""
    encode = ConversationEncoder(tokenizer)
    for document in documents:
        if encode(document["conversation"], document["place"]).cut(block_size) is None:
            raise UserError(
                f"{document['place']}: no token of the completion is within the first "
                f"{counted(block_size, 'token')}: raise --block_size, or remove the row"
            )


def _require_unequal(samples: PreferenceSamples, found: Dataset, block_size: int) -> None:
    """Raise UserError for a pair that differs only behind `block_size` tokens, or not at all."""
    lengths = samples.lengths()
    for index in np.flatnonzero(lengths[:, 0] == lengths[:, 1]).tolist():
        if not compared(samples.sequences[2 * index], samples.sequences[2 * index + 1]):
            place = found[index]["place"].removesuffix(", `chosen`").removesuffix(", `chosen_response`")
            raise UserError(
                f"{place}: both completions are equal within the first {counted(block_size, 'token')}: raise "
                "--block_size, or remove the row"
            )
