"""Conversations on disk: made by any number of processes, kept when interrupted, nothing in memory for each of them."""

import json
import tracemalloc

import numpy as np
import pytest
from datasets import Dataset

from harness.data.chat import ConversationEncoder
from harness.data.on_disk import shards
from harness.data.on_disk.cache import Preparation
from harness.data.packing import best_fit_decreasing
from harness.data.samples import make_samples
from harness.data.tokenizer import ByteTokenizer
from harness.errors import UserError


def conversation(index):
    turns = [{"role": "user", "content": f"question {index}"}, {"role": "assistant", "content": "a" * (index % 37 + 1)}]
    return {"conversation": json.dumps({"messages": turns, "answers_from": 0}), "place": f"chats:{index}"}


@pytest.fixture
def documents(monkeypatch):
    monkeypatch.setattr(shards, "SHARD_BYTES", 500)
    monkeypatch.setattr(shards, "_BYTES_AT_ONCE", 200)
    return Dataset.from_list([conversation(index) for index in range(60)])


def rows(samples):
    return [{name: tensor.tolist() for name, tensor in sample.items()} for sample in samples]


def refuse(monkeypatch, *places):
    encode = ConversationEncoder.__call__

    def refused(self, text, place):
        if place in places:
            raise UserError(f"{place}: refused")
        return encode(self, text, place)

    monkeypatch.setattr(ConversationEncoder, "__call__", refused)


def test_processes_make_the_samples_of_one(documents, tmp_path):
    alone, together = (
        make_samples(documents, ByteTokenizer(), 128, Preparation(tmp_path / str(n), workers=n), packing=True)
        for n in (1, 3)
    )
    assert len(list(tmp_path.glob("3/prepared/*/*/ids"))) > 10
    assert rows(alone) == rows(together) and alone.summary == together.summary
    assert len(make_samples(documents, ByteTokenizer(), 128, Preparation(tmp_path / "1"))) == 60


@pytest.mark.parametrize("workers", [1, 2])
def test_what_was_encoded_before_an_error_is_kept(documents, tmp_path, workers):
    with pytest.MonkeyPatch.context() as patch:
        refuse(patch, "chats:40", "chats:57")
        with pytest.raises(UserError, match="chats:40: refused"):
            make_samples(documents, ByteTokenizer(), 128, Preparation(tmp_path, workers=workers))
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("prepared/*/*/ids")}
    assert len(kept) > 5
    said = []
    again = make_samples(
        documents, ByteTokenizer(), 128, Preparation(tmp_path, say=said.append, workers=workers), packing=True
    )
    assert said and said[0].startswith(f"encoding conversations: {len(kept)} of ")
    assert all(path.stat().st_mtime_ns == time for path, time in kept.items())
    assert rows(again) == rows(
        make_samples(documents, ByteTokenizer(), 128, Preparation(tmp_path / "new", workers=1), packing=True)
    )


def test_which_conversations_are_packed_together_is_found_out_once_and_mapped(documents, tmp_path, monkeypatch):
    first = make_samples(documents, ByteTokenizer(), 128, Preparation(tmp_path), packing=True)
    monkeypatch.setattr("harness.data.samples.best_fit_decreasing", None)
    again = make_samples(documents, ByteTokenizer(), 128, Preparation(tmp_path), packing=True)
    assert not again.bins.indices.flags.writeable and rows(again) == rows(first)


def test_packing_takes_little_memory_for_a_sample():
    count = 200_000
    lengths = np.minimum(np.random.default_rng(0).lognormal(5.5, 1.0, count), 2047).astype(np.int32) + 1
    tracemalloc.start()
    bins = best_fit_decreasing(lengths, 2048)
    kept, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 16 * count and most < 48 * count
    assert len(bins) < 1.001 * lengths.sum() / 2048 + 1
