"""What `run.json` says of the files that the script's flags name."""

from pathlib import Path

from harness.data.inputs.data_files import data_files
from tests.unit.data.test_token_files import datatrove, megatron


def test_the_files_behind_the_flags_are_listed_with_their_sizes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    pair, ds = megatron(tmp_path / "b"), datatrove(tmp_path / "c.ds", metadata=False)
    assert data_files({}) == data_files({"train_file": None}) == {}
    found = data_files({"train_file": (f"{tmp_path}/a.txt:1", f"{pair}:2"), "validation_file": [ds], "seed": 3})
    assert found == {
        "train_file": {"files": 2, "bytes": 27, "sizes": {f"{tmp_path}/a.txt": 3, f"{tmp_path}/b.bin": 24}},
        "validation_file": {"files": 1, "bytes": 24, "sizes": {f"{tmp_path}/c.ds": 24}},
    }
    (library,) = data_files({"train_file": ["python-stdlib:1"]}).values()
    assert library["files"] > 100 and library["sizes"] == {}  # known by the version of Python
    (gone,) = data_files({"train_file": [f"{tmp_path}/gone.txt"]}).values()
    assert list(gone) == ["unreadable"] and "gone.txt does not exist" in gone["unreadable"]


def test_data_files_are_listed_with_their_sizes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "b.txt").write_text("more")
    found = data_files({"train_file": (str(tmp_path),), "validation_file": None})
    assert found == {
        "train_file": {"files": 2, "bytes": 9, "sizes": {str(tmp_path / "a.txt"): 5, str(tmp_path / "b.txt"): 4}}
    }
    assert "unreadable" in data_files({"train_file": (str(tmp_path / "gone.txt"),)})["train_file"]
