"""Files that many ranks write: laid out as safetensors lays them out, and never shared by two hosts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from harness.checkpoint.exporting.plan_files import plan_files
from harness.checkpoint.tensors.tensor_writer import Entry, OpenFiles, create, file_regions, split_by_size
from harness.checkpoint.tensors.whole_tensors import StageTensors
from harness.errors import UserError
from harness.hf.weights.conversion import CheckpointFormat, ParameterRef
from harness.hf.weights.lazy_tensor import LazyTensor


def entry(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Entry:
    return Entry(name=name, shape=shape, dtype=dtype, trained=True)


def form(*entries: Entry, **settings: object) -> CheckpointFormat:
    tensors = {e.name: LazyTensor.of(ParameterRef(e.name, e.shape, e.dtype)) for e in entries}
    return CheckpointFormat(tensors=tensors, **settings)  # type: ignore[arg-type]


def test_a_file_written_in_pieces_is_the_one_that_safetensors_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.checkpoint.tensors.tensor_writer.BLOCK_BYTES", 5000)  # several blocks each
    tensors = {
        "switches": torch.arange(7) % 2 == 0,
        "cube": torch.randn(5, 50, 20),
        "half": torch.randn(33, 9).bfloat16(),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "größe": torch.randn(300, 30),
    }
    save_file(tensors, tmp_path / "wanted", metadata={"format": "pt"})
    entries = [entry(name, *tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()]
    header, regions = file_regions(tmp_path / "file", entries)
    create(tmp_path / "file", header, regions)
    with OpenFiles(several_hosts=True) as opened:
        for region in regions:
            tensor = tensors[region.entry.name]
            if tensor.dim() < 2:
                opened.write(region, (0,) * tensor.dim(), tensor)
                continue
            for start, stop in ((4, tensor.shape[1]), (0, 4)):  # columns: every row of the file in two strokes
                opened.write(region, (0, start, *(0,) * (tensor.dim() - 2)), tensor[:, start:stop])
    assert (tmp_path / "file").read_bytes() == (tmp_path / "wanted").read_bytes()


def test_no_file_is_larger_than_asked_but_for_one_tensor() -> None:
    entries = [entry("a", 10), entry("b", 10), entry("c", 30), entry("d", 5), entry("e", 5)]
    files = split_by_size(entries, 80)
    assert [[e.name for e in file] for file in files] == [["a", "b"], ["c"], ["d", "e"]]


def test_the_files_of_a_checkpoint_are_kept_on_one_host_only() -> None:
    a, b, c = entry("a", 4), entry("b", 4), entry("c", 4)
    kept = form(a, b, c, files={"x.safetensors": ["a", "c"], "y.safetensors": ["b"]}, max_file_bytes=32)
    first, second = StageTensors(host="one", entries=[a, b]), StageTensors(host="one", entries=[c])
    assert plan_files([first, second], kept) == {"x.safetensors": [a, c], "y.safetensors": [b]}
    away = StageTensors(host="two", entries=[c])
    assert list(plan_files([first, away], kept).values()) == [[a, b], [c]]


def test_files_that_would_grow_are_split() -> None:
    wide = [entry("a", 4, dtype=torch.float64), entry("b", 4, dtype=torch.float64)]
    kept = form(*wide, files={"model.safetensors": ["a", "b"]}, max_file_bytes=32)
    assert list(plan_files([StageTensors(host="one", entries=wide)], kept)) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]


def test_what_no_stage_holds_as_a_whole_is_told() -> None:
    with pytest.raises(UserError, match="b combines tensors of several pipeline stages"):
        plan_files([StageTensors(host="one", entries=[entry("a", 4)])], form(entry("a", 4), entry("b", 4)))


IN_RAMFS = """
import sys, torch
import subprocess
import sys
from pathlib import Path
from harness.checkpoint.tensors.tensor_writer import Entry, OpenFiles, create, file_regions
path = Path(sys.argv[1], "file")
header, places = file_regions(path, [Entry(name="w", shape=(3,), dtype=torch.float32, trained=True)])
create(path, header, places)
with OpenFiles(several_hosts=True) as opened:
    opened.write(places[0], (0,), torch.arange(3.0))
    opened.sync()
from safetensors.torch import load_file
print(load_file(path)["w"].tolist())
"""


def test_a_file_system_that_reserves_no_room_is_written_to(tmp_path: Path) -> None:
    mount = f"mount -t ramfs none {tmp_path} && exec {sys.executable} -c '{IN_RAMFS}' {tmp_path}"
    if subprocess.run(["unshare", "-rm", "mount", "-t", "ramfs", "none", tmp_path], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    done = subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[0.0, 1.0, 2.0]\n", done.stderr


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    header, regions = file_regions(tmp_path / "file", [entry("a", 10**15)])
    with pytest.raises(UserError, match=r"4,000,000,000,000,\d+ bytes cannot be written"):
        create(tmp_path / "file", header, regions)
    assert not (tmp_path / "file").exists()
