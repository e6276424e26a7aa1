"""Padding: as much as the longest sample of a batch needs, alike where a layout asks for it, and counted."""

import io

import pytest
import torch

from harness.batches.evaluation import evaluation_batches
from harness.batches.stream import BatchStream
from harness.console import Console
from harness.data.files.documents import as_documents
from harness.data.on_disk.cache import Preparation
from harness.data.samples import make_samples
from harness.data.tokenizer import ByteTokenizer
from harness.training.prepare.preparation import report_padding

N, BLOCK = 24, 256


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    turns = [
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a" * (1 + 17 * (i % 12))}]
        for i in range(N)
    ]
    documents = as_documents([{"messages": messages} for messages in turns], "chats")
    return make_samples(documents, ByteTokenizer(), BLOCK, Preparation(tmp_path_factory.mktemp("cache")))


def stream(data, one_length, batch_rank=0):
    return BatchStream(
        data, seed=1, micro_batch=2, accumulation=2, batch_rank=batch_rank, batch_ranks=2, one_length=one_length
    )


def test_a_batch_is_as_long_as_its_longest_sample(samples):
    own, alike = stream(samples, False), stream(samples, True)
    for _ in range(6):
        for (ids, labels), (padded, same) in zip(own.next_step(), alike.next_step(), strict=True):
            length = ids.shape[1]
            used = int((labels != -100).nonzero()[:, 1].max()) + 2  # behind the answer stands the end of its line
            assert length % 8 == 0 and used <= length < used + 8 and padded.shape[1] == alike.length
            assert torch.equal(padded[:, :length], ids) and torch.equal(same[:, :length], labels)
            assert bool((same[:, length:] == -100).all())
        assert own.length is None


def test_all_ranks_know_the_length_and_the_tokens_of_a_step(samples):
    ranks = [stream(samples, True, rank) for rank in (0, 1)]
    for _ in range(6):
        read = [ranks[0].next_step(), ranks[1].next_step()]
        shapes = {tuple(ids.shape) for step in read for ids, _ in step}
        assert shapes == {(2, ranks[0].length)} and ranks[0].length == ranks[1].length
        assert ranks[0].tokens(5) == ranks[1].tokens(7) == real_tokens(read[0]) + real_tokens(read[1])
    ranks[1].next_step(read=False)
    ranks[0].next_step()
    assert (ranks[1].length, ranks[1].tokens(0)) == (ranks[0].length, ranks[0].tokens(0))


def test_what_an_attention_mask_hides_is_no_token(samples):
    rows = [{**samples[i], "attention_mask": (torch.arange(BLOCK) < samples.lengths([i])[0]).long()} for i in range(N)]
    masked = stream(rows, False)
    for _ in range(3):
        read = masked.next_step()
        assert masked.tokens(4 * BLOCK) == 2 * real_tokens(read)  # of two data ranks, as far as this one knows
        assert read[0][0].shape[1] == BLOCK


def real_tokens(micro_batches):
    """Tokens that are no padding: the answer of each row, and 28 beside it."""
    return sum(int((labels == 97).sum()) + 28 * len(labels) for _, labels in micro_batches)


def test_short_samples_are_mostly_padding_in_long_blocks_only(samples):
    assert 0.1 < stream(samples, False).padding_share() < stream(samples, True).padding_share() < 0.6
    assert stream([{"input_ids": [1] * 4}] * N, False).padding_share() == 0.0


def test_evaluation_pads_as_far_as_it_is_asked_to(samples):
    each = [batch.inputs.shape[1] for batch in evaluation_batches(samples, 2)]
    pairs = [batch.inputs.shape[1] for batch in evaluation_batches(samples, 2, alike=2)]
    assert pairs == [max(each[i - i % 2 : i - i % 2 + 2]) for i in range(len(each))] and len(set(each)) > 3
    assert {batch.inputs.shape[1] for batch in evaluation_batches(samples, 2, alike=0)} == {BLOCK}


def test_packing_is_suggested_where_most_is_padding():
    said = io.StringIO()
    console = Console(out=said, error=said, speaks=True)
    for share, packed in ((0.76, False), (0.4, False), (0.9, True)):
        report_padding(console, share, packed=packed)
    assert said.getvalue() == (
        "76% of the tokens of a batch are padding: --packing joins short conversations instead\n"
    )
