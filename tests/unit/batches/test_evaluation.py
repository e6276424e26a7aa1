"""Evaluation batches: equally many and equally shaped on every rank, each sample counted once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from harness.batches.evaluation import evaluation_batches, evaluation_steps
from harness.errors import UserError

SIZES = {
    "n": st.integers(1, 30),
    "micro": st.integers(1, 5),
    "batch_ranks": st.integers(1, 4),
}


def on_all_ranks(dataset, micro, batch_ranks):
    return [list(evaluation_batches(dataset, micro, rank, batch_ranks)) for rank in range(batch_ranks)]


@given(**SIZES)
def test_every_rank_runs_alike_and_counts_each_sample_once(n, micro, batch_ranks):
    dataset = [{"input_ids": [i, i]} for i in range(n)]
    ranks = on_all_ranks(dataset, micro, batch_ranks)
    counted = []
    for batches in ranks:
        assert len(batches) == evaluation_steps(n, micro, batch_ranks)
        for batch in batches:
            assert batch.inputs.shape == batch.labels.shape == (micro, 2)
            valid = (batch.labels != -100).all(dim=1)
            assert valid.tolist() == [row < batch.rows for row in range(micro)]
            counted += batch.inputs[valid][:, 0].tolist()
    assert sorted(counted) == list(range(n))


@given(**SIZES)
def test_the_mean_of_the_counted_rows_is_the_mean_of_the_data(n, micro, batch_ranks):
    targets = torch.arange(float(n)).view(n, 1) ** 2
    ranks = on_all_ranks(TensorDataset(torch.zeros(n, 3), targets), micro, batch_ranks)
    batches = [batch for rank in ranks for batch in rank]
    total = sum(float(batch.labels[: batch.rows].sum()) for batch in batches)
    assert all(batch.labels.shape == (micro, 1) for batch in batches)
    assert total / sum(batch.rows for batch in batches) == pytest.approx(float(targets.mean()))


def test_class_labels_are_left_alone():
    dataset = TensorDataset(torch.zeros(3, 4), torch.tensor([0, 1, 2]))
    batches = list(evaluation_batches(dataset, 2))
    assert [batch.labels.tolist() for batch in batches] == [[0, 1], [2, 1]]
    assert [batch.rows for batch in batches] == [2, 1]


def test_a_collator_whose_labels_are_its_ids_keeps_its_ids():
    def one_tensor_for_both(samples):
        ids = torch.tensor([sample["input_ids"] for sample in samples])
        return ids, ids

    dataset = [{"input_ids": [i, i]} for i in range(3)]
    *_, last = evaluation_batches(dataset, 2, data_collator=one_tensor_for_both)
    assert last.inputs.tolist() == [[2, 2], [1, 1]]
    assert last.labels.tolist() == [[2, 2], [-100, -100]]


def test_an_abandoned_evaluation_can_be_repeated():
    dataset = [{"input_ids": [i]} for i in range(5)]
    next(evaluation_batches(dataset, 2))
    again = [batch.inputs.flatten().tolist() for batch in evaluation_batches(dataset, 2)]
    assert again == [[0, 1], [2, 3], [4, 1]]


def test_nothing_to_evaluate_is_told_at_the_call():
    with pytest.raises(UserError, match="evaluation data set is empty"):
        evaluation_batches([], 2)
