"""Reading documents: what comes out, in which order, and every way in which it cannot."""

import itertools
import json
import os
import subprocess
import sys
import sysconfig
import tracemalloc
from fractions import Fraction
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from harness.data.blocks import make_blocks
from harness.data.files.documents import hold_out, read_documents
from harness.data.files.sources import find_files, preflight
from harness.data.formats import FORMATS
from harness.data.on_disk.cache import Preparation
from harness.data.rows.pieces import PIECE_CHARACTERS, parts_of
from harness.data.tokenizer import ByteTokenizer
from harness.errors import UserError


@pytest.fixture
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def texts(source, cache):
    return list(read_documents(source, cache)["text"])


def test_a_txt_file_is_one_document_with_its_exact_bytes(tmp_path, cache):
    raw = "\ufeffno newline at the end\r\n\x00\x85\u2028日本語 🙂".encode()
    (tmp_path / "a.txt").write_bytes(raw)
    (text,) = texts(tmp_path / "a.txt", cache)
    assert text.encode() == raw


def test_a_long_document_comes_in_rows_and_is_held_out_as_one(tmp_path, cache):
    long = "日本語 🙂\n" * (PIECE_CHARACTERS // 10) + "end"
    (tmp_path / "a.txt").write_text(long)
    (tmp_path / "b.txt").write_text("short")
    (tmp_path / "c.jsonl").write_text(json.dumps({"text": long}) + "\n")
    pq.write_table(pa.table({"text": [long]}), tmp_path / "d.parquet")
    documents = read_documents(tmp_path, cache)
    assert max(map(len, documents["text"])) <= PIECE_CHARACTERS
    starts = np.flatnonzero(parts_of(documents) == 0).tolist()
    joined = ["".join(documents[a:b]["text"]) for a, b in itertools.pairwise([*starts, len(documents)])]
    assert joined == [long, "short", long, long]
    training, held_out = hold_out(documents, Fraction(1, 2))
    assert "".join(held_out["text"]) == long + long and "".join(training["text"]) == "short" + long


def test_a_byte_that_is_not_utf_8_is_found_in_a_long_file(tmp_path, cache):
    (tmp_path / "a.txt").write_bytes("é".encode() * 50_001 + b"\xff" + b"x" * 100_000)
    with pytest.raises(UserError, match=r"a\.txt is not UTF-8 \(byte 100002 is 0xff\)"):
        read_documents(tmp_path / "a.txt", cache)


def test_rows_of_jsonl_and_parquet_are_documents(tmp_path, cache):
    rows = ["one", "", "drei\nvier 日本"]
    lines = [json.dumps({"text": row, "id": i}) for i, row in enumerate(rows)]
    (tmp_path / "a.jsonl").write_text("\n\n".join(lines))  # blank lines, and no newline at the end
    pq.write_table(pa.table({"id": [1, 2, 3], "text": rows}), tmp_path / "a.parquet")
    assert texts(tmp_path / "a.jsonl", cache) == rows
    assert texts(tmp_path / "a.parquet", cache) == rows


def test_a_directory_is_read_to_the_bottom_sorted_by_path(tmp_path, cache):
    for name in ["b.txt", "a/z.txt", "a/b/c.txt", "a.txt", ".hidden.txt", ".git/x.txt", "readme.md"]:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "c.jsonl").write_text('{"text": "row"}\n')
    assert texts(tmp_path, cache) == ["a/b/c.txt", "a/z.txt", "a.txt", "b.txt", "row"]


def test_links_are_followed_and_circles_are_not(tmp_path, cache):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.txt").write_text("a")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "shard").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data" / "again").symlink_to(tmp_path / "data")
    assert texts(tmp_path / "data", cache) == ["a"]


