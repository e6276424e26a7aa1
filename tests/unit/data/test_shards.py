"""Ids on disk: made by any number of processes, kept when interrupted, never more than a part of them in memory."""

import json
import os
import shutil
import signal
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
from datasets import Dataset

from harness.data.blocks import make_blocks
from harness.data.files.documents import read_documents
from harness.data.on_disk import shards
from harness.data.on_disk.cache import Preparation
from harness.data.on_disk.shards import NOTE, make_shards
from harness.data.piece_encoder import PieceEncoder
from harness.data.samples import make_samples
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


def cut(file):
    os.truncate(file, file.stat().st_size // 2)


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def empty(file):
    file.write_bytes(b"")


CHATS = [json.dumps({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a" * n}]})
         for n in range(1, 40)]  # fmt: skip


@pytest.mark.parametrize(
    "damage", [flip, os.remove, *(pytest.param(way, marks=pytest.mark.thorough) for way in (cut, empty))]
)
def test_prepared_data_that_was_damaged_is_made_again(tmp_path, monkeypatch, damage):
    monkeypatch.setattr(shards, "SHARD_BYTES", 200)
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    (tmp_path / "chat.jsonl").write_text("".join(f"{row}\n" for row in CHATS))

    def prepared():
        how = Preparation(tmp_path, workers=1)
        texts, chats = (read_documents(tmp_path / f"{name}.jsonl", tmp_path, workers=1) for name in ("text", "chat"))
        blocks = make_blocks(texts, ByteTokenizer(), 16, how, packing=True)
        samples = make_samples(chats, ByteTokenizer(), 64, how, packing=True)
        return rows(blocks), [{name: values.tolist() for name, values in sample.items()} for sample in samples]

    wanted = prepared()
    files = sorted(file for file in tmp_path.glob("prepared/**/*") if file.is_file() and file.stat().st_size)
    kinds = {file.name: file for file in files}
    assert {"ids", "starts", "answers", "ends", "lost", "indices", "rows.arrow", "shards.json"} < kinds.keys()
    for file in kinds.values():  # one at a time
        before = file.read_bytes()
        damage(file)
        assert prepared() == wanted
        assert file.name == NOTE or file.read_bytes() == before
    assert not list(tmp_path.glob("prepared/**/*.????????????????"))
    for file in kinds.values():  # all at once
        damage(file)
    assert prepared() == wanted


def test_a_copy_of_prepared_data_is_read_once_and_used(documents, tmp_path, monkeypatch):
    wanted = rows(make_blocks(documents, ByteTokenizer(), 16, Preparation(tmp_path / "a", workers=1), packing=True))
    shutil.copytree(tmp_path / "a", tmp_path / "b", copy_function=shutil.copyfile)
    read, digest = [], shards.digest_of
    monkeypatch.setattr(shards, "digest_of", lambda file: read.append(file) or digest(file))
    monkeypatch.setattr(PieceEncoder, "__call__", None)
    for _ in range(2):
        again = make_blocks(documents, ByteTokenizer(), 16, Preparation(tmp_path / "b", workers=1), packing=True)
        assert rows(again) == wanted
    assert len(read) == len(set(read)) == 2 * len(made(tmp_path / "b"))


def test_processes_of_one_number_that_share_a_cache_make_one_shard(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 1)  # as in two containers
    together = Barrier(4)

    def make(number):
        def write(folder, part):
            together.wait(20)
            for start in range(0, 10_000, 1000):
                with (folder / "ids").open("ab") as file:
                    np.arange(start, start + 1000).tofile(file)
            together.wait(20)

        (folder,) = make_shards(tmp_path / "data", [None], write, doing="making", workers=1)
        return np.fromfile(folder / "ids", np.int64).tolist()

    with ThreadPoolExecutor(4) as pool:
        assert all(found == list(range(10_000)) for found in pool.map(make, range(4)))
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["00000-of-00001"]


def test_a_shard_that_another_process_has_named_meanwhile_stays_where_it_is(tmp_path, monkeypatch):
    def make():
        return make_shards(tmp_path, [None], lambda folder, _: (folder / "ids").write_bytes(b"x"), doing="making")

    (folder,) = make()
    named, whole = (folder / "ids").stat().st_ino, shards.is_whole
    answers = iter([False, False])  # before it is made, and before the name is taken: then the other was first
    monkeypatch.setattr(shards, "is_whole", lambda path: next(answers, None) is None and whole(path))
    make()
    assert (folder / "ids").stat().st_ino == named
    (folder / "ids").write_bytes(b"cut")
    make()
    assert (folder / "ids").read_bytes() == b"x" and list(tmp_path.iterdir()) == [folder]


def test_a_shard_without_a_name_is_on_disk_before_it_gets_one(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync

    def note(descriptor):
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    make_shards(tmp_path, [None], lambda folder, _: (folder / "ids").write_bytes(b"x"), doing="making", workers=1)
    names = [path.replace(str(tmp_path), "").split("/")[1:] for path in synced]
    assert [each[-1].split(".")[0] for each in names[:3]] == ["ids", "whole", "00000-of-00001"]
    assert names[3:] == [[]]


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_no_file_stays_open_however_many_shards_there_are(documents, tmp_path):
    before = open_files()
    blocks = make_blocks(documents, ByteTokenizer(), 16, Preparation(tmp_path, workers=1), packing=True)
    assert len(blocks.ids._ids) > 10 and open_files() == before
    copied = read_documents("python-stdlib", tmp_path, workers=1)
    assert len(copied) > 100 and open_files() == before
