"""Files of whole tensors: of any dtype, shape and name, in one file or several; a damaged one is one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from harness.checkpoint.tensors import whole_tensors
from harness.checkpoint.tensors.local_shard import LocalShard
from harness.checkpoint.tensors.tensor_writer import NAMES, Entry, file_regions, split_by_size
from harness.checkpoint.tensors.whole_tensors import open_whole_tensors, read_tensors, require_stored, write_tensors
from harness.errors import UserError
from harness.hf.weights.tensor_files import Stored
from harness.topology.groups import Groups

STEM = "model"
DTYPES = sorted(NAMES, key=str)


def held(name: str, values: torch.Tensor, *, owned: bool = True) -> LocalShard:
    return LocalShard(name=name, shape=tuple(values.shape), shard=None, start=0, values=values, owned=owned)


def blank(tensors: list[LocalShard]) -> list[LocalShard]:
    """The same tensors, with nothing in them yet."""
    return [held(each.name, torch.zeros_like(each.values)) for each in tensors]


def opened(folder: Path, wanted: list[str]) -> dict[str, Stored]:
    """What is found in all files of a folder."""
    return open_whole_tensors(folder, STEM, [path.name for path in folder.iterdir()], wanted)


def read(folder: Path, tensors: list[LocalShard]) -> list[torch.Tensor]:
    """What a run that has these tensors reads."""
    stored, into = opened(folder, [each.name for each in tensors]), blank(tensors)
    require_stored(folder, stored, into)
    read_tensors(stored, into)
    return [each.values for each in into]


def some(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    torch.manual_seed(0)
    return (torch.randn(shape) * 50).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (7,), (3, 5), (2, 3, 1, 4)], ids=str)
def test_a_tensor_comes_back_as_it_was(
    dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path, groups: Groups
) -> None:
    tensor = some(dtype, *shape)
    write_tensors(tmp_path, STEM, [held("w", tensor)], groups)
    assert torch.equal(read(tmp_path, [held("w", tensor)])[0], tensor)
    theirs = load_file(tmp_path / "model.safetensors")["w"]  # HuggingFace's reader
    assert theirs.dtype is dtype and torch.equal(theirs, tensor)


@pytest.mark.parametrize(
    "values",
    [
        pytest.param(torch.arange(12.0).view(3, 4).t(), id="transposed"),
        pytest.param(torch.arange(24.0)[::2], id="every other"),
        pytest.param(torch.zeros(1).expand(5, 2), id="one value for all"),
        pytest.param(torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]), id="odd numbers"),
    ],
)
def test_the_way_a_tensor_lies_in_memory_is_nothing_to_a_file(
    values: torch.Tensor, tmp_path: Path, groups: Groups
) -> None:
    write_tensors(tmp_path, STEM, [held("w", values)], groups)
    (found,) = read(tmp_path, [held("w", values.contiguous())])
    assert torch.equal(found.view(torch.int32), values.contiguous().view(torch.int32))


@pytest.mark.parametrize(
    "name",
    ["a/b", "../w", "größe ½", "with space", "\u202e", "a\nb", '"quoted"', "\\", ".", "shape", "層.0", "x" * 300],
    ids=ascii,
)
def test_any_name_is_the_name_of_a_tensor(name: str, tmp_path: Path, groups: Groups) -> None:
    tensors = [held(name, some(torch.float32, 3)), held("other", some(torch.int64, 2))]
    write_tensors(tmp_path, STEM, tensors, groups)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert all(torch.equal(a, b.values) for a, b in zip(read(tmp_path, tensors), tensors, strict=True))


def test_no_tensors_are_an_empty_file(tmp_path: Path, groups: Groups) -> None:
    write_tensors(tmp_path, STEM, [], groups)
    assert read(tmp_path, []) == [] and not list(tmp_path.glob("*.index.json"))


# -- several files -------------------------------------------------------------------------------------------


@pytest.fixture
def several(tmp_path: Path, groups: Groups, monkeypatch: pytest.MonkeyPatch) -> list[LocalShard]:
    """Tensors that were written to three files."""
    monkeypatch.setattr(whole_tensors, "FILE_BYTES", 100)
    tensors = [held(name, some(torch.float32, 5, 4)) for name in ("a", "b", "c")]
    write_tensors(tmp_path, STEM, tensors, groups)
    return tensors


def test_a_large_model_lies_in_several_files_with_an_index(several: list[LocalShard], tmp_path: Path) -> None:
    files = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*files, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == dict(zip("abc", files, strict=True))
    assert index["metadata"]["total_size"] == 240
    assert all(torch.equal(a, b.values) for a, b in zip(read(tmp_path, several), several, strict=True))


def test_adapters_lie_in_one_file_whatever_their_size(
    tmp_path: Path, groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_tensors, "FILE_BYTES", 1)
    write_tensors(tmp_path, STEM, [held(n, some(torch.float32, 9)) for n in "ab"], groups, one_file=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_rank_opens_only_the_files_of_its_tensors_and_those_that_are_listed(
    several: list[LocalShard], tmp_path: Path
) -> None:
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    found = open_whole_tensors(tmp_path, STEM, names, ["b"])
    assert {name: leaf.file.path.name for name, leaf in found.items()} == {"b": names[1]}
    save_file({"b": torch.ones(5, 4)}, tmp_path / "model-00003-of-00009.safetensors")
    save_file({"b": torch.ones(5, 4)}, tmp_path / "model.safetensors")
    found = open_whole_tensors(tmp_path, STEM, names, ["b"])
    assert found["b"].file.path.name == names[1]


@pytest.mark.usefixtures("several")
def test_a_file_that_is_gone_is_missed_by_its_tensors(several: list[LocalShard], tmp_path: Path) -> None:
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(UserError, match="b is not in the checkpoint: resume with the model that was saved"):
        read(tmp_path, several)


def test_the_files_of_another_kind_of_value_are_not_taken_for_these(several: list[LocalShard], tmp_path: Path) -> None:
    for path in list(tmp_path.glob("model-*")):
        path.rename(tmp_path / path.name.replace("model", "model_ema"))
    with pytest.raises(UserError, match="a is not in the checkpoint"):
        read(tmp_path, several)


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 100))
def test_files_hold_all_tensors_in_order_and_no_more_than_they_may(sizes: list[int], most: int) -> None:
    entries = [Entry(name=str(n), shape=(size,), dtype=torch.uint8, trained=True) for n, size in enumerate(sizes)]
    files = split_by_size(entries, most)
    assert [entry for file in files for entry in file] == entries
    assert all(file and (len(file) == 1 or sum(entry.nbytes for entry in file) <= most) for file in files)
    for first, second in pairwise(files):  # no two could have been one
        assert sum(entry.nbytes for entry in first) + second[0].nbytes > most


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3)), max_size=9))
def test_each_tensor_begins_where_its_dtype_may_and_none_overlap(tensors: list[tuple[torch.dtype, list[int]]]) -> None:
    entries = [Entry(name=str(n), shape=tuple(s), dtype=d, trained=False) for n, (d, s) in enumerate(tensors)]
    header, regions = file_regions(Path("file"), entries)
    at = len(header)
    assert at % 8 == 0
    for region in regions:
        assert region.start == at and region.start % region.entry.dtype.itemsize == 0
        at += region.entry.nbytes


# -- what cannot be written or read --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.complex128, torch.uint16, torch.float8_e4m3fn], ids=str)
def test_a_dtype_that_no_file_holds_is_named_before_a_file_is_made(
    dtype: torch.dtype, tmp_path: Path, groups: Groups
) -> None:
    with pytest.raises(UserError, match=f"^odd is of {dtype}, which cannot be saved: use another dtype$"):
        write_tensors(tmp_path, STEM, [held("w", torch.zeros(2)), held("odd", torch.zeros(2, dtype=dtype))], groups)
    assert not list(tmp_path.iterdir())


def test_values_that_nobody_writes_are_told_before_a_file_is_made(tmp_path: Path, groups: Groups) -> None:
    with pytest.raises(UserError, match=r"w: the ranks would save 0 of its 2 values"):
        write_tensors(tmp_path, STEM, [held("w", torch.zeros(2), owned=False)], groups)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_gone_is_one_line(tmp_path: Path, groups: Groups) -> None:
    with pytest.raises(UserError, match=r"missing/model\.safetensors: \d+ bytes cannot be written: No such file"):
        write_tensors(tmp_path / "missing", STEM, [held("w", torch.zeros(2))], groups)


def header(path: Path, **entry: object) -> None:
    """Write a file whose header says this of its one tensor."""
    text = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **entry}}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        pytest.param(lambda path: path.write_bytes(b""), "cannot be read", id="nothing"),
        pytest.param(lambda path: path.write_bytes(b"1234567"), "cannot be read", id="seven bytes"),
        pytest.param(lambda path: path.write_bytes(bytes(8)), "cannot be read", id="no header"),
        pytest.param(lambda path: path.write_bytes(b"\xff" * 8), "its header claims", id="an endless header"),
        pytest.param(lambda path: path.write_bytes(b"version https://git-lfs"), "git lfs pull", id="a pointer"),
        pytest.param(lambda path: header(path, dtype="F8_E4M3"), "which cannot be trained", id="eight bits"),
        pytest.param(lambda path: header(path, dtype=["F32"]), "lacks a valid dtype", id="a list of dtypes"),
        pytest.param(lambda path: header(path, shape=[3]), "does not match its data_offsets", id="too large a shape"),
        pytest.param(lambda path: header(path, shape=[-2]), "lacks a valid dtype, shape", id="a negative size"),
        pytest.param(lambda path: header(path, shape=[2.0]), "lacks a valid dtype, shape", id="half a size"),
        pytest.param(lambda path: header(path, shape=None), "lacks a valid dtype, shape", id="no shape"),
        pytest.param(lambda path: header(path, data_offsets=[0]), "lacks a valid", id="one offset"),
        pytest.param(lambda path: header(path, data_offsets=[8, 16]), "does not match", id="beyond the end"),
        pytest.param(lambda path: header(path, data_offsets=[0, 2**70]), "does not match", id="far beyond the end"),
        pytest.param(lambda path: header(path, shape=[1], data_offsets=[0, 4]), "leave bytes", id="bytes left over"),
    ],
)
@pytest.mark.usefixtures("groups")
def test_a_damaged_file_is_one_line(spoil: Callable[[Path], object], words: str, tmp_path: Path) -> None:
    spoil(path := tmp_path / "model.safetensors")
    with pytest.raises(UserError) as told:
        opened(tmp_path, ["w"])
    assert str(path) in str(told.value) and words in str(told.value) and "\n" not in str(told.value)


@pytest.mark.parametrize("size", [0, 5, 79])
def test_a_file_that_is_cut_off_after_it_was_opened_is_one_line(size: int, tmp_path: Path, groups: Groups) -> None:
    tensors = [held("w", some(torch.float32, 4, 5))]
    write_tensors(tmp_path, STEM, tensors, groups)
    stored = opened(tmp_path, ["w"])
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size - 80 + size])
    with pytest.raises(UserError, match=f"{path}: "):
        read_tensors(stored, blank(tensors))


@pytest.mark.usefixtures("groups")
def test_a_tensor_of_another_shape_is_named_and_one_without_values_too(tmp_path: Path, groups: Groups) -> None:
    write_tensors(tmp_path, STEM, [held("w", torch.zeros(0, 3))], groups)
    with pytest.raises(UserError, match=r"w has shape \(0, 3\) in the checkpoint, but \(3, 0\) in this run: resume"):
        read(tmp_path, [held("w", torch.zeros(3, 0))])
