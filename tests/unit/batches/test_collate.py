"""The default collator: labels from ids and masks, and everything that it must not pass over in silence."""

import numpy as np
import pytest
import torch

from harness.batches.collate import IGNORED, as_micro_batch, collate
from harness.errors import UserError

IDS = [[1, 2, 3], [4, 5, 6]]


def test_labels_are_the_ids_where_none_are_given():
    ids, labels = collate([{"input_ids": row, "text": "kept out"} for row in IDS])
    assert ids.tolist() == labels.tolist() == IDS
    labels[0, 0] = 9
    assert ids.tolist() == IDS


@pytest.mark.parametrize(
    "rows",
    [
        IDS,
        [np.array(row) for row in IDS],
        [torch.tensor(row, dtype=torch.int32) for row in IDS],
        [torch.tensor(IDS[0]), IDS[1]],
        [IDS[0], np.array(IDS[1], dtype=np.uint64)],
        [np.array(IDS[0]), np.array(IDS[1], dtype=np.uint64)],  # numpy alone would make them floats
    ],
)
def test_rows_may_be_lists_arrays_or_tensors(rows):
    ids, _ = collate([{"input_ids": row} for row in rows])
    assert ids.tolist() == IDS and ids.dtype == torch.long


def test_given_labels_are_kept():
    _, labels = collate([{"input_ids": row, "labels": [IGNORED, *row[1:]]} for row in IDS])
    assert labels.tolist() == [[-100, 2, 3], [-100, 5, 6]]


def test_padding_is_not_counted():
    masks = [[1, 1, 1], [1, 0, 0]]
    samples = [{"input_ids": i, "attention_mask": m} for i, m in zip(IDS, masks, strict=True)]
    assert collate(samples)[1].tolist() == [[1, 2, 3], [4, -100, -100]]


def test_position_ids_travel_and_no_document_is_predicted_from_another():
    samples = [{"input_ids": [1, 2, 3, 4, 5], "position_ids": [0, 1, 0, 1, 2]}]
    (ids, positions), labels = collate(samples)
    assert ids.tolist() == [[1, 2, 3, 4, 5]] and positions.tolist() == [[0, 1, 0, 1, 2]]
    assert labels.tolist() == [[-100, 2, -100, 4, 5]]
    given = as_micro_batch({name: torch.tensor([values]) for name, values in samples[0].items()})
    assert given[0][1].tolist() == positions.tolist() and given[1].tolist() == labels.tolist()


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        (
            [{"input_ids": [1, 2]}, {"input_ids": [1, 2, 3]}],
            r"input_ids of \(2,\) and \(3,\) in one micro-batch",
        ),
        ([{"input_ids": [1, 2], "attention_mask": [0, 1]}], "pad on the right"),
        (
            [{"input_ids": [1, 2], "token_type_ids": [0, 0]}],
            "contain token_type_ids, which is not passed to the model",
        ),
        ([{"input_ids": [1, 2], "position_ids": [0]}], r"position_ids of \(1, 1\) with input_ids of \(1, 2\)"),
        ([{"input_ids": [1, 2], "labels": [1]}], r"labels of \(1, 1\) with input_ids of \(1, 2\)"),
        ([{"input_ids": [1, 2], "attention_mask": [1]}], r"attention_mask of \(1, 1\) with input_ids of \(1, 2\)"),
        ([{"input_ids": [1, 2], "labels": None}], "a sample's labels is None: it must be a list of integers"),
        ([{"text": "x"}], r"no input_ids \(it has: text\)"),
        ([3], "a sample is int"),
        (["ab", "cd"], "a sample is str"),
    ],
)
def test_what_would_be_trained_wrong_is_refused(samples, words):
    with pytest.raises(UserError, match=words):
        collate(samples)


def test_a_collator_must_give_ids_or_a_pair():
    with pytest.raises(UserError, match="the data_collator gave pixels"):
        as_micro_batch({"pixels": torch.zeros(1)})
    with pytest.raises(UserError, match="the data_collator gave Tensor"):
        as_micro_batch(torch.zeros(3))


@pytest.mark.parametrize("name", ["labels", "attention_mask", "position_ids", "token_type_ids"])
@pytest.mark.parametrize("first", [True, False])
def test_a_column_that_only_some_samples_have_is_not_left_out(name, first):
    whole, lacking = {"input_ids": [1, 2], name: [1, 2]}, {"input_ids": [1, 2]}
    with pytest.raises(UserError, match=f"some samples of a micro-batch have {name} and others do not"):
        collate([whole, lacking] if first else [lacking, whole])


@pytest.mark.parametrize("other", [([1, 2], [1, 2]), [1, 2], 3, None, {"text": "x"}])
def test_a_sample_of_another_kind_is_not_left_out(other):
    with pytest.raises(UserError, match="some samples of a micro-batch have input_ids and others do not"):
        collate([{"input_ids": [1, 2]}, other])


@pytest.mark.parametrize("make", [torch.tensor, np.array, list], ids=["tensors", "arrays", "lists"])
def test_what_a_collator_gives_may_be_in_any_form(make):
    given = {"input_ids": make(IDS), "labels": None, "attention_mask": make([[1, 1, 1], [1, 1, 0]]), "text": ["a"]}
    ids, labels = as_micro_batch(given)
    assert ids.tolist() == IDS and labels.tolist() == [[1, 2, 3], [4, 5, -100]]
    (ids, positions), labels = as_micro_batch({**given, "labels": make(IDS), "position_ids": make([[0, 1, 2]] * 2)})
    assert positions.tolist() == [[0, 1, 2], [0, 1, 2]] and labels.tolist() == [[-100, 2, 3], [-100, 5, -100]]


def test_the_masks_of_a_collator_may_be_of_any_type():
    for mask in (torch.tensor([[True, False]]), torch.tensor([[1.0, 0.0]])):
        assert as_micro_batch({"input_ids": [[1, 2]], "attention_mask": mask})[1].tolist() == [[1, -100]]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"input_ids": [[1, 2], [3]]}, "a sample's input_ids is .*: it must be a list of integers"),
        ({"input_ids": [["a"]]}, "a sample's input_ids is .*: it must be a list of integers"),
        ({"input_ids": None}, "the data_collator gave nothing: it must return input_ids"),
        ({"input_ids": [[1, 2]], "labels": [[0.5, 1.0]]}, "a sample's labels is .*: it must be a list of integers"),
        ({"input_ids": [[1, 2]], "attention_mask": [[[[1, 0]]]]}, "attention_mask of .*: the shapes must agree"),
        ({}, "the data_collator gave nothing: it must return input_ids"),
    ],
)
def test_what_a_collator_must_not_give_is_told(given, words):
    with pytest.raises(UserError, match=words):
        as_micro_batch(given)
