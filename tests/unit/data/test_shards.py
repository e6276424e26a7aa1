"""Ids on disk: made by any number of processes, kept when interrupted, never more than a part of them in memory."""

import os
import signal
import tracemalloc

import pytest
from datasets import Dataset

from harness.data.blocks import make_blocks
from harness.data.files.sources import read_documents
from harness.data.on_disk import shards
from harness.data.on_disk.cache import Preparation
from harness.data.pieces import PieceEncoder
from harness.data.tokenizer import ByteTokenizer
from harness.errors import UserError
from tests.unit.data.test_blocks import corpus

DOCUMENTS = [f"document {index} " * (index % 7) + "." for index in range(60)]
PARENT = os.getpid()


@pytest.fixture
def documents(monkeypatch):
    monkeypatch.setattr(shards, "SHARD_BYTES", 200)
    return corpus(DOCUMENTS, 30)


def made(folder):
    return sorted(path.name for path in folder.glob("prepared/*/*"))


def rows(blocks):
    return [(b["input_ids"].tolist(), b["position_ids"].tolist()) for b in blocks]


def test_processes_make_the_ids_of_one(documents, tmp_path):
    alone, together = (
        make_blocks(documents, ByteTokenizer(), 16, Preparation(tmp_path / str(n), workers=n), packing=True)
        for n in (1, 3)
    )
    assert len(made(tmp_path / "1")) > 10
    assert made(tmp_path / "1") == made(tmp_path / "3") and rows(alone) == rows(together)


@pytest.mark.parametrize("workers", [1, 2])
def test_what_was_made_before_an_error_is_kept(documents, tmp_path, monkeypatch, workers):
    encode = PieceEncoder.__call__

    def stop_late(self, texts, *args):
        if any("document 40 " in text for text in texts):
            raise UserError("stopped")
        return encode(self, texts, *args)

    monkeypatch.setattr(PieceEncoder, "__call__", stop_late)
    with pytest.raises(UserError, match="stopped"):
        make_blocks(documents, ByteTokenizer(), 16, Preparation(tmp_path, workers=workers))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("prepared/*/*/ids")}
    assert len(before) > 5 and not list(tmp_path.glob("prepared/*/*.[0-9]*"))
    monkeypatch.setattr(PieceEncoder, "__call__", encode)
    said = []
    again = make_blocks(
        documents, ByteTokenizer(), 16, Preparation(tmp_path, say=said.append, workers=workers), packing=True
    )
    assert said == [f"tokenising: {len(before)} of {len(made(tmp_path))} shards were made before"]
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    assert rows(again) == rows(
        make_blocks(documents, ByteTokenizer(), 16, Preparation(tmp_path / "new", workers=1), packing=True)
    )


def test_a_worker_that_is_killed_is_an_error_and_no_hang(documents, tmp_path, monkeypatch):
    def die(self, *args):
        assert os.getpid() != PARENT
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(PieceEncoder, "__call__", die)
    with pytest.raises(UserError, match="a process was killed while tokenising"):
        make_blocks(documents, ByteTokenizer(), 16, Preparation(tmp_path, workers=2))


def test_one_large_file_is_never_in_memory(tmp_path):
    size = 12_000_000
    (tmp_path / "a.txt").write_text("a line of a book\n" * (size // 17))
    tracemalloc.start()
    blocks = make_blocks(
        read_documents(tmp_path / "a.txt", tmp_path, workers=1), ByteTokenizer(), 1024, Preparation(tmp_path, workers=1)
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(blocks) == size // 17 * 17 // 1024
    assert peak < size / 2


def test_documents_that_were_selected_are_measured_by_their_own_rows(tmp_path):
    some = Dataset.from_dict({"text": ["a" * 50, "b", "c" * 9]}).select([2, 1])
    blocks = make_blocks(some, ByteTokenizer(), 12, Preparation(tmp_path))
    assert [b["input_ids"].tolist() for b in blocks] == [[99] * 9 + [256, 98, 256]]
