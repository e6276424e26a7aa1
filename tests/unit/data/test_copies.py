"""Sources are copied in parts: however they are cut, the documents are the same, and parts that are done are kept."""

import json
import os
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, load_from_disk

from harness.data.files.documents import as_documents, read_documents
from harness.data.formats import jsonl_format, txt_format
from harness.data.on_disk import shards
from harness.data.rows import pieces
from harness.errors import UserError

PIECE = 64


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A directory of files of all kinds, long and empty, of characters of every width; pieces are small."""
    for module in (pieces, txt_format):
        monkeypatch.setattr(module, "PIECE_CHARACTERS", PIECE)
    choose = random.Random(0)
    folder = tmp_path / "source"
    folder.mkdir()
    texts = ["".join(choose.choice("aé日🙂\n ") for _ in range(choose.choice([0, 3, 40, 400]))) for _ in range(60)]
    for index, text in enumerate(texts[:20]):
        (folder / f"{index:02d}.txt").write_bytes(text.encode())
    blank = ["\n" * choose.choice([1, 1, 2]) for _ in texts[20:40]]
    lines = [
        json.dumps({"text": text}, ensure_ascii=False) + end for text, end in zip(texts[20:40], blank, strict=True)
    ]
    (folder / "20.jsonl").write_text("".join(lines))
    pq.write_table(pa.table({"text": texts[40:]}), folder / "40.parquet", row_group_size=3)
    return folder, texts


def small_shards(monkeypatch, size):
    monkeypatch.setattr(shards, "SHARD_BYTES", size)


def joined(documents):
    parts = np.flatnonzero(np.asarray(documents["part"]) == 0).tolist()
    return ["".join(documents[a:b]["text"]) for a, b in zip(parts, [*parts[1:], len(documents)], strict=True)]


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_documents_are_the_same_however_files_are_cut(source, tmp_path, monkeypatch, size):
    folder, texts = source
    whole = read_documents(folder, tmp_path / "whole", workers=1)
    assert joined(whole) == texts
    small_shards(monkeypatch, size)
    monkeypatch.setattr(shards, "MOST_SHARDS", 200)
    cut = read_documents(folder, tmp_path / "cut", workers=1)
    assert len(list(tmp_path.glob("cut/prepared/*/*/rows.arrow"))) > 10
    assert cut[:] == whole[:] and cut._fingerprint == whole._fingerprint


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_names_the_line_and_what_was_copied_is_kept(tmp_path, monkeypatch, workers):
    small_shards(monkeypatch, 100)
    file, cache = tmp_path / "a.jsonl", tmp_path / "cache"
    good = [json.dumps({"text": f"text {index}"}) + "\n" for index in range(100)]
    file.write_text("".join([*good[:70], "{broken]\n", *good[71:90], "also broken\n", *good[91:]]))
    with pytest.raises(UserError, match=r"a\.jsonl:71 is not JSON"):
        read_documents(file, cache, workers=workers)
    kept = {path: path.stat().st_mtime_ns for path in cache.glob("prepared/*/*/rows.arrow")}
    assert len(kept) > 10
    for _ in range(2):  # of the same file everything that is not broken is there already
        said = []
        with pytest.raises(UserError, match=r"a\.jsonl:71 is not JSON"):
            read_documents(file, cache, say=said.append, workers=workers)
        assert said[0].startswith("reading: ") and all(path.stat().st_mtime_ns == time for path, time in kept.items())


def test_a_copy_that_was_interrupted_goes_on_where_it_was(tmp_path, monkeypatch):
    small_shards(monkeypatch, 100)
    file, cache = tmp_path / "a.jsonl", tmp_path / "cache"
    file.write_text("".join(json.dumps({"text": f"text {index}"}) + "\n" for index in range(100)))
    read, seen = jsonl_format._of_line, []

    def stop_at(limit):
        def object_of_line(line, place):
            if len(seen) == limit:
                raise KeyboardInterrupt
            seen.append(place)
            return read(line, place)

        monkeypatch.setattr(jsonl_format, "_of_line", object_of_line)

    stop_at(60)
    with pytest.raises(KeyboardInterrupt):
        read_documents(file, cache, workers=1)
    stop_at(None)
    assert read_documents(file, cache, workers=1)["text"][:] == [f"text {index}" for index in range(100)]
    assert len(seen) < 100 + 60 / 4  # not read again from the beginning


def test_a_data_set_whose_file_was_replaced_is_not_the_old_one(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    file, found = tmp_path / "rows.arrow", []
    for text in ("old", "new"):
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, pa.schema({"text": pa.string()})) as writer:
            writer.write_table(pa.table({"text": [text]}))
        os.utime(file, ns=(1, 1))
        found.append(as_documents(Dataset.from_file(str(file)), "train_dataset")["text"][:])
    assert found == [["old"], ["new"]]


def test_a_data_set_on_disk_is_copied_in_parts_too(tmp_path, monkeypatch):
    small_shards(monkeypatch, 200)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [{"text": f"text {index} " * (index % 5)} for index in range(100)]
    Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    saved = load_from_disk(tmp_path / "saved").select(range(99, -1, -1))
    documents = as_documents(saved, "train_dataset")
    assert len(list(tmp_path.glob("cache/prepared/*/*/rows.arrow"))) > 3
    assert documents["text"][:] == [row["text"] for row in reversed(rows)]
    assert as_documents(saved, "train_dataset")._fingerprint == documents._fingerprint
    shouted = saved.with_transform(lambda batch: {"text": [text.upper() for text in batch["text"]]})
    assert as_documents(shouted, "train_dataset")["text"][:] == [row["text"].upper() for row in reversed(rows)]
    bad = Dataset.from_list([*rows, {"text": None}])
    bad.save_to_disk(tmp_path / "bad")
    with pytest.raises(UserError, match=r"train_dataset\[100\]: `text` is missing"):
        as_documents(load_from_disk(tmp_path / "bad"), "train_dataset")
