"""A run goes on from what was saved to the bit, whatever divides its states; what does not fit it is one line."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.checkpoint import training_state
from harness.checkpoint.background_save import BackgroundSave, Target, Writer
from harness.checkpoint.directories import MANIFEST, STATE
from harness.checkpoint.run_lock import unlock_directory
from harness.checkpoint.training_state import EngineState, first_unchanged
from harness.errors import UserError
from harness.topology.groups import Groups
from tests.unit.checkpoint.engines import engine_state, step, values
from tests.unit.checkpoint.saved import progress, save


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """The output directory of a run; its lock is let go of at the end."""
    yield tmp_path / "run"
    unlock_directory(tmp_path / "run")


def written(state: EngineState, run: Path) -> Path:
    at = progress(state.engine.global_steps)
    return BackgroundSave(state, Target(output_dir=run, keep=None), at, Writer(), copy=False).finish()


def assert_alike(first: EngineState, second: EngineState) -> None:
    ours, theirs = values(first), values(second)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize(("ours", "theirs"), [(0, 0), (0, 3), (1, 0), (2, 1), (3, 2), (3, 3)])
def test_the_next_steps_are_those_of_the_run_that_was_saved(ours: int, theirs: int, groups: Groups, run: Path) -> None:
    old, new = engine_state(groups, theirs), engine_state(groups, ours, seed=1)
    step(old, 3)
    said = new.load(written(old, run))
    assert (said.step, new.engine.global_steps, new.engine.micro_steps) == (3, 3, 3)
    assert_alike(old, new)
    step(old, 2)
    step(new, 2)
    for name, tensor in values(old).items():  # of flat tensors other elements are computed together: the last bit
        torch.testing.assert_close(values(new)[name], tensor, rtol=1e-6, atol=1e-7)


def test_a_state_that_no_optimizer_takes_is_not_lost_in_silence(
    groups: Groups, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = engine_state(groups, 1), engine_state(groups, 1, seed=1)
    step(old, 1)
    checkpoint = written(old, run)
    monkeypatch.setattr(training_state, "stored_names", lambda *_: {"exp_avg": "exp_avg", "sum": "exp_avg_sq"})
    with pytest.raises(UserError, match="has the optimizer state exp_avg_sq, but this optimizer keeps exp_avg and sum"):
        new.load(checkpoint)


def test_a_run_in_bf16_goes_on_with_the_weights_that_its_optimizer_steps_on(groups: Groups, run: Path) -> None:
    old, new = engine_state(groups, 1, bf16=True), engine_state(groups, 2, bf16=True, seed=1)
    step(old, 3)
    new.load(written(old, run))
    assert_alike(old, new)
    assert values(new)["first.weight"].dtype is torch.float32
    step(old)
    step(new)
    assert_alike(old, new)


def test_an_engine_that_has_made_steps_goes_back(groups: Groups, run: Path) -> None:
    state = engine_state(groups)
    first = written(state, run)
    start = values(state)
    step(state, 2)
    second, there = written(state, run), values(state)
    step(state, 2)
    far = values(state)
    state.load(second)
    assert all(torch.equal(there[name], tensor) for name, tensor in values(state).items())
    step(state, 2)
    assert all(torch.equal(far[name], tensor) for name, tensor in values(state).items())
    state.load(first)  # to where the optimizer had kept nothing
    assert all(torch.equal(start[name], tensor) for name, tensor in values(state).items())
    assert state.engine.optimizer.state == {} and state.engine.global_steps == 0
    step(state, 4)
    assert all(torch.equal(far[name], tensor) for name, tensor in values(state).items())


# -- what does not fit ---------------------------------------------------------------------------------------


def edited(checkpoint: Path, stem: str, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = checkpoint / f"{stem}.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        pytest.param(
            lambda path: edited(path, "model", lambda tensors: tensors.pop("second.bias")),
            "second.bias is not in the checkpoint: resume with the model that was saved",
            id="a tensor missing",
        ),
        pytest.param(
            lambda path: edited(path, "exp_avg", lambda tensors: tensors.pop("second.bias")),
            "second.bias is not in the checkpoint: resume with the model that was saved",
            id="a state missing",
        ),
        pytest.param(
            lambda path: edited(path, "model", lambda tensors: tensors.update({"first.weight": torch.zeros(3, 4)})),
            r"first.weight has shape (3, 4) in the checkpoint, but (4, 3) in this run",
            id="another shape",
        ),
        pytest.param(lambda path: (path / "exp_avg.safetensors").unlink(), "is not in the checkpoint", id="no file"),
        pytest.param(
            lambda path: cut(path / "model.safetensors"), "model.safetensors: its tensors cannot be read", id="cut off"
        ),
        pytest.param(
            lambda path: (path / "model.safetensors").write_bytes(b""), "its tensors cannot be read", id="an empty file"
        ),
        pytest.param(lambda path: shutil.rmtree(path), "state.json: cannot be read: ", id="it has vanished"),
        pytest.param(lambda path: (path / STATE).write_text("[1]"), "state.json: cannot be read: ", id="a list"),
    ],
)
def test_what_does_not_fit_the_run_is_one_line(
    spoil: Callable[[Path], object], words: str, groups: Groups, run: Path
) -> None:
    old = engine_state(groups)
    step(old)
    spoil(path := written(old, run))
    with pytest.raises(UserError) as told:
        engine_state(groups).load(path)
    assert words in str(told.value) and str(path) in str(told.value) and "\n" not in str(told.value)


def test_more_than_the_model_has_is_left_alone(groups: Groups, run: Path) -> None:
    old, new = engine_state(groups), engine_state(groups, seed=1)
    edited(path := written(old, run), "model", lambda tensors: tensors.update(more=torch.zeros(5)))
    new.load(path)
    assert_alike(old, new)


def test_weights_of_another_dtype_are_read_as_this_runs_own(groups: Groups, run: Path) -> None:
    old, new = engine_state(groups), engine_state(groups, seed=1)
    edited(
        path := written(old, run), "model", lambda found: found.update({"first.bias": found["first.bias"].bfloat16()})
    )
    new.load(path)
    assert torch.equal(values(new)["first.bias"], values(old)["first.bias"].bfloat16().float())


# -- which one -----------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    path.write_bytes(b"x" + path.read_bytes()[1:])


@pytest.mark.usefixtures("groups")
def test_a_changed_one_is_passed_over_and_named(run: Path) -> None:
    paths = [save(run, step) for step in (1, 2, 3)]
    assert first_unchanged(paths[2], run, auto=True) == (paths[2], [])
    flip(paths[2] / "model.safetensors")
    (paths[1] / MANIFEST).unlink()
    words = f"{paths[2]} is damaged (model.safetensors differs from what was saved)"
    assert first_unchanged(paths[2], run, auto=True) == (paths[0], [words])
    with pytest.raises(UserError, match=r"model\.safetensors differs .*: resume from another checkpoint"):
        first_unchanged(paths[2], run, auto=False)
    flip(paths[0] / "deep" / "other.json")
    assert first_unchanged(paths[2], run, auto=True)[0] is None
    assert first_unchanged(None, run, auto=True) == (None, [])


@pytest.mark.usefixtures("groups")
def test_one_that_vanishes_before_it_is_read_is_passed_over(run: Path) -> None:
    older, newer = save(run, 1), save(run, 2)
    shutil.rmtree(newer)
    chosen, (words,) = first_unchanged(newer, run, auto=True)
    assert chosen == older and f"{newer} is damaged" in words
    elsewhere = save(run.with_name("elsewhere"), 1)
    flip(elsewhere / "model.safetensors")  # to which a rollback would go back
    assert first_unchanged(elsewhere, run, auto=True)[0] is None


def test_files_that_were_not_saved_do_not_exist_for_a_reader(groups: Groups, run: Path) -> None:
    state = engine_state(groups)
    step(state, 2)
    folder, wanted = written(state, run), values(state)
    for stem in ("model", "exp_avg", "exp_avg_sq"):
        planted = {name: tensor + 1 for name, tensor in load_file(folder / f"{stem}.safetensors").items()}
        for name in (f"{stem}-00001-of-00001.safetensors", f"{stem}-00001-of-00002.safetensors"):
            save_file(planted, folder / name)
    other = engine_state(groups, seed=1)
    other.load(folder)
    assert_alike(other, state)
    step(other)
    step(state)
    assert_alike(other, state)
    assert wanted.keys() == values(other).keys()
