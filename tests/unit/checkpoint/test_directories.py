"""The folders of a run: one is finished in its place, older ones go, and what is the user's stays."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.checking import resolve
from harness.checkpoint import directories
from harness.checkpoint.directories import (
    STATE,
    TrainingProgress,
    contents,
    finish,
    finished_name,
    numbered,
    optimizer_name,
    partial_name,
    prune,
    read_progress,
    remove,
    set_aside_foreign,
    set_aside_newer,
)
from harness.checkpoint.integrity import damage
from harness.checkpoint.saved_run import SavedRun
from harness.config import AutoValues, Resolved
from harness.errors import UserError
from tests.unit.checkpoint.saved import progress, save

NUMBERS = st.integers(0, 2**80)
TEXTS = st.text(max_size=8)
JSON = st.recursive(st.none() | st.booleans() | NUMBERS | TEXTS, lambda each: st.lists(each, max_size=3), max_leaves=5)


@given(
    st.builds(
        TrainingProgress,
        **dict.fromkeys(("step", "consumed_samples", "zero_stage", "seed", "skipped_steps"), NUMBERS),
        **dict.fromkeys(("layout", "precision", "data", "adapters", "model", "optimizer", "run_id"), TEXTS),
        **{name: st.dictionaries(TEXTS, JSON, max_size=2) for name in ("hyperparameters", "best", "stream")},
        skipped_samples=st.lists(st.lists(NUMBERS, min_size=2, max_size=2), max_size=2),
        optimizer_states=st.lists(TEXTS, max_size=2),
        counters=st.dictionaries(TEXTS, st.floats(allow_nan=False) | NUMBERS, max_size=2),
        model_only=st.booleans(),
    )
)
def test_what_a_run_says_of_itself_is_what_the_next_one_reads(
    tmp_path_factory: pytest.TempPathFactory, stated: TrainingProgress
) -> None:
    folder = tmp_path_factory.mktemp("checkpoint")
    (folder / STATE).write_text(json.dumps(asdict(stated)))
    assert read_progress(folder) == stated


ANYTHING = {"hyperparameters", "best", "stream", "model_config"}  # objects that may hold it
WRONG = {
    each.name: [
        None,
        1.5,
        *([] if each.name == "skipped_samples" else [[[]]]),
        *([] if each.name in ANYTHING else [{"a": [None]}]),
    ]
    for each in fields(TrainingProgress)
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_no_field_takes_a_value_of_another_type(name: str, value: object, tmp_path: Path) -> None:
    (tmp_path / STATE).write_text(json.dumps({**asdict(progress(1)), name: value}))
    with pytest.raises(UserError, match=rf"state\.json: cannot be read: {name} is "):
        read_progress(tmp_path)


@pytest.mark.parametrize("name", ["step", "consumed_samples", "layout", "zero_stage", "precision", "seed", "data"])
def test_what_every_checkpoint_says_may_not_be_missing(name: str, tmp_path: Path) -> None:
    stated = asdict(progress(1))
    del stated[name]
    (tmp_path / STATE).write_text(json.dumps(stated))
    with pytest.raises(UserError, match=f"cannot be read: {name} is missing"):
        read_progress(tmp_path)


# -- one folder in the place of another ----------------------------------------------------------------------


def dangling(path: Path) -> None:
    path.symlink_to(path.with_name("nowhere"))


def link(path: Path) -> None:
    save(path.parent / "large disk", 4).rename(path.parent / "target")
    path.symlink_to(path.parent / "target")


@pytest.mark.parametrize(
    "before",
    [
        pytest.param(lambda path: save(path.parent, 4), id="a whole one"),
        pytest.param(Path.mkdir, id="an empty folder"),
        pytest.param(lambda path: path.write_text("a file"), id="a file"),
        pytest.param(dangling, id="a link to nothing"),
        pytest.param(link, id="a link to a whole one"),
    ],
)
@pytest.mark.parametrize("exchanges", [True, False], ids=["exchange", "two-renames"])
def test_whatever_has_the_name_makes_room(
    before: Callable[[Path], object], exchanges: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchanges:  # as on a file system that cannot
        monkeypatch.setattr(directories, "exchange", lambda one, other: False)
    before(tmp_path / finished_name(4))
    left = tmp_path / "writing-replaced-4"  # of a run that was killed while it removed the one before
    left.mkdir()
    (left / "weights").write_text("old")
    (partial := tmp_path / partial_name(4)).mkdir()
    (partial / "model.safetensors").write_text("new")
    final = finish(tmp_path, progress(4), contents(partial))
    assert damage(final) is None and not final.is_symlink()
    assert sorted(path.name for path in final.iterdir()) == ["manifest.json", "model.safetensors", "state.json"]
    assert not partial.exists() and not list(tmp_path.glob("writing-*"))


def test_what_a_link_led_to_is_not_removed_with_it(tmp_path: Path) -> None:
    stored = save(tmp_path / "large disk", 4)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint-4").symlink_to(stored)
    remove(prune(tmp_path / "run", [save(tmp_path / "run", 5)]))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoint-5"]
    assert damage(stored) is None


# -- which of them go ----------------------------------------------------------------------------------------


def test_only_what_saves_have_left_is_removed(tmp_path: Path) -> None:
    theirs = ["writing-style-notes", "writing-removed-by-me", "writing-checkpoint-", "writing-7-pages", "notes"]
    ours = ["writing-checkpoint-3", "writing-removed-12", "writing-replaced-0"]
    for name in (*theirs, *ours):
        (tmp_path / name).mkdir()
    assert sorted(path.name for path in prune(tmp_path, None)) == sorted(ours)
    remove(prune(tmp_path, None))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(theirs)


@pytest.mark.parametrize(
    ("kept", "best", "left"),
    [
        pytest.param(None, None, [1, 2, 3, 4], id="all"),
        pytest.param([], None, [1, 2, 3, 4], id="none is whole"),
        pytest.param([4], None, [4], id="the newest"),
        pytest.param([3], None, [3, 4], id="what is newer stays"),
        pytest.param([4, 3], 1, [1, 3, 4], id="and the best"),
        pytest.param([2, 4], None, [2, 3, 4], id="what lies between stays"),
        pytest.param([4], 9, [4], id="a best one that is gone"),
    ],
)
def test_older_ones_lose_their_names(kept: list[int] | None, best: int | None, left: list[int], tmp_path: Path) -> None:
    paths = {step: tmp_path / finished_name(step) for step in (1, 2, 3, 4, 9)}
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    removable = prune(tmp_path, kept if kept is None else [paths[step] for step in kept], best and paths[best])
    assert [step for step, _ in numbered(tmp_path)] == left
    assert len(removable) == 4 - len(left)
    remove(removable)
    assert len(list(tmp_path.iterdir())) == len(left)


def test_one_whose_new_name_is_taken_goes_the_next_time(tmp_path: Path) -> None:
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    (tmp_path / "writing-removed-1").mkdir()
    (tmp_path / "writing-removed-1" / "left").write_text("by a run that was killed")
    remove(prune(tmp_path, [newest]))
    assert [step for step, _ in numbered(tmp_path)] == [1, 2]
    remove(prune(tmp_path, [newest]))
    assert [step for step, _ in numbered(tmp_path)] == [2]


@pytest.fixture
def overlay(tmp_path: Path) -> Iterator[Path]:
    """A folder on overlayfs, with two checkpoints in its lower layer as in a container's image."""
    lower, upper, work, merged = (tmp_path / name for name in ("lower", "upper", "work", "merged"))
    for folder in (lower, upper, work, merged):
        folder.mkdir()
    for step in (1, 2):
        save(lower, step)
    options = f"lowerdir={lower},upperdir={upper},workdir={work},redirect_dir=off"
    mount = ["mount", "-t", "overlay", "overlay", "-o", options, str(merged)]
    if shutil.which("mount") is None or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("overlayfs cannot be mounted here")
    yield merged
    subprocess.run(["umount", "-l", merged], check=True)


