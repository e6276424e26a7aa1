"""A process that is killed while it replaces files leaves the old ones or the new ones, wherever it was."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from harness.checkpoint import directories
from harness.checkpoint.atomic import replace_text
from harness.checkpoint.directories import contents, finish, partial_name, prune, remove
from harness.checkpoint.exporting.model_files import replace_model, settle_model, unfinished_name
from harness.checkpoint.integrity import newest_whole
from harness.hf.weights.lazy_tensor import realised
from harness.hf.weights.tensor_files import INDEX, SINGLE, open_tensors
from tests.unit.checkpoint.saved import progress

ONE = {SINGLE: ["a", "b", "c"]}
TWO = {"model-00001-of-00002.safetensors": ["a"], "model-00002-of-00002.safetensors": ["b", "c"]}
THREE = {f"model-0000{i}-of-00003.safetensors": [name] for i, name in enumerate("abc", 1)}
CHANGES = {"one-to-one": (ONE, ONE), "one-to-two": (ONE, TWO), "two-to-one": (TWO, ONE), "two-to-two": (TWO, TWO)}
CHANGES["three-to-two"] = (THREE, TWO)
CRASHED = 9
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


def crashes_at(step: int, act: Callable[[], None]) -> bool:
    """Call `act` in a child that dies at its `step`-th touch of the file system; whether it came so far."""
    child = os.fork()
    if child == 0:
        done = 0

        def die(event: str, _: object) -> None:
            nonlocal done
            done += event in STEPS
            if done == step:
                os._exit(CRASHED)

        sys.addaudithook(die)
        act()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, CRASHED)
    return code == CRASHED


@pytest.mark.parametrize(("old", "new"), CHANGES.values(), ids=CHANGES)
def test_a_crash_at_any_step_leaves_the_old_model_or_the_new_one(
    tmp_path: Path, old: dict[str, list[str]], new: dict[str, list[str]]
) -> None:
    seen = set()
    for step in range(1, 1000):
        directory = tmp_path / str(step)
        directory.mkdir()
        written(directory, old, 1.0)()
        crashed = crashes_at(step, written(directory, new, 2.0))
        found = values(directory)
        assert found in ({1.0}, {2.0}), f"crashed at step {step}: {found}"
        seen |= found
        written(directory, new, 3.0)()
        index = set() if new == ONE else {INDEX}
        assert values(directory) == {3.0} and {path.name for path in directory.iterdir()} == {*new, *index}
        if not crashed:
            break
    assert seen == {1.0, 2.0}


def test_a_crash_while_a_text_is_replaced_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    path, seen = tmp_path / "metrics.jsonl", set()
    for step in range(1, 100):
        replace_text(path, "old")
        crashed = crashes_at(step, lambda: replace_text(path, "new"))
        seen.add(path.read_text())
        if not crashed:
            break
    assert seen == {"old", "new"} and step > 3


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
    for step in range(1, 1000):
        run = tmp_path / str(step)
        save(run, 2, "before")
        save(run, 4, "old")
        crashed = crashes_at(step, lambda run=run: save(run, 4, "new"))
        newest = newest_whole(run)
        assert newest is not None, f"crashed at step {step}: no whole checkpoint"
        found.add((newest / SINGLE).read_text())
        save(run, 6, "after")
        remove(prune(run, None))
        assert {path.name for path in run.iterdir()} <= {"checkpoint-2", "checkpoint-4", "checkpoint-6"}
        if not crashed:
            break
    assert found == ({"old", "new"} if exchanges else {"before", "old", "new"})


def test_what_is_the_users_stays(tmp_path: Path) -> None:
    theirs = {"model_ema.safetensors", "model.of.mine.safetensors", "unfinished-work", "unfinished-notes.txt"}
    for name in theirs - {"unfinished-work"}:
        (tmp_path / name).write_text("theirs")
    (tmp_path / "unfinished-work").mkdir()
    written(tmp_path, TWO, 1.0)()
    written(tmp_path, ONE, 2.0)()
    assert {path.name for path in tmp_path.iterdir()} == {*theirs, *ONE}
