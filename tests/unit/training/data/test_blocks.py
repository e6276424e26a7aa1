"""Blocks against a plain reading of the contract, their cache, and one builder a host."""

import subprocess
import sys
import threading

import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from transformers import ByT5Tokenizer

from harness.config.errors import UserError
from harness.training.data import cache as cache_module
from harness.training.data.blocks import BlockJoiner, make_blocks
from harness.training.data.cache import once_per_host
from harness.training.data.sources import read_documents
from harness.training.data.tokenizer import ByteTokenizer, encode_documents, load_tokenizer
from tests.unit.training.data.conftest import TEXTS


def reference(texts, block_size):
    """The contract in three lines: close each document, join all, cut, drop the rest."""
    ids = [i for text in texts for i in [*text.encode(), 256]]
    return [ids[k : k + block_size] for k in range(0, len(ids) - block_size + 1, block_size)]


def rows(blocks):
    return [row["input_ids"].tolist() for row in blocks]


@given(
    batches=st.lists(st.lists(st.text("aé🙂", max_size=20), min_size=1, max_size=4), max_size=6),
    size=st.integers(2, 9),
)
def test_joining_crosses_batches_and_loses_nothing(batches, size):
    joiner = BlockJoiner(ByteTokenizer(), size)
    got = [row for batch in batches for row in joiner.cut(batch)[0].tolist()]
    assert got == reference([text for batch in batches for text in batch], size)


@given(
    batches=st.lists(st.lists(st.text("aé🙂", max_size=20), min_size=1, max_size=4), max_size=6),
    size=st.integers(2, 9),
)
def test_packed_blocks_hold_the_same_ids_and_count_from_each_document_and_block(batches, size):
    joiner = BlockJoiner(ByteTokenizer(), size, packing=True)
    got = [joiner.cut(batch) for batch in batches]
    ids = [row for ids, _ in got for row in ids.tolist()]
    assert ids == reference([text for batch in batches for text in batch], size)
    counted = [row for _, positions in got for row in positions.tolist()]
    for row, positions in zip(ids, counted, strict=True):
        wanted = [0]
        for before in row[:-1]:
            wanted.append(0 if before == 256 else wanted[-1] + 1)  # a document ends with 256, and only there
        assert positions == wanted


def test_packed_blocks_are_kept_apart_from_the_others(tmp_path):
    documents = Dataset.from_dict({"text": TEXTS})
    plain, packed = (make_blocks(documents, ByteTokenizer(), 16, tmp_path, packing=p) for p in (False, True))
    assert rows(plain) == rows(packed) and set(plain[0]) == {"input_ids"}
    assert set(packed[0]) == {"input_ids", "position_ids"} and packed[0]["position_ids"].dtype == torch.int64


@pytest.mark.parametrize("documents_at_once", [1, 3, 256])
def test_blocks_are_those_of_the_contract_whatever_the_batch(documents_at_once, tmp_path, monkeypatch):
    monkeypatch.setattr(cache_module, "_ROWS_AT_ONCE", documents_at_once)
    texts = ["x" * (7 * i % 50) for i in range(40)] + TEXTS
    documents = Dataset.from_dict({"text": texts})
    for size in (2, 16, 33):
        assert rows(make_blocks(documents, ByteTokenizer(), size, tmp_path)) == reference(texts, size)


def test_a_trained_tokenizer_is_joined_alike(trained_tokenizer, tmp_path):
    tokenizer = load_tokenizer(str(trained_tokenizer))
    ids = [int(i) for document in encode_documents(tokenizer, TEXTS) for i in document]
    blocks = make_blocks(Dataset.from_dict({"text": TEXTS}), tokenizer, 8, tmp_path)
    assert rows(blocks) == [ids[k : k + 8] for k in range(0, len(ids) - 7, 8)]


def test_a_second_call_reads_the_cache_even_after_the_tokenizer_was_used(trained_tokenizer, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("the quick brown fox " * 50)
    documents = read_documents(tmp_path / "a.txt", tmp_path)
    first = make_blocks(documents, load_tokenizer(str(trained_tokenizer)), 8, tmp_path)
    tokenizer = load_tokenizer(str(trained_tokenizer))
    tokenizer(["a b", "c"], padding=False, truncation=True, max_length=1)  # leaves its mark on the tokenizer

    def never(*_):
        raise AssertionError("mapped again")

    monkeypatch.setattr(BlockJoiner, "__call__", never)
    again = make_blocks(read_documents(tmp_path / "a.txt", tmp_path), tokenizer, 8, tmp_path)
    assert rows(again) == rows(first)
    with pytest.raises(AssertionError, match="mapped again"):
        make_blocks(documents, tokenizer, 9, tmp_path)


def test_a_tokenizer_written_in_python_is_known_by_its_files(tmp_path):
    documents = Dataset.from_dict({"text": TEXTS})
    blocks = [make_blocks(documents, ByT5Tokenizer(extra_ids=n), 8, tmp_path) for n in (125, 125, 3)]
    assert rows(blocks[0]) == rows(blocks[2])
    assert blocks[0]._fingerprint == blocks[1]._fingerprint != blocks[2]._fingerprint


SECOND_RUN = """
import sys
from harness.training.data.blocks import BlockJoiner, make_blocks
from harness.training.data.sources import read_documents
from harness.training.data.tokenizer import ByteTokenizer
BlockJoiner.__call__ = None
print(len(make_blocks(read_documents(sys.argv[1], sys.argv[2]), ByteTokenizer(), 8, sys.argv[2])))
"""


def test_another_process_finds_the_cache(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 100)
    make_blocks(read_documents(tmp_path / "a.txt", tmp_path), ByteTokenizer(), 8, tmp_path)
    command = [sys.executable, "-c", SECOND_RUN, str(tmp_path / "a.txt"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.strip() == "12", done.stderr


def test_too_little_text_is_told_with_the_numbers(tmp_path):
    documents = Dataset.from_dict({"text": ["abc", "de"]})
    assert rows(make_blocks(documents, ByteTokenizer(), 7, tmp_path)) == [[97, 98, 99, 256, 100, 101, 256]]
    for _ in range(2):  # the second time the empty result comes from the cache
        with pytest.raises(UserError, match="7 tokens, less than one block of 8"):
            make_blocks(documents, ByteTokenizer(), 8, tmp_path)
    with pytest.raises(UserError, match="--block_size 1"):
        make_blocks(documents, ByteTokenizer(), 1, tmp_path)


class Host:
    """The ranks of one host as threads: all call `once_per_host` with one build and a real barrier."""

    def __init__(self, size, build):
        self.events, self.errors, self.build = [], [], build
        self.barrier = threading.Barrier(size, timeout=20)
        ranks = [threading.Thread(target=self.run, args=(rank,)) for rank in range(size)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()

    def run(self, local_rank):
        try:
            once_per_host(lambda: self.build(self, local_rank), local_rank=local_rank, barrier=self.barrier.wait)
        except UserError as error:
            self.errors.append(str(error))


def test_the_first_rank_of_a_host_builds_before_the_others_look():
    host = Host(4, lambda host, local_rank: host.events.append(local_rank))
    assert host.events[0] == 0 and sorted(host.events) == [0, 1, 2, 3]


def test_a_failed_build_is_an_error_on_every_rank_and_no_hang():
    def build(host, local_rank):
        raise UserError("unreadable")

    assert Host(3, build).errors == ["unreadable"] * 3
