"""Tensors in files: every slice of every kind is right, and a file that cannot be trusted is refused in one line."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from harness.config.model.files import has_weights
from harness.errors import UserError
from harness.hf.weights import tensor_files
from harness.hf.weights.tensor_files import open_tensors

TENSORS = {
    "cube": torch.randn(7, 9, 11),
    "narrow": torch.randn(13, 5).bfloat16(),
    "scalar": torch.tensor(3.5),
    "whole numbers": torch.arange(10),
    "empty": torch.empty(0, 3),
    "switches": torch.arange(40) % 3 == 0,
}


def read(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(tensor.shape, dtype=dtype or tensor.dtype).copy_(tensor)


@pytest.mark.parametrize(("block", "gap"), [(4 << 20, 4 << 10), (64, 16), (100, 40), (8, 4), (1000, 0)])
def test_any_slice_is_read_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, gap: int) -> None:
    monkeypatch.setattr(tensor_files, "BLOCK_BYTES", block)
    monkeypatch.setattr(tensor_files, "GAP_BYTES", gap)
    save_file(TENSORS, tmp_path / "model.safetensors")
    stored = open_tensors(tmp_path).tensors
    assert stored.keys() == TENSORS.keys()
    choose = random.Random(0)
    for name, tensor in TENSORS.items():
        assert torch.equal(read(stored[name]), tensor), name
        for _ in range(20):
            ends = [sorted((choose.randint(0, size), choose.randint(0, size))) for size in tensor.shape]
            index = tuple(slice(*pair) for pair in ends)
            assert torch.equal(read(stored[name][index]), tensor[index]), (name, index)
            assert torch.equal(read(stored[name][index], torch.float64), tensor[index].double())
            if tensor.dim() == 3:
                assert torch.equal(read(stored[name][index].permute(2, 0, 1)), tensor[index].permute(2, 0, 1))


def reads() -> tuple[int, int]:
    """How often this process has read from files, and how many bytes."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["syscr"]), int(counts["rchar"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_columns_are_read_in_few_large_pieces_and_no_others_with_them(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.randn(1000, 10_000)
    save_file({"a": tensor}, tmp_path / "model.safetensors")
    stored = open_tensors(tmp_path).tensors["a"]
    into = torch.empty(1000, 2500, dtype=dtype)
    before = reads()
    into.copy_(stored[:, 2500:5000])
    calls, count = (after - start for after, start in zip(reads(), before, strict=True))
    assert calls < 20 and count < 1.1 * 4 * into.numel()
    assert torch.equal(into, tensor[:, 2500:5000].to(dtype))


def test_one_rank_of_64_reads_its_columns_of_as_many_rows_as_a_405b_model_has_in_large_pieces(tmp_path: Path) -> None:
    shape = (32_768, 8192)
    entry = {"dtype": "BF16", "shape": shape, "data_offsets": [0, 2 * shape[0] * shape[1]]}
    path = tmp_path / "model.safetensors"
    path.write_bytes(header({"a": entry}, b""))
    first = path.stat().st_size
    os.truncate(path, first + 2 * shape[0] * shape[1])  # zeros, which take no room on the disk
    last = torch.arange(128, dtype=torch.bfloat16)
    with path.open("r+b") as file:
        file.seek(-256, os.SEEK_END)
        file.write(last.view(torch.uint8).numpy().tobytes())
    stored = open_tensors(tmp_path).tensors["a"]
    before = reads()
    columns = read(stored[:, -128 + 8192 :])
    calls, count = (after - start for after, start in zip(reads(), before, strict=True))
    assert calls < 200 and count < 1.1 * 2 * columns.numel()
    assert torch.equal(columns[-1], last) and not columns[:-1].any()


@pytest.mark.parametrize("columns", [slice(0, 10_000), slice(0, 2500), slice(0, 9990)])
def test_a_file_that_was_cut_off_since_is_an_error_and_no_crash(tmp_path: Path, columns: slice) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.randn(100, 10_000)}, path)
    stored = open_tensors(tmp_path).tensors["a"]
    os.truncate(path, 2_000_000)
    with pytest.raises(UserError, match=r"model\.safetensors: ends too early"):
        read(stored[:, columns])


