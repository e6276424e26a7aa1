"""A damaged checkpoint is known before it is loaded: what is missing, cut off or changed, and what is whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.checkpoint.commands import checkpoint
from harness.checkpoint.directories import (
    MANIFEST,
    RUN,
    STATE,
    prune,
    read_progress,
    remove,
    set_aside_foreign,
)
from harness.checkpoint.integrity import changed_file, damage, damaged, find_resume, foreign, newest, newest_whole
from harness.errors import UserError
from tests.unit.checkpoint.saved import change, save


def cut(path: Path) -> None:
    (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:60])


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file cut off": (cut, "model.safetensors has 60 bytes of 101"),
    "a file missing": (lambda path: (path / "deep" / "other.json").unlink(), "deep/other.json is missing"),
    "its state missing": (lambda path: (path / STATE).unlink(), "state.json is missing"),
    "its list missing": (lambda path: (path / MANIFEST).unlink(), "manifest.json is missing"),
    "its list empty": (lambda path: (path / MANIFEST).write_text(""), "cannot be read"),
    "its list of another form": (lambda path: (path / MANIFEST).write_text('{"format": 1, "files": []}'), "cannot be"),
    "its list of a newer form": (lambda path: change(path / MANIFEST, format=2), "newer version"),
    "another step": (lambda path: change(path / MANIFEST, step=1), "manifest.json is of step 1"),
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
    (newer / "model.safetensors").write_bytes(b"x" * 101)
    assert damage(newer) is None
    assert sorted(map(str, (changed_file(newer, share, 2) for share in (0, 1)))) == [
        "None",
        "model.safetensors differs from what was saved",
    ]
    assert newest_whole(tmp_path, before=newer) == older
    assert newest_whole(tmp_path, before=older) is None


def test_a_later_version_may_say_more(tmp_path: Path) -> None:
    saved = save(tmp_path, 3)
    size = (saved / STATE).stat().st_size
    change(saved / STATE, later=1)
    assert damage(saved) == f"state.json has {(saved / STATE).stat().st_size} bytes of {size}"
    files = json.loads((saved / MANIFEST).read_text())["files"]
    change(saved / MANIFEST, later=1, files={**files, STATE: [(saved / STATE).stat().st_size, "0" * 32]})
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


def test_auto_leaves_out_what_another_run_has_saved(tmp_path: Path) -> None:
    copied = save(tmp_path, 6, "other")
    assert find_resume(tmp_path, "auto") == copied  # alone in a directory, it is all that there is
    own = [save(tmp_path, step, "ours") for step in (2, 4)]
    assert find_resume(tmp_path, "auto") == own[1]
    assert foreign(tmp_path) == [copied]
    assert find_resume(tmp_path, str(copied)) == copied
    (tmp_path / RUN).write_text('{"run_id": "other"}')  # as it is when a run has gone on from the copied one
    assert find_resume(tmp_path, "auto") == copied
    assert foreign(tmp_path) == own
    assert set_aside_foreign(foreign(tmp_path)) == [(path, tmp_path / f"foreign-{path.name}") for path in own]
    assert foreign(tmp_path) == []
    without = save(tmp_path, 8)  # by an earlier version, which gave no id
    assert find_resume(tmp_path, "auto") == without


def test_a_damaged_checkpoint_of_a_later_step_is_none_of_those_that_are_kept(tmp_path: Path) -> None:
    older, resumed, _ = (save(tmp_path, step) for step in (2, 3, 10))
    assert newest(tmp_path, 1, last_step=3) == [resumed]
    remove(prune(tmp_path, newest(tmp_path, 1, last_step=3)))
    assert resumed.is_dir() and not older.exists()


@pytest.mark.parametrize(
    ("names", "what", "remedy"),
    [
        (
            ("trainer_state.json", "config.json", "model.safetensors", "optimizer.pt"),
            "the HuggingFace Trainer",
            "--model",
        ),
        (("trainer_state.json", "zero_to_fp32.py", "global_step3"), "the HuggingFace Trainer", "zero_to_fp32.py"),
        (("trainer_state.json", "pytorch_model.bin"), "the HuggingFace Trainer", "save_pretrained"),
        (
            ("trainer_state.json", "adapter_config.json", "adapter_model.safetensors"),
            "the HuggingFace Trainer",
            "checkpoint merge",
        ),
        (("adapter_config.json",), "adapters of peft", "ds-harness checkpoint merge"),
        (("latest", "zero_to_fp32.py"), "a checkpoint of DeepSpeed", "zero_to_fp32.py"),
        (("config.json", "model.safetensors.index.json"), "a model", "--model_name_or_path"),
    ],
)
def test_a_directory_of_another_program_is_named_with_what_to_do(
    names: tuple[str, ...], what: str, remedy: str, tmp_path: Path
) -> None:
    other = tmp_path / "checkpoint-3"
    other.mkdir()
    for name in names:
        (other / name).touch()
    with pytest.raises(UserError) as refused:
        find_resume(tmp_path / "out", str(other))
    assert what in str(refused.value) and remedy in str(refused.value)
    with pytest.raises(UserError, match=what):
        checkpoint(["export", str(other), "--output_dir", str(tmp_path / "model")])
    assert find_resume(tmp_path, "auto") is None
    with pytest.raises(UserError, match="name one, such as checkpoint-3"):
        find_resume(tmp_path / "out", str(tmp_path))
