"""A second place for checkpoints: whole there or not there, beside training, and read back where they are lost here."""

from __future__ import annotations

import importlib.util
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
import torch.distributed as dist
from fsspec.implementations.memory import MemoryFileSystem

from harness.arguments import TrainingArguments
from harness.arguments.themes.script import ScriptArguments
from harness.checkpoint.directories import TrainingProgress, contents, finish, partial_name
from harness.checkpoint.integrity import damage, newest_whole
from harness.console import plain_console
from harness.errors import UserError
from harness.extras.pushing import pushing
from harness.extras.pushing.read_back import read_back
from harness.extras.pushing.store import Store
from harness.extras.pushing.uploads import Upload, Uploads
from harness.preflight import check_before_start
from harness.topology.env import LaunchEnv
from harness.training.callbacks import TrainerControl, TrainerState

CONSOLE = plain_console(1)


def checkpoint(output_dir: Path, step: int, run_id: str = "ours") -> Path:
    folder = output_dir / partial_name(step)
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights" * step)
    stated = dict(layout="pp1 x dp1 x tp1", zero_stage=0, precision="fp32", seed=1, data="", optimizer="AdamW")
    progress = TrainingProgress(step=step, consumed_samples=step, run_id=run_id, **stated)
    return finish(output_dir, progress, contents(folder))


