"""Check the data sets and functions passed to the Trainer, before anything is read."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
from torch.utils.data import IterableDataset

from harness.arguments import TrainingArguments
from harness.batches.collate import AnyDataset, MapDataset, tokens_of, too_long
from harness.batches.stream import dataset_length
from harness.errors import UserError
from harness.parallel.generators import own_generators, seed_of
from harness.wording import counted

if TYPE_CHECKING:
    from datasets import Dataset
    from typing_extensions import TypeIs

SAMPLE_KEYS = frozenset(["input_ids", "labels", "text", "messages", "prompt", "completion"])
TABLES = frozenset([("pandas", "DataFrame"), ("polars", "DataFrame"), ("pyarrow", "Table")])
"""(package, class) of each kind of table; compared by name, so that none of the packages must be imported."""


def require_types(
    args: object, functions: Mapping[str, object], datasets: Mapping[str, object], tokenizer: object
) -> None:
    """Raise UserError for a Trainer argument of a wrong type; all but `args` may be None."""
    if not isinstance(args, TrainingArguments):
        raise UserError(f"args is a {_kind(args)}: give harness.TrainingArguments(...)")
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise UserError(f"{name} is a {_kind(function)}: give a function")
    if isinstance(tokenizer, str):
        raise UserError(f"processing_class is the text {tokenizer!r}: give the tokenizer, as AutoTokenizer loads it")
    for name, dataset in datasets.items():
        named: dict[str, object] = {} if dataset is None else {name: dataset}
        if name == "eval_dataset" and isinstance(dataset, Mapping) and all(isinstance(key, str) for key in dataset):
            # Several data sets by name are evaluated one by one.
            named = {f"{name}[{key!r}]": each for key, each in dataset.items()} or named
        for each_name, each in named.items():
            require_dataset(each_name, each)


def require_dataset(name: str, dataset: object) -> None:
    """Raise UserError unless `dataset` has a length and an index, or is an IterableDataset."""
    if isinstance(dataset, Mapping) and not dataset:
        raise UserError(f"{name} is an empty {_kind(dataset)}: give a data set or a list of samples")
    if isinstance(dataset, Mapping) and dataset.keys() & SAMPLE_KEYS:
        raise UserError(
            f"{name} is a {_kind(dataset)} of columns ({', '.join(map(str, list(dataset)[:4]))}): give "
            "datasets.Dataset.from_dict of it, or a list of samples"
        )
    if isinstance(dataset, Mapping):
        raise UserError(
            f"{name} is a {_kind(dataset)} of {', '.join(map(str, list(dataset)[:4]))}: give one data set, such as one "
            "split of it, or a list of samples"
        )
    if isinstance(dataset, str):
        raise UserError(
            f"{name} is the text {dataset[:60]!r}: give a data set, such as datasets.load_dataset makes of it"
        )
    if is_iterable(dataset):
        return
    try:
        dataset_length(dataset)  # type: ignore[arg-type]  # of whatever kind
    except UserError as error:
        raise UserError(f"{name}: {error}") from error


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def as_dataset(data: Any) -> Any:
    """Convert a table of pandas, polars or pyarrow into a `datasets.Dataset`; return anything else unchanged."""
    kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(data).__mro__} & TABLES
    if not kinds:
        return data
    from datasets import Dataset

    match min(kinds):
        case ("pandas", _):
            return Dataset.from_pandas(data, preserve_index=False)
        case ("polars", _):
            return Dataset.from_polars(data)
    return Dataset(data)


def is_iterable(dataset: object) -> TypeIs[IterableDataset[object]]:
    """Return whether this is an IterableDataset of torch or of `datasets` (which is a subclass of torch's)."""
    return isinstance(dataset, IterableDataset)


def read_all(dataset: AnyDataset, name: str, most: int = 1 << 20) -> MapDataset:
    """Read an IterableDataset into a list; return any other data set unchanged.

    Raises UserError for more than `most` samples, as the data set may be endless.
    """
    if not isinstance(dataset, IterableDataset):
        return dataset
    # Ranks that read the same data must get the same samples, even if the data set draws random numbers.
    with own_generators(seed_of("pass", 0)):
        samples = list(itertools.islice(dataset, most + 1))
    if len(samples) > most:
        raise UserError(
            f"{name}: {type(dataset).__name__} gives more than {counted(most, 'sample')}, too many to be held "
            "for an evaluation: give a part of it, such as dataset.take(1000)"
        )
    return samples


def require_short(dataset: MapDataset, limit: int) -> None:
    """Raise UserError for a sample of more than `limit` tokens, if lengths are known without reading the samples."""
    if isinstance(dataset, list | tuple):
        packed = [isinstance(sample, Mapping) and "position_ids" in sample for sample in dataset]
        lengths = np.array(
            [0 if is_packed else tokens_of(s) or 0 for s, is_packed in zip(dataset, packed, strict=True)]
        )
    # By name, because most runs never import `datasets`.
    elif type(dataset).__module__ == "datasets.arrow_dataset":
        lengths = _stored_lengths(cast("Dataset", dataset))
    else:
        return
    for row in np.flatnonzero(lengths > limit)[:1].tolist():
        # `dataset.data` is the table before shuffle() and select(): in `dataset` this row may be another, or missing.
        if row < len(dataset) and (tokens_of(dataset[row]) or 0) > limit:
            raise too_long(row, int(lengths[row]), limit)


def require_one_length(dataset: MapDataset) -> None:
    """Raise UserError for samples of different lengths, if lengths are known without reading the samples."""
    lengths = [tokens_of(sample) for sample in dataset] if isinstance(dataset, list | tuple) else _selected(dataset)
    for row, length in enumerate(lengths):
        if length is not None and lengths[0] is not None and length != lengths[0]:
            raise UserError(
                f"sample {row} has {counted(length, 'token')} and sample 0 has {lengths[0]}: with pipeline stages all "
                "samples have one length: pad them on the right (labels -100), or give text, which is cut into blocks"
            )


def _selected(dataset: MapDataset) -> list[int | None]:
    """Return the length of each row of a `datasets.Dataset` in tokens; [] for others and for transformed rows."""
    if type(dataset).__module__ != "datasets.arrow_dataset":
        return []
    rows = cast("Dataset", dataset)
    # A transform (`set_transform`) makes the samples from the stored rows, whose lengths then say nothing.
    if rows.format["type"] == "custom":
        return []
    # Stages exchange whole samples, so here the length counts whatever the position ids say.
    lengths = _stored_lengths(rows.remove_columns([name for name in rows.column_names if name == "position_ids"]))
    indices = rows._indices  # noqa: SLF001  # rows and order after select(); datasets has no public name for it
    chosen = lengths if indices is None or not len(lengths) else lengths[indices.column(0).to_numpy()]
    found: list[int | None] = chosen.tolist()
    return found


def _stored_lengths(dataset: Dataset) -> npt.NDArray[np.integer]:
    """Return the number of input_ids of each stored row; empty if position_ids decide the length instead."""
    import pyarrow as pa
    import pyarrow.compute as pc

    column = dataset.data.column("input_ids") if "input_ids" in dataset.data.column_names else None
    is_list = column is not None and (pa.types.is_list(column.type) or pa.types.is_large_list(column.type))
    if not is_list or "position_ids" in dataset.column_names:
        return np.zeros(0, dtype=np.int64)
    return np.asarray(pc.fill_null(pc.list_value_length(column), 0))
