"""A damaged checkpoint is known before it is loaded: what is missing, cut off or changed, and what is whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.checkpoint.directories import STATE, Progress, finish, partial_name, read_progress
from harness.checkpoint.integrity import changed_file, contents, damage, damaged, find_resume, newest, newest_whole
from harness.errors import UserError


def save(folder: Path, step: int) -> Path:
    partial = folder / partial_name(step)
    (partial / "deep").mkdir(parents=True)
    (partial / "weights.pt").write_bytes(b"w" * 100 + bytes([step]))
    (partial / "deep" / "random.pt").write_bytes(b"r" * 50)
    stated = dict(consumed_samples=step, layout="pp1", zero_stage=0, precision="fp32", seed=42, data="d")
    return finish(folder, Progress(step=step, files=contents(partial), **stated))


def cut(path: Path) -> None:
    (path / "weights.pt").write_bytes((path / "weights.pt").read_bytes()[:60])


def empty(path: Path) -> None:
    (path / STATE).write_text("")


def state(**changes: object) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        (path / STATE).write_text(json.dumps({**json.loads((path / STATE).read_text()), **changes}))

    return change


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file cut off": (cut, "weights.pt has 60 bytes of 101"),
    "a file missing": (lambda path: (path / "deep" / "random.pt").unlink(), "deep/random.pt is missing"),
    "its list missing": (lambda path: (path / STATE).unlink(), "trainer_state.json is missing"),
    "its list empty": (empty, "cannot be read"),
    "its list another thing": (state(files=[]), r"cannot be read: files is []"),
    "its samples a word": (state(consumed_samples="x"), "cannot be read: consumed_samples is 'x'"),
    "another step": (state(step=1), "trainer_state.json is of step 1"),
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
    assert newest(tmp_path, 1) == [older]  # a damaged one is not among those that are kept
    spoil(older)
    if case != "another step":  # which is its own
        assert find_resume(tmp_path, "auto") is None


def test_changed_content_is_found_by_the_rank_whose_share_it_is(tmp_path: Path) -> None:
    older, newer = save(tmp_path, 9), save(tmp_path, 10)
    assert [changed_file(newer, share, 2) for share in (0, 1)] == [None, None]
    (newer / "weights.pt").write_bytes(b"x" * 101)
    assert damage(newer) is None
    assert sorted(map(str, (changed_file(newer, share, 2) for share in (0, 1)))) == [
        "None",
        "weights.pt differs from what was saved",
    ]
    assert newest_whole(tmp_path, before=newer) == older
    assert newest_whole(tmp_path, before=older) is None


def test_a_checkpoint_that_lists_no_files_or_says_more_than_is_known_is_read(tmp_path: Path) -> None:
    saved = save(tmp_path, 3)
    stated = json.loads((saved / STATE).read_text())
    (saved / STATE).write_text(json.dumps({**stated, "files": {}, "of a later version": 1}))
    assert damage(saved) is None
    assert read_progress(saved).step == 3
    assert changed_file(saved, 0, 1) is None