def test_folders_that_overlayfs_cannot_rename_make_room_all_the_same(overlay: Path) -> None:
    with pytest.raises(OSError, match="Invalid cross-device link"):
        (overlay / "checkpoint-1").rename(overlay / "other")
    (partial := overlay / partial_name(2)).mkdir()
    (partial / "model.safetensors").write_text("new")
    again = finish(overlay, progress(2), contents(partial))
    assert damage(again) is None and (again / "model.safetensors").read_text() == "new"
    ((_, moved),) = set_aside_foreign([overlay / "checkpoint-1"])
    assert damage(moved) is None and [step for step, _ in numbered(overlay)] == [2]


def test_older_ones_that_overlayfs_cannot_rename_are_removed(overlay: Path) -> None:
    remove(prune(overlay, [overlay / "checkpoint-2"]))
    assert [path.name for path in overlay.iterdir()] == ["checkpoint-2"]


def test_removing_what_is_gone_is_no_error(tmp_path: Path) -> None:
    shutil.rmtree(saved := save(tmp_path, 1))
    remove([saved, tmp_path / "never"])


@pytest.mark.parametrize("name", ["abandoned-checkpoint-4", "foreign-checkpoint-4", "good", "latest"])
def test_a_run_can_go_on_from_one_that_has_another_name(name: str, tmp_path: Path) -> None:
    save(tmp_path, 2)
    other = tmp_path / name
    save(tmp_path, 4).rename(other)
    save(tmp_path, 9)
    assert [path.name for path in set_aside_newer(tmp_path, other)] == ["abandoned-checkpoint-9"]
    assert [step for step, _ in numbered(tmp_path)] == [2] and damage(other) is None


