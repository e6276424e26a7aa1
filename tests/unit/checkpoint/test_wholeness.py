"""A damaged checkpoint is known before it is loaded: what is missing, cut off or changed, and what is whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.checkpoint.directories import OLD_STATE, STATE, Progress, finish, partial_name, read_progress
from harness.checkpoint.integrity import changed_file, damage, damaged, find_resume, newest, newest_whole
from harness.checkpoint.manifest import MANIFEST, contents
from harness.errors import UserError


def save(folder: Path, step: int) -> Path:
    partial = folder / partial_name(step)
    (partial / "deep").mkdir(parents=True)
    (partial / "weights.safetensors").write_bytes(b"w" * 100 + bytes([step]))
    (partial / "deep" / "other.json").write_bytes(b"r" * 50)
    stated = dict(consumed_samples=step, layout="pp1", zero_stage=0, precision="fp32", seed=42, data="d")
    return finish(folder, Progress(step=step, **stated), contents(partial))


def cut(path: Path) -> None:
    (path / "weights.safetensors").write_bytes((path / "weights.safetensors").read_bytes()[:60])


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file cut off": (cut, "weights.safetensors has 60 bytes of 101"),
    "a file missing": (lambda path: (path / "deep" / "other.json").unlink(), "deep/other.json is missing"),
    "its state missing": (lambda path: (path / STATE).unlink(), "state.json is missing"),
    "its list missing": (lambda path: (path / MANIFEST).unlink(), "manifest.json is missing"),
    "its list empty": (lambda path: (path / MANIFEST).write_text(""), "cannot be read"),
    "its list of another form": (lambda path: (path / MANIFEST).write_text('{"format": 1, "files": []}'), "cannot be"),
    "its list of a newer form": (lambda path: change(path / MANIFEST, format=2), "newer version"),
    "another step": (lambda path: change(path / MANIFEST, step=1), "manifest.json is of step 1"),
    "an older form": (lambda path: (path / OLD_STATE).write_text("{}"), "an earlier version of ds-harness wrote it"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_auto_goes_back_to_the_newest_whole_one_and_says_why(case: str, tmp_path: Path) -> None:
    older, newer = save(tmp_path, 2), save(tmp_path, 4)
    assert find_resume(tmp_path, "auto") == newer
    spoil, words = DAMAGE[case]
    spoil(newer)
    assert find_resume(tmp_path, "auto") == older
    (line,) = damaged(tmp_path, older)
    assert str(newer) in line and words in line
    with pytest.raises(UserError, match="no whole checkpoint there") as refused:
        find_resume(tmp_path, str(newer))
    assert words in str(refused.value)
    assert newest(tmp_path, 1, 4) == [older]  # a damaged one is not among those that are kept
    spoil(older)
    if case != "another step":  # which is its own
        assert find_resume(tmp_path, "auto") is None


def test_changed_content_is_found_by_the_rank_whose_share_it_is(tmp_path: Path) -> None:
    older, newer = save(tmp_path, 9), save(tmp_path, 10)
    assert [changed_file(newer, share, 2) for share in (0, 1)] == [None, None]
    (newer / "weights.safetensors").write_bytes(b"x" * 101)
    assert damage(newer) is None
    assert sorted(map(str, (changed_file(newer, share, 2) for share in (0, 1)))) == [
        "None",
        "weights.safetensors differs from what was saved",
    ]
    assert newest_whole(tmp_path, before=newer) == older
    assert newest_whole(tmp_path, before=older) is None


def test_a_later_version_may_say_more(tmp_path: Path) -> None:
    saved = save(tmp_path, 3)
    size = (saved / STATE).stat().st_size
    change(saved / STATE, later=1)
    assert damage(saved) == f"state.json has {(saved / STATE).stat().st_size} bytes of {size}"
    change(saved / MANIFEST, later=1, files={})
    assert damage(saved) is None
    assert read_progress(saved).step == 3


def test_a_renamed_checkpoint_is_known(tmp_path: Path) -> None:
    saved = save(tmp_path, 3)
    saved.rename(tmp_path / "checkpoint-30")
    assert damage(tmp_path / "checkpoint-30") == "manifest.json is of step 3"


@pytest.mark.parametrize("values", [{"counters": []}, {"consumed_samples": "x"}, {"hyperparameters": 1}])
def test_a_state_that_somebody_has_edited_is_one_line(values: dict[str, object], tmp_path: Path) -> None:
    saved = save(tmp_path, 3)
    change(saved / STATE, **values)
    with pytest.raises(UserError, match=rf"state\.json: cannot be read: {next(iter(values))} is "):
        read_progress(saved)