@pytest.fixture
def store() -> Iterator[Store]:
    yield Store.at(f"memory://{uuid4().hex}/run")
    MemoryFileSystem.store.clear()


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Ranks agree on how long they wait for copies; `no_run_is_left` ends the group."""
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)


def upload(folder: Path, staged: Path) -> Upload:
    shutil.copytree(folder, staged)
    return Upload(name=folder.name, folder=staged, files=["model.safetensors", "state.json", "manifest.json"])


def test_a_checkpoint_comes_back_as_it_was_where_the_local_one_is_gone(tmp_path: Path, store: Store) -> None:
    uploads = Uploads(store)
    for step in (2, 10):
        uploads.add(upload(checkpoint(tmp_path / "run", step), tmp_path / f"staged-{step}"))
        uploads.wait()
    assert [(done.name, done.problem) for done in uploads.outcomes()] == [
        ("checkpoint-2", None),
        ("checkpoint-10", None),
    ]
    assert not list(tmp_path.glob("staged-*"))
    assert [step for step, _ in store.checkpoints()] == [10, 2]
    assert read_back(store, tmp_path / "run", CONSOLE) is None  # the newest is here
    found = read_back(store, tmp_path / "other", CONSOLE)
    assert found == newest_whole(tmp_path / "other") == tmp_path / "other/checkpoint-10"
    for path in (tmp_path / "run/checkpoint-10").iterdir():
        assert (found / path.name).read_bytes() == path.read_bytes()


def test_what_is_not_whole_there_is_not_resumed(tmp_path: Path, store: Store) -> None:
    uploads = Uploads(store)
    for step in (2, 4, 6, 8):
        folder = checkpoint(tmp_path / "run", step, run_id="theirs" if step == 4 else "ours")
        uploads.copied(upload(folder, tmp_path / f"staged-{step}"))
    store.files.rm_file(store.path("checkpoint-8/manifest.json"))  # as an upload that was cut off leaves it
    store.files.pipe_file(store.path("checkpoint-6/model.safetensors"), b"x" * len(b"weights" * 6))
    assert [step for step, _ in store.checkpoints()] == [6, 4, 2]
    other = tmp_path / "other"
    other.mkdir()
    (other / "run.json").write_text('{"run_id": "ours"}')
    assert read_back(store, other, CONSOLE) == other / "checkpoint-2"
    assert damage(other / "checkpoint-2") is None
    assert [path.name for path in other.iterdir() if path.is_dir()] == ["checkpoint-2"]


class Failing(MemoryFileSystem):
    """A store whose first writes of a file fail, or come out too short."""

    cachable = False
    failures = 0
    log: list[str] = []  # noqa: RUF012

    def put_file(self, lpath: str, rpath: str, *args: object, **kwargs: object) -> None:
        Failing.log.append(rpath.rpartition("/")[2])
        if Failing.failures > 0 and rpath.endswith("state.json"):
            Failing.failures -= 1
            raise TimeoutError("the store is busy")
        super().put_file(lpath, rpath, *args, **kwargs)


@pytest.mark.parametrize(("failures", "problem"), [(2, None), (9, "the store is busy")])
def test_a_copy_is_tried_again_and_its_mark_comes_last(failures: int, problem: str | None, tmp_path: Path) -> None:
    Failing.failures, Failing.log = failures, []
    store = Store(url="memory://x", files=Failing(), root=f"/{uuid4().hex}")
    outcome = Uploads(store, waits=(0.01, 0.01)).copied(upload(checkpoint(tmp_path, 2), tmp_path / "staged"))
    assert outcome.problem == problem
    assert Failing.log.count("state.json") == 3
    assert Failing.log.count("manifest.json") == (problem is None)
    assert bool(list(store.checkpoints())) == (problem is None)


def test_a_slow_place_delays_no_step_and_gets_the_newest(tmp_path: Path) -> None:
    class Slow(MemoryFileSystem):
        cachable = False

        def put_file(self, *args: object, **kwargs: object) -> None:
            time.sleep(0.2)
            super().put_file(*args, **kwargs)

    store = Store(url="memory://x", files=Slow(), root=f"/{uuid4().hex}")
    uploads, begun = Uploads(store), time.monotonic()
    for step in (2, 4, 6):
        uploads.add(upload(checkpoint(tmp_path, step), tmp_path / f"staged-{step}"))
        time.sleep(0.05)
    assert time.monotonic() - begun < 0.5
    assert not uploads.wait(0.01)  # the ranks take turns: another one must not wait for all of it
    assert uploads.wait()
    assert [step for step, _ in store.checkpoints()] == [6, 2]
    left_out, *done = sorted(uploads.outcomes(), key=lambda each: each.problem is None)
    assert (left_out.name, left_out.problem) == ("checkpoint-4", "checkpoint-6 was there before its turn")
    assert [each.problem for each in done] == [None, None]


@pytest.mark.usefixtures("one_rank")
def test_the_callback_survives_the_runs_own_limit_and_lists_copies_in_run_json(tmp_path: Path) -> None:
    output_dir, bucket = tmp_path / "run", tmp_path / "bucket"
    args = TrainingArguments(output_dir=str(output_dir), push_checkpoints_to=f"file://{bucket}")
    callback, state, control = pushing(args, LaunchEnv(), CONSOLE), TrainerState(), TrainerControl()
    output_dir.mkdir()
    (output_dir / "run.json").write_text('{"run_id": "ours"}')
    (output_dir / "pushing-checkpoint-1").mkdir()  # a killed process left it
    callback.on_train_begin(args, state, control)
    folder = checkpoint(output_dir, 2)
    callback.on_save(args, state, control, checkpoint=folder)
    shutil.rmtree(folder)
    callback.on_train_end(args, state, control)
    assert damage(bucket / "checkpoint-2") is None
    (output_dir / "model.safetensors").write_bytes(b"weights")
    (output_dir / "config.json").write_text("{}")
    callback.copy_model(output_dir)
    assert json.loads((bucket / "pushed.json").read_text()) == {"files": {"config.json": 2, "model.safetensors": 7}}
    pushed = json.loads((output_dir / "run.json").read_text())["pushed"]
    assert [row["name"] for row in pushed["complete"]] == ["checkpoint-2", "the model"]
    assert sorted(path.name for path in output_dir.iterdir()) == ["config.json", "model.safetensors", "run.json"]


def test_a_named_checkpoint_is_read_back_if_the_run_has_lost_it(tmp_path: Path) -> None:
    output_dir, bucket = tmp_path / "run", tmp_path / "bucket"
    for step in (2, 4):
        checkpoint(output_dir, step)
    shutil.copytree(output_dir, bucket)
    shutil.copytree(output_dir, tmp_path / "other")
    args = TrainingArguments(output_dir=str(output_dir), push_checkpoints_to=f"file://{bucket}")
    ours = output_dir / "checkpoint-2"
    shutil.rmtree(ours)
    shutil.rmtree(tmp_path / "other/checkpoint-2")
    pushing(args, LaunchEnv(rank=1, world_size=2), CONSOLE).read_back(ours)  # rank 0 does it for all
    assert not ours.exists()
    callback = pushing(args, LaunchEnv(), CONSOLE)
    callback.read_back(tmp_path / "other/checkpoint-2")  # the store is not that run's
    assert not ours.exists()
    callback.read_back(str(ours))
    assert damage(ours) is None
    assert not (tmp_path / "other/checkpoint-2").exists()
    with pytest.raises(UserError, match=r"checkpoint-6: no whole checkpoint there, nor in file://"):
        callback.read_back(output_dir / "checkpoint-6")


def test_a_lost_checkpoint_ends_a_run_before_it_starts_only_without_a_second_place(tmp_path: Path) -> None:
    lost = tmp_path / "run/checkpoint-2"
    common = {"output_dir": str(lost.parent), "deepspeed_config": {"train_batch_size": 2}, "max_steps": 4}
    script = ScriptArguments(model_name_or_path="tiny-llama")
    pushed = TrainingArguments(
        **common, resume_from_checkpoint=str(lost), push_checkpoints_to=f"file://{tmp_path}/bucket"
    )
    check_before_start(script, pushed, LaunchEnv())
    assert pushed.rank_0_finds_checkpoint  # the other ranks wait for what it reads back
    alone = TrainingArguments(**common, resume_from_checkpoint=str(lost))
    assert not alone.rank_0_finds_checkpoint
    with pytest.raises(UserError, match=r"checkpoint-2: no whole checkpoint there"):
        check_before_start(script, alone, LaunchEnv())


@pytest.mark.parametrize(("url", "package"), [("gs://bucket/run", "gcsfs"), ("s3://key:secret@bucket/run", "s3fs")])
def test_a_store_whose_package_is_missing_ends_a_run_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, package: str
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else found(name))
    args = TrainingArguments(str(tmp_path), deepspeed_config={"train_batch_size": 2}, push_checkpoints_to=url)
    with pytest.raises(UserError) as refused:
        check_before_start(ScriptArguments(model_name_or_path="tiny-llama"), args, LaunchEnv())
    assert "secret" not in str(refused.value) and str(refused.value).endswith(
        f"{url[:2]}:// needs {package}, which is not installed: pip install {package}"
    )


@pytest.mark.usefixtures("one_rank")
def test_a_checkpoint_that_a_killed_process_has_not_copied_is_copied_by_the_next(tmp_path: Path) -> None:
    output_dir, bucket = tmp_path / "run", tmp_path / "bucket"
    checkpoint(output_dir, 2)
    args = TrainingArguments(output_dir=str(output_dir), push_checkpoints_to=f"file://{bucket}")
    callback, state = pushing(args, LaunchEnv(), CONSOLE), TrainerState(global_step=2)
    callback.on_train_begin(args, state, TrainerControl())
    callback.on_train_end(args, state, TrainerControl())
    assert damage(bucket / "checkpoint-2") is None


@pytest.mark.usefixtures("one_rank")
def test_a_resumed_run_keeps_what_an_earlier_process_said_of_its_copies(tmp_path: Path) -> None:
    output_dir = tmp_path / "run"
    args = TrainingArguments(output_dir=str(output_dir), push_checkpoints_to=f"file://{tmp_path}/bucket")
    for step in (2, 4):
        checkpoint(output_dir, step)
        callback, state = pushing(args, LaunchEnv(), CONSOLE), TrainerState(global_step=step)
        (output_dir / "run.json").write_text("{}")  # as each process writes it anew
        callback.on_train_begin(args, state, TrainerControl())
        callback.on_train_end(args, state, TrainerControl())
    rows = json.loads((output_dir / "run.json").read_text())["pushed"]["complete"]
    assert [row["name"] for row in rows] == ["checkpoint-2", "checkpoint-4"]
    assert all(row["bytes"] > 0 and row["seconds"] >= 0 for row in rows)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("bucket/run", r"^--push_checkpoints_to bucket/run: give a URL, as s3://bucket/run"),
        ("s3://bucket/run", r"^--push_checkpoints_to s3://bucket/run: cannot be used: .*s3fs"),
        ("nothing://bucket", r"^--push_checkpoints_to nothing://bucket: cannot be used: Protocol not known: nothing"),
        ("file:///proc/run", r"^--push_checkpoints_to file:///proc/run: cannot be written: No such file or directory"),
    ],
)
def test_a_place_that_cannot_be_used_is_one_line_before_the_first_step(url: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words) as error:
        pushing(TrainingArguments(output_dir=str(tmp_path), push_checkpoints_to=url), LaunchEnv(), CONSOLE)
    assert "\n" not in str(error.value)
