"""What is of the wrong kind is one line that names it, before a model is built."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from datasets import Dataset
from torch import nn

import harness
from harness import Trainer, TrainerCallback, TrainingArguments, UserError
from harness.batches.collate import TokenCollator, collate
from harness.batches.given import require_one_length, require_short, require_types
from harness.batches.stream import read_micro_batch
from harness.cli import main
from harness.training.callbacks import instances, take_out
from harness.training.evaluate import mean_loss
from harness.training.prepare.dataset_check import require_one_shape

TOKENS_APART = [{"input_ids": [1] * 5, "position_ids": positions} for positions in ([0, 1, 0, 1, 2], [0, 1, 2, 3, 4])]
ROWS = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5, 6]}]


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        ((row for row in ROWS), "train_dataset: generator is not map-style"),
        ("rows.jsonl", "train_dataset is the text 'rows.jsonl'"),
        ({"train": ROWS}, "train_dataset is a dict of train: give one data set"),
    ],
)
def test_a_data_set_that_cannot_be_indexed_is_refused(dataset: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        require_types(TrainingArguments(), {}, {"train_dataset": dataset}, None)


def test_other_kinds_are_refused() -> None:
    require_types(TrainingArguments(), {"loss_fn": None, "data_collator": len}, {"train_dataset": ROWS}, None)
    with pytest.raises(UserError, match=r"args is a dict: give harness.TrainingArguments"):
        require_types({"max_steps": 3}, {}, {}, None)
    with pytest.raises(UserError, match="compute_metrics is a int: give a function"):
        require_types(TrainingArguments(), {"compute_metrics": 3}, {}, None)
    with pytest.raises(UserError, match="processing_class is the text 'bytes'"):
        require_types(TrainingArguments(), {}, {}, "bytes")


def test_an_empty_data_set_is_not_evaluated_to_nan() -> None:
    with pytest.raises(UserError, match="the data set to evaluate is empty"):
        mean_loss(cast("Any", None), [], 4, collate)


def test_samples_of_an_unknown_form_are_refused_with_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"no input_ids \(it has: question, answer\): give input_ids, text, messages"):
        collate([{"question": "a", "answer": "b"}])


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        ({"input_ids": [1, 9, 300]}, r"sample 1: input_ids\[2\] is 300, but the model's ids are 0 to 299"),
        ({"input_ids": [1, -1, 3]}, r"sample 1: input_ids\[1\] is -1"),
        ({"input_ids": [1, 2, 3], "labels": [-100, 1, -5]}, r"sample 1: labels\[2\] is -5, .* 0 to 299 or -100"),
        ({"input_ids": [1.5, 2.0, 3.0]}, r"input_ids is \[1.5, 2.0, 3.0\]: it must be a list of integers"),
        ({"input_ids": None}, "input_ids is None: it must be a list of integers"),
    ],
)
def test_a_sample_that_the_model_cannot_take_is_named(sample: Any, words: str) -> None:
    good = {"labels": [1, 2, 3], **ROWS[0]} if "labels" in sample else ROWS[0]
    with pytest.raises(UserError, match=words):
        read_micro_batch([good, sample], [0, 1], TokenCollator(collate, 300))
    (inputs, _), _ = read_micro_batch(ROWS, [1], TokenCollator(collate, 300))
    assert isinstance(inputs, torch.Tensor) and inputs.tolist() == [[4, 5, 6]]


LONG = [{"input_ids": [1] * length} for length in (4, 4, 5, 6)]


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        (LONG[2:3] * 2, "sample 7 has 5 tokens, but the model has 4 positions: shorten it"),
        ([TOKENS_APART[0], TOKENS_APART[1]], "sample 8: position_ids reach 4, but the model has 4 positions"),
    ],
)
def test_a_sample_with_more_tokens_than_positions_is_named(samples: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        read_micro_batch(dict(zip((7, 8), samples, strict=True)), [7, 8], TokenCollator(collate, positions=4))


def test_of_padded_samples_the_longest_is_named_and_others_pass() -> None:
    def padded(samples: list[Any]) -> Any:
        longest = max(len(sample["input_ids"]) for sample in samples)
        return {"input_ids": [[*row["input_ids"], *[0] * (longest - len(row["input_ids"]))] for row in samples]}

    with pytest.raises(UserError, match="sample 3 has 6 tokens, but the model has 4 positions"):
        read_micro_batch(LONG, [1, 2, 3], TokenCollator(padded, positions=4))
    assert read_micro_batch(LONG, [1, 2, 3], TokenCollator(padded, positions=6))[0][1].shape == (3, 6)
    assert read_micro_batch(LONG, [3], TokenCollator(padded))[0][1].shape == (1, 6)
    apart = read_micro_batch(
        [{"input_ids": [1] * 8, "position_ids": [0, 1, 2, 3] * 2}], [0], TokenCollator(collate, 9, 4)
    )
    assert apart[0][1].shape == (1, 8)  # two documents, each within the positions


@pytest.mark.parametrize(
    "form", [list, tuple, Dataset.from_list, lambda rows: Dataset.from_list(rows).with_format("torch")]
)
def test_a_long_sample_is_found_before_a_run_begins(form: Any) -> None:
    require_short(form(LONG), 6)
    with pytest.raises(UserError, match="sample 2 has 5 tokens, but the model has 4 positions"):
        require_short(form(LONG), 4)


@pytest.mark.parametrize("form", [list, Dataset.from_list, lambda rows: Dataset.from_list(rows).select([1, 0, 2, 3])])
def test_pipeline_stages_want_samples_of_one_length(form: Any) -> None:
    with pytest.raises(UserError, match=r"sample 1 has [34] tokens and sample 0 has [34]: with pipeline stages"):
        require_one_length(form([{"input_ids": [1] * size} for size in (3, 4, 4, 3)]))
    require_one_length(Dataset.from_list([{"input_ids": [1] * size} for size in (3, 4, 4)]).select([1, 2]))
    require_one_length([{"input_ids": [1] * 4}] * 3)


class Growing:
    """A data set that does not tell the lengths of its samples."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": [1] * (3 + index // 2)}


def test_pipeline_stages_want_micro_batches_of_one_shape() -> None:
    with pytest.raises(UserError, match=r"of \(2, 3\) and \(2, 4\): with pipeline stages all must have one"):
        require_one_shape(Growing(), collate, 2)
    require_one_shape([{"input_ids": [1] * 3}] * 9, collate, 2)
    require_one_shape([{"input_ids": [1] * 3}], collate, 2)


@pytest.mark.parametrize(
    "rows",
    [
        [{**row, "position_ids": [0] * len(row["input_ids"])} for row in LONG],
        Dataset.from_list([{**row, "position_ids": [0] * len(row["input_ids"])} for row in LONG]),
        Dataset.from_list(LONG).select([0, 1]),
        Dataset.from_list([{"text": "a"}]),
        [(1, 2), None, {"input_ids": 3}],
        dict(enumerate(LONG)),
    ],
)
def test_what_may_be_within_the_positions_is_left_to_be_read(rows: Any) -> None:
    require_short(rows, 4)


def test_pairs_are_no_samples_of_a_language_model() -> None:
    with pytest.raises(UserError, match="a sample of a language model has input_ids"):
        read_micro_batch([([1, 2, 3], [1, 2, 3])], [0], TokenCollator(collate))


def test_callbacks_are_taken_as_instances_and_as_classes() -> None:
    class Mine(TrainerCallback):
        pass

    mine = Mine()
    callbacks = instances([Mine, mine])
    assert [type(callback) for callback in callbacks] == [Mine, Mine]
    assert take_out(callbacks, mine) is mine
    assert isinstance(take_out(callbacks, Mine), Mine)
    assert take_out(callbacks, Mine) is None and callbacks == []

    class Derived(Mine):
        pass

    callbacks = instances([Derived])
    assert isinstance(take_out(callbacks, Mine), Derived) and callbacks == []
    with pytest.raises(UserError, match="callback 3 has no on_train_begin"):
        instances([3])  # type: ignore[list-item]
    with pytest.raises(UserError, match=r"give \[callback\]"):
        instances(mine)  # type: ignore[arg-type]


def test_the_package_states_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"ds-harness {harness.__version__}\n"


def test_what_a_list_of_layers_cannot_take_is_refused_together() -> None:
    args = TrainingArguments(block_size=8, packing=True, attn_implementation="eager")
    with pytest.raises(UserError) as told:
        Trainer([nn.Linear(1, 1)], args, [], loss_fn=nn.functional.mse_loss)
    assert [line.split()[0] for line in str(told.value).splitlines()] == [
        *("--attn_implementation", "--block_size", "--packing")
    ]
