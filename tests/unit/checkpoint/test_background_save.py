"""A checkpoint is written while training goes on: of the step that saved, whole, or not there at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from harness.checkpoint.background_save import BackgroundSave, Target, Writer
from harness.checkpoint.directories import numbered, partial_name, read_manifest, read_progress
from harness.checkpoint.integrity import changed_file, damage
from harness.checkpoint.run_lock import lock_directory, unlock_directory
from harness.checkpoint.tensors import tensor_writer
from harness.checkpoint.tensors.not_saved import NotSaved
from harness.checkpoint.tensors.whole_tensors import PlannedFiles
from harness.errors import UserError
from harness.topology.groups import Groups
from tests.unit.checkpoint.engines import engine_state, step, values
from tests.unit.checkpoint.saved import progress, save
from tests.unit.training.full_disk import full_disk

STATES = ["exp_avg", "exp_avg_sq"]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """The output directory of a run; its lock is let go of at the end."""
    yield tmp_path / "run"
    unlock_directory(tmp_path / "run")


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_steps_that_follow_do_not_change_what_is_saved(zero_stage: int, groups: Groups, run: Path) -> None:
    state = engine_state(groups, zero_stage)
    step(state, 2)
    wanted = values(state)
    saving = BackgroundSave(state, Target(output_dir=run, keep=None), progress(2), Writer())
    step(state, 3)
    assert saving.finish() == run / "checkpoint-2"
    found = load_file(run / "checkpoint-2" / "model.safetensors")
    assert sorted(found) == sorted(wanted) and "cache" not in found
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
    said = read_progress(run / "checkpoint-2")
    assert (said.optimizer_states, said.counters) == (STATES, {"step": 2.0})
    assert damage(saving.path) is None and changed_file(saving.path, 0, 1) is None


@pytest.mark.parametrize("plant", [Path.touch, lambda path: path.symlink_to("nowhere")], ids=["file", "link"])
def test_what_has_the_name_of_the_unfinished_one_makes_room(
    plant: Callable[[Path], object], groups: Groups, run: Path
) -> None:
    run.mkdir(exist_ok=True)
    plant(run / partial_name(0))
    saving = BackgroundSave(engine_state(groups), Target(output_dir=run, keep=None), progress(0), Writer())
    assert damage(saving.finish()) is None


def test_it_has_its_name_when_all_is_written_and_not_before(groups: Groups, run: Path) -> None:
    state = engine_state(groups)
    saving = BackgroundSave(state, Target(output_dir=run, keep=None), progress(1), Writer())
    phases = 1
    while not saving.advance():
        assert numbered(run) == [] or phases == 3
        phases += 1
    assert phases == 4 and [step for step, _ in numbered(run)] == [1]
    assert not saving.is_busy
    saving.wait(-1.0)  # no time is left


def test_before_the_first_step_there_are_weights_alone(groups: Groups, run: Path) -> None:
    path = BackgroundSave(engine_state(groups), Target(output_dir=run, keep=None), progress(0), Writer()).finish()
    assert sorted(read_manifest(path).files) == ["model.safetensors", "state.json"]
    assert read_progress(path).optimizer_states == []


def test_a_checkpoint_of_the_model_alone_says_so(groups: Groups, run: Path) -> None:
    state = engine_state(groups)
    step(state)
    path = BackgroundSave(state, Target(output_dir=run, keep=None, model_only=True), progress(1), Writer()).finish()
    assert sorted(read_manifest(path).files) == ["model.safetensors", "state.json"]
    assert read_progress(path).model_only


def test_other_files_of_the_run_are_part_of_it(groups: Groups, run: Path) -> None:
    def write(folder: Path) -> None:
        (folder / "tokenizer").mkdir()
        (folder / "tokenizer" / "größe.json").write_text("{}")

    target = Target(output_dir=run, keep=None, write_others=write)
    path = BackgroundSave(engine_state(groups), target, progress(0), Writer()).finish()
    assert "tokenizer/größe.json" in read_manifest(path).files


def saved_each(groups: Groups, target: Target, steps: list[int]) -> list[int]:
    """Save at these steps, one after the other; return those that remain."""
    state, writer = engine_state(groups), Writer()
    for number in steps:
        BackgroundSave(state, target, progress(number), writer, copy=False).finish()
    writer.wait()
    return [step for step, _ in numbered(target.output_dir)]


@pytest.mark.parametrize(
    ("keep", "best", "left"),
    [
        pytest.param(None, None, [1, 2, 3, 10], id="all"),
        pytest.param(1, None, [10], id="the newest"),
        pytest.param(2, None, [3, 10], id="two"),
        pytest.param(9, None, [1, 2, 3, 10], id="more than there are"),
        pytest.param(2, 1, [1, 10], id="the best one counts"),
        pytest.param(1, 2, [2, 10], id="the newest and the best remain in any case"),
        pytest.param(2, 3, [3, 10], id="the best one is among the newest"),
        pytest.param(2, 7, [3, 10], id="the best one is gone"),
    ],
)
def test_as_many_remain_as_are_asked_for(
    keep: int | None, best: int | None, left: list[int], groups: Groups, run: Path
) -> None:
    of_best = None if best is None else run / f"checkpoint-{best}"
    assert saved_each(groups, Target(output_dir=run, keep=keep, best=of_best), [1, 2, 3, 10]) == left
    assert sorted(path.name for path in run.iterdir()) == sorted([*(f"checkpoint-{n}" for n in left), "run.lock"])


def test_what_a_killed_run_has_left_makes_room(groups: Groups, run: Path) -> None:
    for name in (partial_name(1), "writing-removed-5"):
        (run / name / "deep").mkdir(parents=True)
        (run / name / "deep" / "left").write_text("left")
    save(run, 2)  # of a later step than the run has come to: it stays
    assert saved_each(groups, Target(output_dir=run, keep=1), [1]) == [1, 2]
    assert sorted(read_manifest(run / "checkpoint-1").files) == ["model.safetensors", "state.json"]
    assert not list(run.glob("writing-*"))


# -- a disk that is full, or breaks --------------------------------------------------------------------------


def not_saved(groups: Groups, run: Path) -> str:
    """Fail to save step 2 beside a whole checkpoint of step 1; return the words, when all is as it was."""
    state, writer = engine_state(groups), Writer()
    step(state, 2)
    with pytest.raises(NotSaved) as told:
        BackgroundSave(state, Target(output_dir=run, keep=1), progress(2), writer).finish()
    assert [step for step, _ in numbered(run)] == [1] and damage(run / "checkpoint-1") is None
    assert not list(run.glob("writing-*")) and "\n" not in str(told.value)
    return str(told.value)


@pytest.mark.parametrize("fails_at", [1, 2, 3])
@pytest.mark.parametrize("call", ["pwrite", "reserve", "fsync"])
def test_a_disk_that_fails_at_any_call_leaves_the_older_ones(
    call: str, fails_at: int, groups: Groups, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run, 1)
    lock_directory(run)  # it writes, too
    owner: object = tensor_writer if call == "reserve" else os
    real, done = getattr(owner, call), 0

    def count(*arguments: object) -> object:
        nonlocal done
        done += 1
        if done == fails_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(owner, call, count)
        assert "No space left on device" in not_saved(groups, run)
    assert saved_each(groups, Target(output_dir=run, keep=1), [3]) == [3]  # there is room again


def test_a_full_disk_says_how_much_room_is_missing(groups: Groups, run: Path) -> None:
    save(run, 1)
    with full_disk(450):  # the weights take more
        words = not_saved(groups, run)
    assert "model.safetensors: " in words and "bytes cannot be written: File too large" in words
    assert f"are free in {run})" in words


@pytest.mark.parametrize("where", ["wait", "copied", "write"])
@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("can't start new thread"),
    ],
)
def test_a_host_without_memory_loses_the_save_and_not_the_run(
    where: str, error: Exception, groups: Groups, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run, 1)

    def fail(*_: object) -> None:
        raise error

    state, writer = engine_state(groups), Writer()
    with monkeypatch.context() as patched:
        patched.setattr(PlannedFiles if where == "write" else Writer, where, fail)
        with pytest.raises(NotSaved, match=r"rank 0 has no memory for it: [^(]*$"):
            BackgroundSave(state, Target(output_dir=run, keep=1), progress(2), writer).finish()
    assert [step for step, _ in numbered(run)] == [1] and not list(run.glob("writing-*"))
    BackgroundSave(state, Target(output_dir=run, keep=1), progress(3), writer).finish()
    writer.wait()
    assert [step for step, _ in numbered(run)] == [3]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "config.json"), r"config\.json: No such file or"),
        (Exception("No space left on device (os error 28)"), "rank 0: No space left on device"),  # as tokenizers does
        (KeyError("eos"), "rank 0: KeyError: 'eos'"),
        (UnicodeEncodeError("utf-8", "\udcff", 0, 1, "surrogates not allowed"), "rank 0: UnicodeEncodeError: "),
    ],
)
def test_whatever_others_raise_for_their_files_is_not_saved(
    error: Exception, words: str, groups: Groups, run: Path
) -> None:
    def write(folder: Path) -> None:
        (folder / "tokenizer.json").write_bytes(bytes(5000))
        raise error

    with pytest.raises(NotSaved, match=rf"{words}.*\(it needs 5,\d{{3}} bytes, .* are free in {run}\)"):
        target = Target(output_dir=run, keep=None, write_others=write)
        BackgroundSave(engine_state(groups), target, progress(1), Writer())
    assert not list(run.glob("*checkpoint*"))


def test_a_directory_that_vanishes_meanwhile_is_one_line_and_can_be_saved_to_again(groups: Groups, run: Path) -> None:
    state, writer = engine_state(groups), Writer()
    saving = BackgroundSave(state, Target(output_dir=run, keep=None), progress(1), writer)
    saving.advance()
    run.rename(run.with_name("moved"))
    with pytest.raises(NotSaved, match=rf"are free in {run.parent}\)"):
        saving.finish()
    again = BackgroundSave(state, Target(output_dir=run, keep=None), progress(2), writer)
    assert damage(again.finish()) is None
    assert again.number == saving.number + 1


def test_a_tensor_that_no_file_holds_is_refused_before_anything_is_written(groups: Groups, run: Path) -> None:
    state = engine_state(groups)
    state.engine.module.register_buffer("odd", torch.zeros(2, dtype=torch.complex128))
    words = r"odd is of torch\.complex128, which cannot be saved: use another dtype"
    with pytest.raises(UserError, match=words):
        state.require_savable()  # before the first step
    with pytest.raises(UserError, match=words):
        BackgroundSave(state, Target(output_dir=run, keep=None), progress(1), Writer())
    assert not run.exists()


def test_what_another_host_reads_is_synced_first(groups: Groups, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    real = tensor_writer.OpenFiles.sync
    monkeypatch.setattr(tensor_writer.OpenFiles, "sync", lambda self: (order.append("sync"), real(self)))
    for one_host in (True, False):
        state = replace(engine_state(groups), one_host=one_host)
        BackgroundSave(state, Target(output_dir=run, keep=None), progress(1), Writer()).finish()
        order.append("saved")
    assert order == ["sync", "saved", "sync", "sync", "saved"]