def test_a_file_is_opened_once_and_closed_in_the_end(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")

    def opened() -> int:
        links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        return sum(str(link.readlink()).startswith(str(tmp_path)) for link in links)

    stored = open_tensors(tmp_path)
    for tensor in stored.tensors.values():
        read(tensor)
    assert opened() == 1
    del stored, tensor
    assert opened() == 0


def test_a_pickled_checkpoint_is_read(tmp_path: Path) -> None:
    shards = {"pytorch_model-1.bin": ["cube", "narrow"], "pytorch_model-2.bin": ["scalar"]}
    for file, names in shards.items():
        torch.save({name: TENSORS[name] for name in names}, tmp_path / file)
    index = {"weight_map": {name: file for file, names in shards.items() for name in names}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    stored = open_tensors(tmp_path)
    assert stored.files == shards
    assert torch.equal(read(stored.tensors["cube"][2:4, :, 5:]), TENSORS["cube"][2:4, :, 5:])
    assert torch.equal(read(stored.tensors["narrow"]), TENSORS["narrow"])


def test_a_checkpoint_from_before_torch_1_6_is_read(tmp_path: Path) -> None:
    torch.save(TENSORS, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert torch.equal(read(open_tensors(tmp_path).tensors["cube"][2:4, :, 5:]), TENSORS["cube"][2:4, :, 5:])


class Surprise:
    """What must not be made by reading a file."""


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ({"a": Surprise()}, "contains more than tensors"),
        ([torch.ones(2)], "is not a mapping from names to tensors"),
        ({"a": torch.ones(2), "step": 3}, "is not a mapping from names to tensors"),
        (b"not a file of torch", "is not a file saved by torch"),
        (b"version https://git-lfs.github.com/spec/v1", "is a Git LFS pointer"),
    ],
)
def test_a_pickle_that_is_more_than_tensors_is_refused(tmp_path: Path, content: Any, wanted: str) -> None:
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises(UserError, match=wanted) as told:
        open_tensors(tmp_path)
    assert "\n" not in str(told.value)


def header(entries: Any, data: bytes) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (b"abc", "ends before byte 8"),
        (b"\xff" * 20, "its header claims"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\n", "is a Git LFS pointer"),
        (header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"1234"), "is the file truncated"),
        (header({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, b"12345678"), "does not match"),
        (header({"a": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}, b"12"), "dtype F4"),
        (header({"a": {"shape": [4]}}, b"12"), "entry of a lacks a valid dtype"),
        (header({"a": 5}, b"12"), "entry of a lacks a valid dtype"),
        (header({"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}, b"1234"), "lacks a valid"),
        (header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}, b"1234"), "lacks a valid"),
        (header({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}, b"1234"), "lacks a valid"),
        (header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}, b"1234"), "lacks a valid"),
        (header({"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, b"1234"), "lacks a valid"),
        (header({"a": {"dtype": "F32", "shape": 1, "data_offsets": "04"}}, b"1234"), "lacks a valid"),
        (header({name: {"dtype": "I8", "shape": [4], "data_offsets": [0, 4]} for name in "ab"}, b"1234"), "overlap"),
        (header({"a": {"dtype": "I8", "shape": [4], "data_offsets": [0, 4]}}, b"12345"), "bytes of the file out"),
        (header({"a": {"dtype": "I8", "shape": [2], "data_offsets": [2, 4]}}, b"1234"), "bytes of the file out"),
        (header({name: {"dtype": "I8", "shape": [2], "data_offsets": [1, 3]} for name in "ab"}, b"1234"), "overlap"),
        (header(7, b"12"), "header is not a JSON object"),
        (header("text", b"12"), "header is not a JSON object"),
        (header(None, b"12"), "header is not a JSON object"),
        (header([["a", 1]], b"12"), "header is not a JSON object"),
        (header({"\x1b[31mred\r\n": 5}, b"12"), r"entry of \\x1b\[31mred\\r\\n lacks"),
        (b"\x04" + bytes(7) + b"\xff\xfe{}", "cannot be read"),
        (b"\x64" + bytes(7) + b"[" * 100, "cannot be read"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes, wanted: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=wanted) as told:
        open_tensors(tmp_path)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("index", "wanted"),
    [
        ("{", "cannot be read"),
        ("{}", "cannot be read"),
        ('{"weight_map": {}}', "must list files"),
        ('{"weight_map": {"a": "../a.safetensors"}}', "must list files of its own directory"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "gone.safetensors: its tensors cannot be read"),
    ],
)
def test_a_bad_index_is_refused(tmp_path: Path, index: str, wanted: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert has_weights(tmp_path)  # else a new model would take their place
    with pytest.raises(UserError, match=wanted):
        open_tensors(tmp_path)


def test_a_header_longer_than_the_format_allows_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write((200_000_000).to_bytes(8, "little"))
        file.truncate(300_000_000)  # without taking room on the disk
    with pytest.raises(UserError, match=r"header claims 200,000,000 bytes"):
        open_tensors(tmp_path)


def test_a_header_nested_too_deep_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((200_000).to_bytes(8, "little") + b"[" * 200_000)
    with pytest.raises(UserError, match="cannot be read"):
        open_tensors(tmp_path)