def test_a_cache_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "a.txt").write_text("text " * 20)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot keep prepared data in .*/file .*HF_DATASETS_CACHE"):
        read_documents(tmp_path / "a.txt", tmp_path / "file")
    documents = read_documents(tmp_path / "a.txt", tmp_path / "cache")
    with pytest.raises(UserError, match=r"cannot keep prepared data in .*/file .*HF_DATASETS_CACHE"):
        make_blocks(documents, ByteTokenizer(), 8, Preparation(tmp_path / "file"))


def test_the_standard_library_is_its_sources_without_tests(cache):
    top = Path(sysconfig.get_path("stdlib"))
    documents = read_documents("python-stdlib", cache)
    names = [file.relative_to(top).parts for file in find_files("python-stdlib")]
    starts = np.flatnonzero(parts_of(documents) == 0)  # longer files come in several rows
    assert names == sorted(names) and len(starts) == len(names) < len(documents)
    assert ("json", "decoder.py") in names and not any("test" in parts or "tests" in parts for parts in names)
    assert documents[int(starts[names.index(("this.py",))])]["text"] == (top / "this.py").read_bytes().decode()


def test_a_changed_file_is_read_again(tmp_path, cache):
    file = tmp_path / "a.txt"
    file.write_text("old")
    first = read_documents(file, cache)
    assert read_documents(file, cache)._fingerprint == first._fingerprint
    before = file.stat().st_mtime_ns
    file.write_text("new")
    os.utime(file, ns=(before, before))
    assert texts(file, cache) == ["new"]
    os.utime(file, ns=(2, 2))
    prepared = {path: path.stat().st_ino for path in cache.glob("prepared/*/*/rows.arrow")}
    assert texts(file, cache) == ["new"]  # touched alone: nothing is prepared again
    assert {path: path.stat().st_ino for path in cache.glob("prepared/*/*/rows.arrow")} == prepared


def test_every_twentieth_document_is_held_out(tmp_path, cache):
    lines = "".join(json.dumps({"text": str(i)}) + "\n" for i in range(45))
    (tmp_path / "a.jsonl").write_text(lines)
    training, held_out = hold_out(read_documents(tmp_path / "a.jsonl", cache))
    assert held_out["text"][:] == ["0", "20", "40"]
    assert sorted([*training["text"], *held_out["text"]], key=int) == [str(i) for i in range(45)]
    with pytest.raises(UserError, match="1 document cannot be split"):
        hold_out(held_out.select([0]))


BAD = {
    "missing": ("gone.txt", None, "gone.txt does not exist"),
    "suffix": ("a.xml", b"text\nx\n", r"a\.xml is not one of \.txt, (\.\w+, )*\.jsonl, (\.\w+, )*\.parquet"),
    "empty": ("a.txt", b"", "a.txt is empty"),
    "deep line": ("a.jsonl", b"[" * 100_000, "a.jsonl:1 is nested too deeply"),
    "no line is JSON": ("a.jsonl", b"{text: 1}\n", r"a.jsonl:1 is not JSON \(.*column 2\)"),
    "no column": (
        "a.jsonl",
        b'{"content": "x"}\n',
        r"a.jsonl:1 has no column `text`, `messages`, .* \(it has: content\)",
    ),
    "no object": ("a.jsonl", b'["x"]\n', "a.jsonl:1 is not an object"),
    "no string": ("a.jsonl", b'{"text": 3}\n', "a.jsonl:1: `text` is int, not a string"),
    "null": ("a.jsonl", b'{"text": null}\n', "a.jsonl:1: `text` is missing"),
    "no parquet": ("a.parquet", b"PAR1 not really", "a.parquet is not a parquet file"),
}
LATE = {
    "bad line": ("a.jsonl", b'{"text": "x"}\n\n{"text": "y"\n', "a.jsonl:3 is not JSON"),
    "half a pair": (
        "a.jsonl",
        b'{"text": "x"}\n{"text": "\\ud800"}\n',
        "a.jsonl:2: `text` holds half a surrogate",
    ),
    "bytes of a line": ("a.jsonl", b'{"text": "x"}\n{"text": "\xe9"}\n', "a.jsonl:2 is not UTF-8"),
    "latin-1": ("a.txt", b"caf\xe9", r"a.txt is not UTF-8 \(byte 3 is 0xe9\)"),
}


