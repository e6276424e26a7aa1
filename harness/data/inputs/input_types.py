"""What a program hands to the Trainer is of the right kind, or refused in one line before anything is read."""

from __future__ import annotations

from collections.abc import Mapping

from harness.arguments import TrainingArguments
from harness.data.batches.stream import dataset_length
from harness.data.streaming.rows import is_iterable
from harness.errors import UserError


def require_types(
    args: object, functions: Mapping[str, object], datasets: Mapping[str, object], tokenizer: object
) -> None:
    """Raise UserError for what is of a wrong kind; each may be None but the arguments."""
    if not isinstance(args, TrainingArguments):
        raise UserError(f"args is a {_kind(args)}: give harness.TrainingArguments(...)")
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise UserError(f"{name} is a {_kind(function)}: give a function")
    if isinstance(tokenizer, str):
        raise UserError(f"processing_class is the text {tokenizer!r}: give the tokenizer, as AutoTokenizer loads it")
    for name, dataset in datasets.items():
        if dataset is not None:
            for each_name, each in _by_name(name, dataset).items():
                require_dataset(each_name, each)


def _by_name(name: str, dataset: object) -> dict[str, object]:
    """Return a data set by its name; each of several that are to be evaluated by its own."""
    if name == "eval_dataset" and isinstance(dataset, Mapping) and dataset and all(isinstance(k, str) for k in dataset):
        return {f"{name}[{key!r}]": each for key, each in dataset.items()}
    return {name: dataset}


def require_dataset(name: str, dataset: object) -> None:
    """Raise UserError for what is no data set."""
    if isinstance(dataset, Mapping) and not dataset:
        raise UserError(f"{name} is an empty {_kind(dataset)}: give a data set or a list of samples")
    if isinstance(dataset, Mapping):
        raise UserError(
            f"{name} is a {_kind(dataset)} of {', '.join(map(str, list(dataset)[:4]))}: give one data set, such as one "
            "split of it, or a list of samples"
        )
    if isinstance(dataset, str):
        raise UserError(f"{name} is the text {dataset!r}: give a data set, such as datasets.load_dataset makes of it")
    if is_iterable(dataset):
        return
    try:
        dataset_length(dataset)  # type: ignore[arg-type]  # of whatever kind
    except UserError as error:
        raise UserError(f"{name}: {error}") from error


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