def test_those_of_another_run_get_a_name_that_no_earlier_one_has(tmp_path: Path) -> None:
    (tmp_path / "foreign-checkpoint-2").symlink_to(tmp_path / "a disk that is not mounted")
    assert set_aside_foreign([]) == []
    for name in ("foreign-checkpoint-2.1", "foreign-checkpoint-2.2"):
        ((old, new),) = set_aside_foreign([save(tmp_path, 2)])
        assert (old.exists(), new.name, damage(new)) == (False, name, None)
    assert len(list(tmp_path.iterdir())) == 3


# -- which runs can go on ------------------------------------------------------------------------------------


def state(folder: Path, **stated: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / STATE).write_text(json.dumps(asdict(progress(1, **stated))))
    return folder


def using(name: str | None) -> Resolved:
    optimizer = {} if name is None else {"optimizer": {"type": name, "params": {"lr": 0.1}}}
    return resolve({"train_batch_size": 1, **optimizer}, AutoValues())


@pytest.mark.parametrize(
    ("saved", "ours", "fits"),
    [
        ("AdamW", None, True),
        ("Adam", "AdamW", True),
        ("adamw", "Adam", True),
        ("", "Lion", True),
        ("LION", "Lion", True),
        ("Lion", "AdamW", False),
        ("AdamW", "Lion", False),
    ],
)
def test_the_state_of_an_optimizer_is_for_one_of_its_kind(
    saved: str, ours: str | None, fits: bool, tmp_path: Path
) -> None:
    assert optimizer_name(using(ours)) == (ours or "AdamW")
    if fits:
        SavedRun.read(state(tmp_path, optimizer=saved)).require_same_optimizer(optimizer_name(using(ours)))
        return
    with pytest.raises(UserError, match=f"contains the state of {saved}, but this run uses {ours}: use the saved one"):
        SavedRun.read(state(tmp_path, optimizer=saved)).require_same_optimizer(optimizer_name(using(ours)))


def test_a_checkpoint_of_the_model_alone_is_no_place_to_go_on_from(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"start a new run with --model_name_or_path {tmp_path}"):
        SavedRun.read(state(tmp_path, model_only=True)).require_same_optimizer("AdamW")


@pytest.mark.parametrize(
    ("saved", "ours", "words"),
    [
        ("r=8", "r=8", None),
        ("", "", None),
        ("r=8", "r=4", "contains adapters of another config, but this run trains adapters"),
        ("r=8", "", "contains adapters, but this run trains all weights"),
        ("", "r=8", "contains all weights, but this run trains adapters"),
    ],
)
def test_adapters_go_on_as_what_they_were(saved: str, ours: str, words: str | None, tmp_path: Path) -> None:
    if words is None:
        SavedRun.read(state(tmp_path, adapters=saved)).require_same_adapters(ours)
        return
    with pytest.raises(UserError, match=words):
        SavedRun.read(state(tmp_path, adapters=saved)).require_same_adapters(ours)


@pytest.mark.parametrize(
    ("theirs", "ours", "words"),
    [
        ({"rope": 1e4}, {"rope": 1e4}, None),
        ({"rope": 1e4}, {"other": 1}, None),  # what only one version of transformers knows
        ({"window": [1, 2]}, {"window": (1, 2)}, None),  # as JSON has it
        ({"rope": 1e4}, {"rope": 1e6}, "whose rope is 10000.0, but this run's has 1000000.0"),
        ({"b": 1, "a": 1}, {"b": 2, "a": None}, "whose a is 1, but this run's has None"),
    ],
)
def test_a_model_goes_on_with_the_config_that_shapes_it(
    theirs: dict[str, Any], ours: dict[str, Any], words: str | None, tmp_path: Path
) -> None:
    saved = state(tmp_path, model="6 layers", model_config=theirs)
    with pytest.raises(UserError, match=r"contains a model of 6 layers, but this run's model has 5 layers"):
        SavedRun.read(saved).require_same_model("5 layers", ours)
    if words is None:
        SavedRun.read(saved).require_same_model("6 layers", ours)
        return
    with pytest.raises(UserError, match=words):
        SavedRun.read(saved).require_same_model("6 layers", ours)