@pytest.mark.parametrize(("name", "content", "words"), [*BAD.values(), *LATE.values()], ids=[*BAD, *LATE])
def test_what_cannot_be_read_is_one_line_with_its_place(name, content, words, tmp_path, cache):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=words) as caught:
        read_documents(tmp_path / name, cache)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "content", "words"), BAD.values(), ids=BAD)
def test_most_of_it_is_told_before_anything_is_read(name, content, words, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=words):
        preflight(tmp_path / name)


def test_rows_and_columns_of_parquet_are_checked(tmp_path, cache):
    pq.write_table(pa.table({"content": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"no column `text`, .* \(it has: content\)"):
        preflight(tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": ["x", None]}), tmp_path / "b.parquet")
    with pytest.raises(UserError, match=r"b\.parquet, row 2: `text` is missing"):
        read_documents(tmp_path / "b.parquet", cache)


def test_a_directory_without_text_is_told(tmp_path):
    with pytest.raises(UserError, match="contains no file with one of the suffixes"):
        preflight(tmp_path)
    (tmp_path / "a.txt").touch()
    with pytest.raises(UserError, match="is empty"):
        preflight(tmp_path)


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".json", ".csv", ".parquet"])
def test_what_is_no_regular_file_is_refused_and_not_waited_for(suffix, tmp_path):
    os.mkfifo(tmp_path / f"pipe{suffix}")
    (tmp_path / f"device{suffix}").symlink_to("/dev/zero")
    for source in (tmp_path / f"pipe{suffix}", tmp_path / f"device{suffix}", tmp_path):
        with pytest.raises(UserError, match=rf"{suffix} is a pipe, a socket or a device: give a file"):
            preflight(source)


def test_a_compressed_file_is_refused_unless_a_format_reads_it(tmp_path, monkeypatch):
    file = tmp_path / "a.jsonl.gz"
    file.touch()
    with pytest.raises(UserError, match="is compressed: unpack it first"):
        find_files(file)
    monkeypatch.setattr("harness.data.files.sources.FORMATS", {**FORMATS, ".gz": FORMATS[".jsonl"]})
    assert find_files(file) == find_files(tmp_path) == [file]


def test_a_file_is_opened_once_however_often_it_is_asked_for(tmp_path, cache, monkeypatch):
    for name, content in (("a.jsonl", '{"text": "x"}\n'), ("b.txt", "y"), ("c.csv", "text\nz\n")):
        (tmp_path / name).write_text(content)
    pq.write_table(pa.table({"text": ["w"]}), tmp_path / "d.parquet")
    read_documents(tmp_path / "*.*", cache)  # as the rank that prepares does
    opened, before, changed = [], Path.open, tmp_path / "b.txt"

    def count(path, *args, **kwargs):
        opened.append(path.name)
        return before(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", count)
    for _ in range(3):
        assert preflight(tmp_path / "*.*") == "text"
        assert texts(tmp_path / "*.*", cache) == ["x", "y", "z", "w"]
    assert [name for name in opened if name[0] in "abcd" and name[1] == "."] == []
    os.utime(changed, ns=(1, 1))
    assert preflight(tmp_path / "*.*") == "text" and opened.count("b.txt") == 1


def test_of_a_large_array_the_beginning_is_looked_at(tmp_path):
    with (tmp_path / "a.json").open("w") as file:
        file.write("[" + '{"text": "x"}, ' * 2_000_000 + '{"text": "y"}]')
    tracemalloc.start()
    assert preflight(tmp_path / "a.json") == "text"
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000


def test_the_early_checks_load_nothing_heavy(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    code = (
        "import sys; from harness.data.files.sources import preflight; "
        f"preflight('python-stdlib'); preflight({str(tmp_path)!r}); "
        "print(sorted({'torch', 'datasets', 'transformers', 'deepspeed'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
