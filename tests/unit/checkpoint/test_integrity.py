"""Which checkpoint a run goes on from, in a directory in which anything may have happened since."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.checkpoint.directories import MANIFEST, METRICS, RUN, STATE, numbered
from harness.checkpoint.integrity import (
    changed_file,
    damage,
    find_resume,
    foreign,
    newest,
    newest_whole,
    require_listed_weights,
    run_id,
    wait_until_seen,
)
from harness.errors import UserError
from tests.unit.checkpoint.saved import change, save


def swap(first: Path, second: Path) -> None:
    first.rename(first.with_name("between"))
    second.rename(first)
    first.with_name("between").rename(second)


def linked(path: Path, target: Path) -> None:
    path.unlink()
    path.symlink_to(target)


def replaced_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replaced_by(path: Path, target: Path | None) -> None:
    """Put a link in the place of a file, or a pipe, and list it as empty: that is its size."""
    path.unlink()
    path.symlink_to(target) if target else os.mkfifo(path)
    listed = path.parent / MANIFEST
    if listed != path:
        files = json.loads(listed.read_text())["files"]
        change(listed, files={**files, path.name: [0, "0" * 32]})


def listing(path: Path, *names: str) -> None:
    """Edit the list of files, after which whatever is listed is there."""
    for name in names:
        (path / name).touch()
    change(path / MANIFEST, files={name: [(path / name).stat().st_size, "0" * 32] for name in names})


def stating(path: Path, **values: object) -> None:
    """Edit what a checkpoint says of its run, and its size in the list of files."""
    change(path / STATE, **values)
    files = json.loads((path / MANIFEST).read_text())["files"]
    change(path / MANIFEST, files={**files, STATE: [(path / STATE).stat().st_size, "0" * 32]})


WEIGHTS = "model.safetensors"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        pytest.param(shutil.rmtree, "no such directory", id="it has vanished"),
        pytest.param(
            lambda path: (path / WEIGHTS).write_bytes(b""), f"{WEIGHTS} has 0 bytes of 101", id="a file empty"
        ),
        pytest.param(
            lambda path: (path / WEIGHTS).open("ab").write(b"x"), "has 102 bytes of 101", id="a byte too many"
        ),
        pytest.param(
            lambda path: linked(path / WEIGHTS, path / "nowhere"), f"{WEIGHTS} is missing", id="a link to nothing"
        ),
        pytest.param(
            lambda path: linked(path / WEIGHTS, path / WEIGHTS), f"{WEIGHTS} is missing", id="a link to itself"
        ),
        pytest.param(
            lambda path: (path / WEIGHTS).rename(path / "Model.safetensors"), f"{WEIGHTS} is missing", id="renamed"
        ),
        pytest.param(lambda path: shutil.rmtree(path / "deep"), "deep/other.json is missing", id="a folder missing"),
        pytest.param(
            lambda path: replaced_by_a_folder(path / MANIFEST), "manifest.json is missing", id="a folder in its place"
        ),
        pytest.param(
            lambda path: replaced_by(path / MANIFEST, Path("/dev/zero")),
            "manifest.json is missing",
            id="a list that never ends",
        ),
        pytest.param(lambda path: replaced_by(path / STATE, None), f"{STATE} is not a file", id="a pipe as state"),
        pytest.param(lambda path: replaced_by(path / WEIGHTS, None), f"{WEIGHTS} is not", id="a pipe as weights"),
        pytest.param(
            lambda path: change(path / MANIFEST, files={"w" * 300: [1, "a"]}), "w is missing", id="a name too long"
        ),
        pytest.param(
            lambda path: change(path / MANIFEST, files={"a\0b": [1, "a"]}),
            "is not a file inside it",
            id="a name with a zero",
        ),
        pytest.param(lambda path: listing(path), "manifest.json does not list state.json", id="an empty list"),
        pytest.param(lambda path: listing(path, STATE), "does not list model", id="a list without weights"),
        pytest.param(
            lambda path: stating(path, optimizer_states=["exp_avg"]),
            "does not list exp_avg",
            id="no optimizer",
        ),
        pytest.param(
            lambda path: listing(path, STATE, "model-00001-of-00002.safetensors"),
            "does not list all files of model",
            id="a list without some weights",
        ),
        pytest.param(
            lambda path: stating(path, consumed_samples=-5),
            "state.json: consumed_samples is -5",
            id="negative",
        ),
        pytest.param(
            lambda path: stating(path, consumed_samples=10**15), f"samples is {10**15} at step 4", id="too many samples"
        ),
        pytest.param(
            lambda path: stating(path, skipped_samples=[[9, 2]]), "skipped_samples is [[9, 2]]", id="a range backwards"
        ),
        pytest.param(
            lambda path: shutil.copy(path.parent / "checkpoint-2" / MANIFEST, path),
            "manifest.json is of step 2",
            id="the list of another checkpoint",
        ),
    ],
)
def test_what_is_wrong_is_said_and_auto_passes_over_it(
    spoil: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    older, newer = save(tmp_path, 2), save(tmp_path, 4)
    spoil(newer)
    assert words in str(damage(newer))
    assert find_resume(tmp_path, "auto") == older


def test_checkpoints_that_have_changed_names_are_both_known(tmp_path: Path) -> None:
    older, newer = save(tmp_path, 2), save(tmp_path, 4)
    swap(older, newer)
    assert (damage(older), damage(newer)) == ("manifest.json is of step 4", "manifest.json is of step 2")
    assert newest_whole(tmp_path) is None
    newer.rename(tmp_path / "good")
    assert damage(tmp_path / "good") is None  # a name of the user's says nothing of a step


def test_files_that_have_changed_places_are_found_by_their_content(tmp_path: Path) -> None:
    older, newer = save(tmp_path, 2), save(tmp_path, 4)
    swap(older / WEIGHTS, newer / WEIGHTS)  # of one size
    for path in (older, newer):
        assert damage(path) is None
        assert changed_file(path, 0, 1) == f"{WEIGHTS} differs from what was saved"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("x" * 300, "cannot be read: File name too long"),
        ("a/" * 3000, "cannot be read: File name too long"),
        ("file", "no such directory"),
        ("file/checkpoint-3", "no such directory"),
        ("loop", "no such directory"),
        ("", "manifest.json is missing"),
    ],
    ids=["a long name", "a long path", "a file", "in a file", "a link to itself", "a folder of another kind"],
)
def test_a_path_that_is_no_checkpoint_is_refused_in_one_line(path: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(UserError, match="no whole checkpoint there") as told:
        find_resume(tmp_path / "run", str(tmp_path / path))
    assert f"({words})" in str(told.value)


@pytest.mark.parametrize("share", [0, 1])
def test_a_rank_that_can_read_no_list_answers_all_the_same(share: int, tmp_path: Path) -> None:
    saved = save(tmp_path, 3)
    (saved / MANIFEST).write_text("{")
    assert "manifest.json: cannot be read" in str(changed_file(saved, share, 2))  # the other one waits for it
    shutil.rmtree(saved)
    assert "manifest.json: cannot be read" in str(changed_file(saved, share, 2))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        pytest.param(lambda path: path.unlink(), "cannot be read: No such file or directory", id="gone"),
        pytest.param(replaced_by_a_folder, "cannot be read: Is a directory", id="a folder"),
    ],
)
def test_a_file_that_goes_while_all_are_read_is_named(
    spoil: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    saved = save(tmp_path, 3)
    spoil(saved / "deep" / "other.json")
    assert changed_file(saved, 0, 1) == f"deep/other.json {words}"


def test_more_ranks_than_files_leave_some_nothing_to_read(tmp_path: Path) -> None:
    assert [changed_file(save(tmp_path, 3), share, 9) for share in range(9)] == [None] * 9


def test_the_one_before_is_found_where_the_later_one_is_gone_or_lies_elsewhere(tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    older, newer = save(run, 9), save(run, 10)
    shutil.rmtree(newer)
    assert newest_whole(run, before=newer) == older
    assert newest_whole(run, before=save(elsewhere, 9)) is None
    assert newest_whole(run, before=elsewhere / "good") == older  # a name that says no step


@given(st.sets(st.integers(0, 10**30), max_size=6))
def test_the_order_is_that_of_steps(tmp_path_factory: pytest.TempPathFactory, steps: set[int]) -> None:
    folder = tmp_path_factory.mktemp("run")
    for step in steps:
        (folder / f"checkpoint-{step}").mkdir()
    assert [step for step, _ in numbered(folder)] == sorted(steps)


@pytest.mark.parametrize(
    "name", ["checkpoint-", "checkpoint-1.5", "checkpoint--1", "checkpoint-٣", "checkpoint-3 ", "Checkpoint-3"]
)
def test_names_that_resemble_a_checkpoints_are_none(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-7").write_text("a file")
    assert numbered(tmp_path) == []
    assert find_resume(tmp_path, None) is None  # the directory holds no run


def test_a_checkpoint_may_lie_behind_a_link(tmp_path: Path) -> None:
    stored = save(tmp_path / "large disk", 5)
    (tmp_path / "run").mkdir()
    link = tmp_path / "run" / "checkpoint-5"
    link.symlink_to(stored)
    assert find_resume(tmp_path / "run", "auto") == link
    latest = tmp_path / "large disk" / "latest"
    latest.symlink_to("checkpoint-5")
    assert find_resume(tmp_path / "large disk", str(latest)) == latest  # of the same run, by another name
    with pytest.raises(UserError, match="already holds a run"):
        find_resume(tmp_path / "run", str(latest))


@pytest.mark.parametrize("count", [None, 0, 1, 2, 5])
def test_those_that_are_kept_are_whole_and_the_newest_first(count: int | None, tmp_path: Path) -> None:
    paths = [save(tmp_path, step) for step in (1, 2, 3, 11)]
    (paths[2] / STATE).unlink()
    whole = [paths[3], paths[1], paths[0]]
    assert newest(tmp_path, count, last_step=11) == (None if count is None else whole[:count])


@pytest.mark.parametrize(
    "content",
    ["", "[]", "null", '{"run_id": {}}', '{"run_id": null}', '{"run_id": ""}', "{}", "[" * 100_000],
    ids=["empty", "a list", "null", "no text", "none", "no name", "no id", "deep"],
)
def test_a_description_of_the_run_that_says_nothing_leaves_the_most_frequent_one(content: str, tmp_path: Path) -> None:
    ours, theirs = [save(tmp_path, step, "ours") for step in (1, 2)], save(tmp_path, 3, "theirs")
    (tmp_path / RUN).write_text(content)
    assert foreign(tmp_path) == [theirs]
    assert find_resume(tmp_path, "auto") == ours[1]


def test_of_two_runs_with_equally_many_none_is_foreign(tmp_path: Path) -> None:
    save(tmp_path, 1, "ours")
    other = save(tmp_path, 2, "theirs")
    assert foreign(tmp_path) == [] and find_resume(tmp_path, "auto") == other


def test_a_directory_of_another_run_is_refused_unless_it_may_be_overwritten(tmp_path: Path) -> None:
    assert find_resume(tmp_path / "new", None) is None
    (tmp_path / METRICS).write_text("")
    for wanted in (None, str(save(tmp_path / "elsewhere", 3))):
        with pytest.raises(UserError, match="already holds a run: give another directory"):
            find_resume(tmp_path, wanted)
        assert find_resume(tmp_path, wanted, overwrites=True) == (wanted and Path(wanted))


def test_a_path_from_where_the_run_was_started_means_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "run", 3)
    monkeypatch.chdir(tmp_path)
    assert find_resume(Path("run"), str(tmp_path / "run" / "checkpoint-3")) == tmp_path / "run" / "checkpoint-3"
    assert find_resume(tmp_path / "run", "run/./checkpoint-3") == Path("run/checkpoint-3")


def test_a_run_goes_on_under_the_name_of_its_checkpoint(tmp_path: Path) -> None:
    assert run_id(save(tmp_path, 3, "ours")) == "ours"
    fresh = {run_id(None), run_id(None), run_id(save(tmp_path, 4))}  # an earlier version gave none
    assert len(fresh) == 3 and all(len(each) == 32 for each in fresh)


def test_a_list_without_checksums_is_damage_not_a_match(tmp_path: Path) -> None:
    saved = save(tmp_path, 3)
    files = json.loads((saved / MANIFEST).read_text())["files"]
    change(saved / MANIFEST, files={name: [size, ""] for name, (size, _) in files.items()})
    assert damage(saved) is None
    assert changed_file(saved, 0, 1) == "deep/other.json differs from what was saved"


def test_a_checkpoint_is_no_model_with_weights_that_it_was_not_saved_with(tmp_path: Path) -> None:
    saved = save(tmp_path, 2)
    (saved / "notes.txt").write_text("mine")
    require_listed_weights(saved)
    (saved / "pytorch_model.bin").write_text("planted")
    with pytest.raises(UserError, match=r"contains pytorch_model\.bin, which it was not saved with: move it"):
        require_listed_weights(saved)
    (saved / MANIFEST).unlink()  # some other directory
    require_listed_weights(saved)


def test_a_pipe_among_checkpoints_is_not_waited_for(tmp_path: Path) -> None:
    sound, odd = save(tmp_path, 2), save(tmp_path, 4)
    (odd / MANIFEST).unlink()
    os.mkfifo(odd / MANIFEST)
    os.mkfifo(tmp_path / RUN)
    assert foreign(tmp_path) == [] and newest_whole(tmp_path) == sound
    assert find_resume(tmp_path, "auto") == sound


def test_a_host_waits_for_a_checkpoint_that_it_sees_late(tmp_path: Path) -> None:
    """As on NFS, where a host may not see for a minute what another one has renamed."""
    checkpoint = save(tmp_path, 5)
    hidden = checkpoint.rename(tmp_path / "hidden")
    threading.Timer(0.3, lambda: hidden.rename(checkpoint)).start()
    begun = time.monotonic()
    wait_until_seen(checkpoint, "b", seconds=10)
    assert 0.2 < time.monotonic() - begun < 5
    (checkpoint / MANIFEST).unlink()
    with pytest.raises(
        UserError, match=r"host b does not see it whole after 0 s \(manifest\.json is missing\): give an"
    ):
        wait_until_seen(checkpoint, "b", seconds=0.1)
