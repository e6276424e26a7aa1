"""The interface of the part that makes samples from text and conversations, and the core's behaviour without it.

The core trains on samples: map-style data sets of dicts with input_ids, or of pairs (inputs, labels). The part makes an
endless one of a stream, whose position checkpoints keep (`harness.batches.order.OwnOrder`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from harness.arguments import TrainingArguments
from harness.arguments.configure import RunConfig
from harness.batches.collate import AnyDataset, MapDataset
from harness.batches.evaluation import EvaluationData
from harness.batches.given import as_dataset, is_iterable, read_all
from harness.config.values.json_object import JsonObject
from harness.console import Console
from harness.errors import UserError
from harness.hf.skeleton import ModelSource
from harness.topology.env import LaunchEnv
from harness.training.engine.engine import Engine


class AnyTokenizer(Protocol):
    """A tokenizer, which the core only saves beside the model."""

    def __len__(self) -> int:
        """Return the number of token ids."""

    def save_pretrained(self, directory: Path, /) -> object:
        """Write the tokenizer's files."""


@dataclass(frozen=True, kw_only=True)
class UserData:
    """The Trainer's data sets and their tokenizer."""

    train_dataset: AnyDataset | None = None
    eval_dataset: AnyDataset | Mapping[str, AnyDataset] | None = None
    processing_class: AnyTokenizer | None = None


@dataclass(frozen=True, kw_only=True)
class Datasets:
    """Data sets of samples and their tokenizer."""

    train: MapDataset | None
    evaluation: EvaluationData
    tokenizer: AnyTokenizer | None


class SamplePrompts(Protocol):
    """Prompts that the model continues at each evaluation."""

    @property
    def texts(self) -> Sequence[str]:
        """The prompts for reports."""

    def continued(self, engine: Engine) -> list[str]:
        """Return the model's continuation of each prompt; all ranks call it and get the same result."""


@dataclass(frozen=True, kw_only=True)
class DataRequest:
    """The run that samples are made for.

    Attributes:
        source: the model; None if samples stay as they are given, for the user's own layers or data_collator.
    """

    args: TrainingArguments
    config: RunConfig
    source: ModelSource | None
    env: LaunchEnv
    console: Console


class DataPart(Protocol):
    """Makes samples from the Trainer's data sets."""

    def own_tokenizer(self, model: object) -> AnyTokenizer | None:
        """Return the tokenizer in a model's directory; None without one, or if `model` is not a name."""

    def user_datasets(self, given: UserData, request: DataRequest) -> Datasets:
        """Return the data sets as samples; all ranks call it. Raises UserError if they cannot be used."""

    def later_dataset(
        self, data: MapDataset, name: str, tokenizer: AnyTokenizer | None, request: DataRequest
    ) -> MapDataset:
        """Return a data set for `evaluate` or `predict` as samples; all ranks call it."""

    def stop_at_answers(self, source: ModelSource, data: Datasets, console: Console) -> ModelSource:
        """For training on conversations, return the model with a generation config that stops where answers end."""

    def sample_lines(self, data: Datasets) -> Iterator[str]:
        """Yield lines for the user that show a training sample with the tokens in the loss marked."""

    def sample_prompts(
        self, args: TrainingArguments, data: Datasets, source: ModelSource, vocabulary: int
    ) -> SamplePrompts:
        """Return the prompts of `--sample_prompts` for a model with `vocabulary` ids. Raises UserError if unusable."""

    def data_files(self, flags: Mapping[str, object]) -> JsonObject:
        """Return the data files that the script's flags name, for `run.json`."""

    def composition(self, data: AnyDataset | None) -> JsonObject:
        """Return a data set's sources, tokens and lengths for `run.json`; {} if it was given as samples."""


FOLDER = "harness.data"
"""The folder of the data part."""


def given_samples(given: UserData, request: DataRequest) -> Datasets:
    """Return data sets that already hold samples, the only ones that a run takes without the data part.

    Raises UserError for text and conversations, and for a stream.
    """
    train, args, source = as_dataset(given.train_dataset), request.args, request.source
    if is_iterable(train) or args.shuffle_buffer_size:
        what = "--shuffle_buffer_size" if args.shuffle_buffer_size else "an IterableDataset as train_dataset"
        raise UserError(f"{what} needs {FOLDER}, which is not installed: give a data set with a length")
    if train is not None:
        train = require_samples_of(train, "train_dataset", source)

    def read(data: AnyDataset) -> MapDataset:
        return require_samples_of(read_all(as_dataset(data), "eval_dataset"), "eval_dataset", source)

    evaluation: EvaluationData = None
    if isinstance(given.eval_dataset, Mapping):
        evaluation = {name: read(each) for name, each in given.eval_dataset.items()}
    elif given.eval_dataset is not None:
        evaluation = read(given.eval_dataset)
    return Datasets(train=train, evaluation=evaluation, tokenizer=given.processing_class)


def require_samples_of(data: MapDataset, name: str, source: ModelSource | None) -> MapDataset:
    """Return the data set. Raises UserError if the decoder `source` cannot take its rows as samples."""
    # The first row stands for all: reading every one may take hours.
    row: object = data[0] if source is not None and len(data) else None
    if isinstance(row, Mapping) and "input_ids" not in row:
        raise UserError(
            f"{name} has {', '.join(map(str, row)) or 'nothing'}: to turn text and conversations into samples needs "
            f"{FOLDER}, which is not installed: give samples with input_ids"
        )
    return data
