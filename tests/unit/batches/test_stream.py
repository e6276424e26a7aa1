"""Micro-batches: each sample once an epoch, alike in every layout, and the same again after a resume."""

import random
import tracemalloc

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, TensorDataset

from harness.batches.evaluation import evaluation_batches
from harness.batches.order import batch_indices
from harness.batches.stream import BatchStream, data_digest
from harness.errors import UserError

N, BLOCK = 37, 6


@pytest.fixture(scope="module")
def dataset():
    ids = torch.arange(N * BLOCK).view(N, BLOCK)
    return Dataset.from_dict({"input_ids": ids.tolist()}).with_format("torch")


class Rows:
    """A map-style data set that notes which rows are read."""

    def __init__(self, n):
        self.n, self.read = n, []

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        self.read.append(i)
        return {"input_ids": [i] * 3}


def streams(dataset, batch_ranks, micro=2, accumulation=4, consumed=0, seed=7):
    return [
        BatchStream(
            dataset,
            seed=seed,
            micro_batch=micro,
            accumulation=accumulation // batch_ranks,
            batch_rank=rank,
            batch_ranks=batch_ranks,
            consumed=consumed,
        )
        for rank in range(batch_ranks)
    ]


def micro_batches(ranks):
    """One step's micro-batches of all ranks, in the order in which they were dealt out."""
    steps = [stream.next_step() for stream in ranks]
    return [ids[:, 0].tolist() for turn in zip(*steps, strict=True) for ids, _ in turn]


def test_every_data_parallel_size_computes_the_same_micro_batches(dataset):
    for step in range(12):  # 12 x 8 samples: over the end of two epochs
        one, two, four = (micro_batches(streams(dataset, size, consumed=8 * step)) for size in (1, 2, 4))
        assert one == two == four and len(one) == 4


def test_the_order_is_the_same_wherever_a_block_of_it_begins():
    rows = [{"input_ids": [i]} for i in range(1500)]
    stream, *_ = streams(rows, 1, micro=100, accumulation=3)
    dealt = [i for _ in range(9) for ids, _ in stream.next_step() for i in ids.flatten().tolist()]
    assert dealt == batch_indices(0, 2700, 1500, seed=7).tolist()
    stream.consumed = 450  # back, into the middle of a step
    assert [i for ids, _ in stream.next_step() for i in ids.flatten().tolist()] == dealt[450:750]


def test_micro_batches_are_ids_and_labels_of_one_shape(dataset):
    for ids, labels in streams(dataset, 2)[1].next_step():
        assert ids.shape == labels.shape == (2, BLOCK) and ids.dtype == labels.dtype == torch.long
        assert torch.equal(ids, labels)


