"""A process that is killed while it replaces files leaves the old ones or the new ones, wherever it was."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from harness.atomic import replace_text
from harness.checkpoint import directories
from harness.checkpoint.directories import contents, finish, partial_name, prune, remove
from harness.checkpoint.exporting.model_files import replace_model, settle_model, unfinished_name
from harness.checkpoint.integrity import newest_whole
from harness.config.model.files import INDEX, SINGLE
from harness.hf.weights.lazy_tensor import realised
from harness.hf.weights.tensor_files import open_tensors
from tests.unit.checkpoint.saved import progress

ONE = {SINGLE: ["a", "b", "c"]}
TWO = {"model-00001-of-00002.safetensors": ["a"], "model-00002-of-00002.safetensors": ["b", "c"]}
THREE = {f"model-0000{i}-of-00003.safetensors": [name] for i, name in enumerate("abc", 1)}
CHANGES = {"one-to-one": (ONE, ONE), "one-to-two": (ONE, TWO), "two-to-one": (TWO, ONE), "two-to-two": (TWO, TWO)}
CHANGES["three-to-two"] = (THREE, TWO)
STEPS = {"os.rename", "os.remove", "os.link", "os.mkdir", "os.rmdir", "open"}  # what may be the last thing done


def written(directory: Path, files: dict[str, list[str]], value: float) -> Callable[[], None]:
    """Write a model whose tensors all hold `value`; what is returned makes it the model of `directory`."""
    settle_model(directory)
    for file, names in files.items():
        save_file({name: torch.full((4,), value) for name in names}, directory / unfinished_name(file))
    index = {"metadata": {}, "weight_map": {name: file for file, names in files.items() for name in names}}
    return lambda: replace_model(directory, list(files), index)


def values(directory: Path) -> set[float]:
    """The values that a reader finds; each tensor must be there, whole."""
    tensors = open_tensors(directory).tensors
    assert sorted(tensors) == ["a", "b", "c"]
    return {float(value) for lazy in tensors.values() for value in realised(lazy)}


def moments_of(act: Callable[[], None], directory: Path, folder: Path) -> list[Path]:
    """Copies of a directory as a process leaves it that dies at its first touch of the file system, its second ...

    `act` runs in a child, because an audit hook stays. The last copy is of what it leaves when it has done all.
    """
    folder.mkdir()
    child = os.fork()
    if child == 0:
        is_copying = False

        def look(event: str, _: object) -> None:
            nonlocal is_copying
            if event in STEPS and not is_copying:
                is_copying = True
                first: dict[int, str] = {}
                shutil.copytree(
                    directory, folder / f"{len(list(folder.iterdir())):04d}", copy_function=partial(copied, first)
                )
                is_copying = False

        sys.addaudithook(look)
        act()
        look("open", None)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return sorted(folder.iterdir())


def copied(known: dict[int, str], old: str, new: str) -> None:
    """Copy a file; hard links stay links. `known`: inode -> its first copy."""
    first = known.setdefault(Path(old).stat().st_ino, new)
    if first is new:
        shutil.copy2(old, new)
    else:
        os.link(first, new)


@pytest.mark.parametrize(("old", "new"), CHANGES.values(), ids=CHANGES)
def test_a_crash_at_any_step_leaves_the_old_model_or_the_new_one(
    tmp_path: Path, old: dict[str, list[str]], new: dict[str, list[str]]
) -> None:
    seen = set()
    (place := tmp_path / "model").mkdir()
    written(place, old, 1.0)()
    for directory in moments_of(written(place, new, 2.0), place, tmp_path / "moments"):
        found = values(directory)
        assert found in ({1.0}, {2.0}), f"crashed at step {directory.name}: {found}"
        seen |= found
        written(directory, new, 3.0)()
        index = set() if new == ONE else {INDEX}
        assert values(directory) == {3.0} and {path.name for path in directory.iterdir()} == {*new, *index}
    assert seen == {1.0, 2.0}


def test_a_crash_while_a_text_is_replaced_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    (place := tmp_path / "run").mkdir()
    replace_text(path := place / "metrics.jsonl", "old")
    moments = moments_of(lambda: replace_text(path, "new"), place, tmp_path / "moments")
    assert {(moment / path.name).read_text() for moment in moments} == {"old", "new"} and len(moments) > 3


def save(run: Path, step: int, text: str) -> None:
    """Save a checkpoint whose file holds `text`."""
    (partial := run / partial_name(step)).mkdir(parents=True)
    (partial / SINGLE).write_text(text)
    finish(run, progress(step), contents(partial))


@pytest.mark.parametrize("exchanges", [True, False], ids=["exchange", "two-renames"])
def test_a_crash_while_a_checkpoint_takes_the_place_of_one_leaves_a_whole_one(
    tmp_path: Path, exchanges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchanges:  # as on a file system that cannot
        monkeypatch.setattr(directories, "exchange", lambda one, other: False)
    found = set()
    save(place := tmp_path / "run", 2, "before")
    save(place, 4, "old")
    for run in moments_of(lambda: save(place, 4, "new"), place, tmp_path / "moments"):
        newest = newest_whole(run)
        assert newest is not None, f"crashed at step {run.name}: no whole checkpoint"
        found.add((newest / SINGLE).read_text())
        save(run, 6, "after")
        remove(prune(run, None))
        assert {path.name for path in run.iterdir()} <= {"checkpoint-2", "checkpoint-4", "checkpoint-6"}
    assert found == ({"old", "new"} if exchanges else {"before", "old", "new"})


def test_what_is_the_users_stays(tmp_path: Path) -> None:
    theirs = {"model_ema.safetensors", "model.of.mine.safetensors", "unfinished-work", "unfinished-notes.txt"}
    for name in theirs - {"unfinished-work"}:
        (tmp_path / name).write_text("theirs")
    (tmp_path / "unfinished-work").mkdir()
    written(tmp_path, TWO, 1.0)()
    written(tmp_path, ONE, 2.0)()
    assert {path.name for path in tmp_path.iterdir()} == {*theirs, *ONE}
