"""Blocks against a plain reading of the contract, their cache, and one builder a host."""

import tempfile
import threading
import time
from contextlib import contextmanager

import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore
from transformers import ByT5Tokenizer

from harness.data.blocks import make_blocks
from harness.data.files.documents import read_documents
from harness.data.on_disk import shards
from harness.data.on_disk.cache import Preparation, once_per_host
from harness.data.piece_encoder import PieceEncoder
from harness.data.tokenizer import ByteTokenizer, load_tokenizer
from harness.errors import UserError
from harness.topology.env import LaunchEnv
from tests.unit.data.conftest import TEXTS


def reference(texts, block_size):
    """The contract in three lines: close each document, join all, cut, drop the rest."""
    ids = [i for text in texts for i in [*text.encode(), 256]]
    return [ids[k : k + block_size] for k in range(0, len(ids) - block_size + 1, block_size)]


def rows(blocks):
    return [row["input_ids"].tolist() for row in blocks]


def corpus(documents, in_pieces_of):
    """Documents as the reader gives them, cut into rows of so many characters."""
    rows = [
        {"text": text[start : start + in_pieces_of], "part": part}
        for text in documents
        for part, start in enumerate(range(0, max(len(text), 1), in_pieces_of))
    ]
    return Dataset.from_list(rows)


@contextmanager
def small_shards(size):
    """Shards of so many bytes of text, encoded two rows or so at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "SHARD_BYTES", size)
        patch.setattr(shards, "_BYTES_AT_ONCE", 5)
        yield


@settings(max_examples=30, deadline=None)
@given(
    documents=st.lists(st.text("aé🙂\n ", max_size=20), min_size=1, max_size=12),
    size=st.integers(2, 9),
    piece=st.integers(1, 9),
)
def test_blocks_are_those_of_the_contract_however_documents_are_cut(documents, size, piece):
    wanted = reference(documents, size)
    if not wanted:
        return
    with tempfile.TemporaryDirectory() as folder, small_shards(7):
        blocks = make_blocks(
            corpus(documents, piece), ByteTokenizer(), size, Preparation(folder, workers=1), packing=True
        )
        assert rows(blocks) == wanted
        for row, positions in ((b["input_ids"].tolist(), b["position_ids"].tolist()) for b in blocks):
            counted = [0]
            for before in row[:-1]:
                counted.append(0 if before == 256 else counted[-1] + 1)  # a document ends with 256, and only there
            assert positions == counted


def test_packed_blocks_are_kept_apart_from_the_others(tmp_path):
    documents = Dataset.from_dict({"text": TEXTS})
    plain, packed = (
        make_blocks(documents, ByteTokenizer(), 16, Preparation(tmp_path), packing=p) for p in (False, True)
    )
    assert rows(plain) == rows(packed) and set(plain[0]) == {"input_ids"}
    assert set(packed[0]) == {"input_ids", "position_ids"} and packed[0]["position_ids"].dtype == torch.int64


def whole_ids(tokenizer, texts):
    return [i for text in texts for i in (*tokenizer(text)["input_ids"], tokenizer.eos_token_id)]


def test_a_trained_tokenizer_is_joined_alike(trained_tokenizer, tmp_path):
    tokenizer = load_tokenizer(str(trained_tokenizer))
    ids = whole_ids(tokenizer, TEXTS)
    blocks = make_blocks(Dataset.from_dict({"text": TEXTS}), tokenizer, 8, Preparation(tmp_path))
    assert rows(blocks) == [ids[k : k + 8] for k in range(0, len(ids) - 7, 8)]


def test_a_second_call_reads_the_cache_even_after_the_tokenizer_was_used(trained_tokenizer, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("the quick brown fox " * 50)
    documents = read_documents(tmp_path / "a.txt", tmp_path)
    first = make_blocks(documents, load_tokenizer(str(trained_tokenizer)), 8, Preparation(tmp_path))
    tokenizer = load_tokenizer(str(trained_tokenizer))
    tokenizer(["a b", "c"], padding=False, truncation=True, max_length=1)  # leaves its mark on the tokenizer

    def never(*_):
        raise AssertionError("mapped again")

    monkeypatch.setattr(PieceEncoder, "__call__", never)
    again = make_blocks(read_documents(tmp_path / "a.txt", tmp_path), tokenizer, 8, Preparation(tmp_path))
    assert rows(again) == rows(first)
    assert (
        rows(make_blocks(documents, tokenizer, 9, Preparation(tmp_path)))[0][:8] == rows(first)[0]
    )  # cut out of the same ids
    with pytest.raises(AssertionError, match="mapped again"):
        make_blocks(documents, ByteTokenizer(), 8, Preparation(tmp_path))


def test_a_tokenizer_written_in_python_is_known_by_its_files(tmp_path):
    documents = Dataset.from_dict({"text": TEXTS})
    blocks = [make_blocks(documents, ByT5Tokenizer(extra_ids=n), 8, Preparation(tmp_path)) for n in (125, 125, 3)]
    assert rows(blocks[0]) == rows(blocks[2])
    assert len(list((tmp_path / "prepared").iterdir())) == 2


def test_too_little_text_is_told_with_the_numbers(tmp_path):
    documents = Dataset.from_dict({"text": ["abc", "de"]})
    assert rows(make_blocks(documents, ByteTokenizer(), 7, Preparation(tmp_path))) == [[97, 98, 99, 256, 100, 101, 256]]
    for _ in range(2):  # the second time the empty result comes from the cache
        with pytest.raises(UserError, match="7 tokens, less than one block of 8"):
            make_blocks(documents, ByteTokenizer(), 8, Preparation(tmp_path))
    with pytest.raises(UserError, match="--block_size 1"):
        make_blocks(documents, ByteTokenizer(), 1, Preparation(tmp_path))


class Ranks:
    """The ranks of hosts of two as threads, with a store: all call `once_per_host` with one build."""

    def __init__(self, size, build):
        self.events, self.errors, self.build, self.store = [], [], build, HashStore()
        ranks = [threading.Thread(target=self.run, args=(rank, size)) for rank in range(size)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(timeout=20)
            assert not rank.is_alive()

    def run(self, rank, size):
        env = LaunchEnv(rank=rank, world_size=size, local_rank=rank % 2, local_world_size=2)
        try:
            once_per_host(
                lambda: self.build(self, rank), env=env, store=self.store, host=f"host {rank // 2}", poll_s=0.01
            )
            self.events.append("all have it")
        except UserError as error:
            self.errors.append(str(error))


def test_rank_0_builds_for_its_host_and_all_wait_for_the_slowest_host():
    def build(ranks, rank):
        if rank >= 2:
            time.sleep(0.3)
        ranks.events.append(rank)

    events = Ranks(4, build).events
    assert sorted(events[:4]) == [0, 1, 2, 3] and events[4:] == ["all have it"] * 4
    assert events.index(0) < events.index(1)


def test_a_failed_build_is_the_same_error_on_every_rank_and_no_hang():
    def build(ranks, rank):
        if rank == 2:
            raise UserError("unreadable")

    assert Ranks(4, build).errors == ["unreadable"] * 4
