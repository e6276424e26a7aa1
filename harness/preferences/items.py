"""Turn rows into items, one a sample, and refuse what a run could not be trained on. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

from harness.arguments import TrainingArguments
from harness.arguments.themes.preferences import PreferenceArguments
from harness.arguments.themes.script import ScriptArguments
from harness.data.files.sources import SourceGroup, find_files, source_groups, validation_group
from harness.data.formats import format_of
from harness.data.formats.format import Extent, Row, RowFormat
from harness.data.rows.kinds import plain_row
from harness.errors import UserError, refuse_all
from harness.preference_losses import PREFERENCE_LOSSES
from harness.preferences.rows import Answer, is_paired, labelled, pair

KIND = "preferences"
"""The kind of a source's rows, as `harness.data` has others."""


def obstacles(of: PreferenceArguments, args: TrainingArguments) -> list[str]:
    """Return the flags of a run that do not work with preferences, one line each."""
    given = {
        "--packing": (args.packing, "pairs are compared, so each sequence is a row of its own"),
        "--sample_prompts": (args.sample_prompts, "its evaluations are of preferences"),
        "--label_smoothing_factor": (args.label_smoothing_factor, "give --preference_label_smoothing"),
    }
    found = [(flag, why) for flag, (is_given, why) in given.items() if is_given]
    return [f"{flag} does not work with --preference {of.preference}: {why}; remove it" for flag, why in found]


def require_exchange(of: PreferenceArguments, micro_batch: int) -> None:
    """Raise UserError for a micro-batch of one completion, which has no other to exchange with."""
    if not of.loss.paired and micro_batch < 2:
        raise UserError(
            f"--preference {of.preference} compares each completion with that of another sample of its micro-batch: "
            "set per_device_train_batch_size to 2 or more"
        )


def require_whole_data(stream: str, of: PreferenceArguments) -> None:
    """Raise UserError for a stream if the loss needs a pass over all data before training; `stream` names it."""
    if of.loss.needs_reference:
        others = " or ".join(loss.name for loss in PREFERENCE_LOSSES.values() if not loss.needs_reference)
        raise UserError(
            f"{stream} does not work with --preference {of.preference}, which computes the log-probabilities of all "
            f"data before training: give the data whole, or use {others}"
        )


def groups_of(words: Sequence[str]) -> list[SourceGroup]:
    """Parse the words of --train_file. UserError for a weight that cannot be used."""
    return source_groups(words, kind_of=lambda _path: KIND)


def held_out_group(words: Sequence[str]) -> SourceGroup:
    """Parse the words of --validation_file. UserError for weights."""
    return validation_group(words, kind_of=lambda _path: KIND)


def require_data(script: ScriptArguments, args: TrainingArguments, of: PreferenceArguments, micro_batch: int) -> None:
    """Raise UserError for flags that do not work with preferences, and for files by their first rows."""
    refuse_all(obstacles(of, args))
    if script.streaming:
        require_whole_data("--streaming", of)
    require_exchange(of, micro_batch)
    if args.trains or script.validation_file is None:
        require_first_rows([path for group in groups_of(script.train_file) for path in group.paths], of)
    if script.validation_file is not None:
        require_first_rows(held_out_group(script.validation_file).paths, of)


def require_first_rows(sources: Sequence[str], of: PreferenceArguments) -> None:
    """Raise UserError for a file whose first row cannot be used; reads nothing else."""
    for file in (file for source in sources for file in find_files(source)):
        try:
            first = islice(rows_of(format_of(file).whole(file)), 1)
            for _ in items(first, labels=not of.loss.paired):
                pass
        except OSError as error:
            raise UserError(f"cannot read {file}: {error.strerror}") from error


def rows_of(extent: Extent) -> Iterator[Row]:
    """Yield the rows of an extent with all columns. UserError for a file of text."""
    kind = format_of(Path(extent.file))
    if not isinstance(kind, RowFormat):
        raise UserError(f"{extent.file} is text: preferences are rows of `prompt`, `chosen` and `rejected`")
    return kind.whole_rows(extent)


def items(rows: Iterable[Row], *, labels: bool) -> Iterator[dict[str, object]]:
    """Yield the items of rows: pairs, or with `labels` completions."""
    for location, row in rows:
        if not isinstance(row, Mapping):
            raise UserError(f"{location} is not an object: each row is {{prompt, chosen, rejected}}")
        found = plain_row(row)
        if labels:
            paired = is_paired(list(found))
            yield from (
                _item(answer, None, later=paired and not answer.desirable) for answer in labelled(found, location)
            )
        else:
            yield _item(*pair(found, location))


def _item(first: Answer, second: Answer | None, *, later: bool = False) -> dict[str, object]:
    return {
        "first": first.text,
        "second": "" if second is None else second.text,
        "place": first.place,
        "second_place": "" if second is None else second.place,
        "desirable": first.desirable,
        "later": later,
    }