@given(
    micro=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    batch_ranks=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_an_epoch_uses_each_sample_once_and_the_next_has_another_order(micro, accumulation, batch_ranks, seed):
    rows = Rows(N)
    ranks = streams(rows, batch_ranks, micro, accumulation * batch_ranks, seed=seed)
    while len(rows.read) < 2 * N:
        for rank in ranks:
            rank.next_step()
    seen = [i for step in by_step(rows.read, ranks[0]) for i in step]
    first, second = seen[:N], seen[N : 2 * N]
    assert sorted(first) == sorted(second) == list(range(N))
    assert first != second


def by_step(read, stream):
    """Each step's reads, rank after rank, put back into the order in which samples were dealt."""
    for start in range(0, len(read), stream.global_batch):
        step = torch.tensor(read[start : start + stream.global_batch])
        yield (
            step.view(stream.batch_ranks, stream.accumulation, stream.micro_batch).transpose(0, 1).flatten().tolist()
        )


def test_a_rank_reads_its_own_rows_only():
    rows = Rows(N)
    stream = streams(rows, 4)[2]
    stream.next_step()
    assert len(rows.read) == stream.micro_batch * stream.accumulation == 2
    stream.next_step(read=False)
    assert len(rows.read) == 2 and stream.consumed == 16 and stream.epoch == 16 / N


def test_a_resumed_stream_goes_on_as_the_unbroken_one(dataset):
    (unbroken,) = streams(dataset, 1)
    for _ in range(7):
        unbroken.next_step()
    (resumed,) = streams(dataset, 1, consumed=unbroken.consumed)
    for _ in range(7):
        for (ids, _), (again, _) in zip(unbroken.next_step(), resumed.next_step(), strict=True):
            assert torch.equal(ids, again)


def test_a_model_of_ones_own_gets_its_pairs():
    pairs = TensorDataset(torch.arange(8.0).view(8, 1), torch.arange(8))
    stream = BatchStream(pairs, seed=0, micro_batch=4, accumulation=2)
    for inputs, labels in stream.next_step():
        assert inputs.shape == (4, 1) and inputs.dtype == torch.float32
        assert torch.equal(inputs[:, 0].long(), labels)


def test_a_collator_of_ones_own_replaces_the_default():
    rows = [{"input_ids": [i] * (1 + i % 3)} for i in range(8)]

    def pad(samples):
        ids = torch.zeros(len(samples), 3, dtype=torch.long)
        for row, sample in zip(ids, samples, strict=True):
            row[: len(sample["input_ids"])] = torch.tensor(sample["input_ids"])
        return {"input_ids": ids, "labels": ids.masked_fill(ids == 0, -100)}

    stream = BatchStream(rows, seed=0, micro_batch=8, accumulation=1, data_collator=pad)
    ((ids, labels),) = stream.next_step()
    assert ids.shape == (8, 3) and bool(((labels == -100) == (ids == 0)).all())


def test_too_few_samples_are_told_with_the_numbers(dataset):
    BatchStream(dataset.select(range(8)), seed=0, micro_batch=2, accumulation=2, batch_ranks=2)
    words = r"7 samples, fewer than one global batch of 8 \(micro-batch 2 x accumulation 2 x data parallel 2\)"
    with pytest.raises(UserError, match=words):
        BatchStream(dataset.select(range(7)), seed=0, micro_batch=2, accumulation=2, batch_ranks=2)


def test_a_data_set_without_an_order_is_refused():
    class Endless(IterableDataset):
        def __iter__(self):
            return iter(())

    with pytest.raises(UserError, match="Endless is not map-style"):
        BatchStream(Endless(), seed=0, micro_batch=1, accumulation=1)


def test_the_digest_tells_other_data(dataset):
    rows = [{"input_ids": row["input_ids"].tolist()} for row in dataset]
    assert data_digest(dataset) == data_digest(rows)
    assert data_digest(dataset.select(range(N - 1))) != data_digest(dataset)
    rows[0]["input_ids"][2] += 1
    assert data_digest(rows) != data_digest(dataset)
    packed = [{**row, "position_ids": [0, 1, 2, 0, 1, 2]} for row in rows]
    masked = [{**row, "labels": [-100, *row["input_ids"][1:]]} for row in rows]
    assert len({data_digest(data) for data in (rows, packed, masked)}) == 3
    pairs = TensorDataset(torch.arange(8.0).view(8, 1), torch.arange(8))
    assert data_digest(pairs) == data_digest(TensorDataset(*pairs.tensors))


class Noise:
    """A data set that draws from all global generators."""

    def __len__(self):
        return N

    def __getitem__(self, i):
        return torch.tensor([i + random.random(), np.random.rand()]), torch.rand(1)


def test_random_samples_are_the_same_on_every_rank_that_reads_them_and_differ_between_samples():
    def noisy(samples):
        return torch.stack([x for x, _ in samples]) + np.random.rand(), torch.stack([y for _, y in samples])

    def read(batch_ranks):
        sources = streams(Noise(), batch_ranks, consumed=24)
        for source in sources:
            source.collator = noisy
        return [pair for turn in zip(*[source.next_step() for source in sources], strict=True) for pair in turn]

    state = random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()
    one, two = read(1), read(2)
    assert all(
        torch.equal(a, b) for first, second in zip(one, two, strict=True) for a, b in zip(first, second, strict=True)
    )
    assert len({labels.sum().item() for _, labels in one}) == len(one)
    first, again = (list(evaluation_batches(Noise(), 4)) for _ in range(2))
    assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(first, again, strict=True))
    assert data_digest(Noise()) == data_digest(Noise())
    assert (random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()) == state


def test_1024_ranks_deal_out_a_hundred_million_rows_and_hold_none_of_them():
    rows, some = Rows(10**8), range(0, 1024, 32)
    ranks = streams(rows, batch_ranks=1024, accumulation=1024, consumed=10**8 - 1000)  # over the end of an epoch
    tracemalloc.start()
    for rank in some:
        ranks[rank].next_step()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    dealt = batch_indices(10**8 - 1000, 2048, 10**8, seed=7).reshape(1024, 2)[list(some)]
    assert rows.read == dealt.flatten().tolist()
    assert most < 1_000_000
