"""How a script goes on: from its newest checkpoint, in the best layout for the ranks that are left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.checkpoint.directories import contents, write_manifest
from harness.errors import UserError
from harness.resilience.script import Script


def script(*flags: object) -> Script:
    return Script(["scripts/train.py", "--max_steps", "9", *map(str, flags)])


@pytest.mark.parametrize(
    ("config", "wanted", "layouts"),
    [
        (
            "pipeline_3d",
            8,
            {7: "pp2 x dp1 x tp2", 4: "pp2 x dp1 x tp2", 3: "pp1 x dp1 x tp2", 1: "pp1 x dp1 x tp1"},
        ),
        ("zero3", 4, {3: "pp1 x dp2 x tp1", 1: "pp1 x dp1 x tp1"}),
        ("tensor_parallel", 4, {3: "pp1 x dp1 x tp2"}),
    ],
)
def test_fewer_ranks_give_up_data_parallelism_then_stages_then_tensor_ranks(
    config: str, wanted: int, layouts: dict[int, str]
) -> None:
    for ranks, layout in layouts.items():
        start = script("--deepspeed_config", config, "--gradient_accumulation_steps", 2).on_fewer(wanted, ranks)
        assert start is not None and str(start.layout) == layout
        words = list(start.words)
        batch = int(words[words.index("--global_batch_size") + 1])
        before = {"pipeline_3d": 8 * 2 * 2, "zero3": 8 * 2 * 4, "tensor_parallel": 8 * 2 * 2}[config]
        assert batch == before and "--gradient_accumulation_steps" not in words


def test_numbers_in_the_config_give_way_only_where_the_batch_stays(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    flags = ["--deepspeed_config", config, "--output_dir", tmp_path / "run"]
    config.write_text(json.dumps({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}))
    start = script(*flags).on_fewer(3, 2)  # 36 samples: 4 x 9 on one rank, but not 4 x 4.5 on two
    assert start is not None and start.ranks == 1 and start.words[-1] == "36"
    config.write_text(json.dumps({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 4}))
    start = script(*flags).on_fewer(3, 2)
    assert start is not None and start.ranks == 1
    config.write_text(json.dumps({"train_batch_size": "twelve"}))
    assert script(*flags).on_fewer(3, 2) is None


def test_a_script_of_other_arguments_keeps_its_ranks() -> None:
    other = Script(["mine.py", "--depth", "3"])
    assert other.output_dir is None and other.on_fewer(4, 2) is None
    assert other.again(other.first(4)).words == ("mine.py", "--depth", "3", "--resume_from_checkpoint", "auto")


def test_it_goes_on_from_its_own_checkpoints_once_there_are_some(tmp_path: Path) -> None:
    elsewhere = script("--output_dir", tmp_path, "--resume_from_checkpoint", "other/checkpoint-3")
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert elsewhere.again(elsewhere.first(2)).words == elsewhere.words
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.1.jsonl"]  # the run begins once more
    fresh = script("--output_dir", tmp_path)
    assert fresh.again(fresh.first(2)).words[-2:] == ("--resume_from_checkpoint", "auto")


def saved_checkpoint(folder: Path, step: int) -> None:
    """A whole checkpoint, as far as a restart looks at it."""
    made = folder / f"checkpoint-{step}"
    made.mkdir(parents=True)
    stated = {"step": step, "consumed_samples": 8, "layout": "", "zero_stage": 0, "precision": "fp32", "seed": 1}
    (made / "model.safetensors").touch()
    (made / "state.json").write_text(json.dumps({**stated, "data": ""}))
    write_manifest(made, step, contents(made), "run")


@pytest.mark.parametrize(
    ("words", "of_harness"),
    [
        pytest.param(["--resume_from_checkpoint", "{run}/checkpoint-3"], True, id="resumed"),
        pytest.param(["--resume_from_checkpoint={run}/checkpoint-3"], True, id="resumed with an equals sign"),
        pytest.param(["--overwrite_output_dir"], True, id="overwritten"),
        pytest.param([], True, id="refused"),
        pytest.param(["--resume_from_checkpoint", "elsewhere/checkpoint-9", "--overwrite_output_dir"], True, id="both"),
        pytest.param(["--resume_from_checkpoint", "{run}/checkpoint-3", "--depth", "4"], False, id="script of others"),
    ],
)
def test_a_restart_does_what_was_asked_until_something_is_saved(
    words: list[str], of_harness: bool, tmp_path: Path
) -> None:
    """And does not take the newest checkpoint of the run that was there before."""
    for step in (3, 12):
        saved_checkpoint(tmp_path, step)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    asked = script("--output_dir", tmp_path, *(word.format(run=tmp_path) for word in words))
    assert (asked.args is not None) == of_harness
    assert asked.again(asked.first(2)).words == asked.words
    (tmp_path / "checkpoint-12").rename(tmp_path / "abandoned-checkpoint-12")
    assert asked.again(asked.first(2)).words == asked.words
    saved_checkpoint(tmp_path, 6)
    again = asked.again(asked.first(2)).words
    assert again[-2:] == ("--resume_from_checkpoint", "auto") and again.count("--resume_from_checkpoint") == 1
    assert not any("checkpoint-3" in word for word in again)


def test_a_checkpoint_that_takes_the_place_of_an_earlier_one_is_the_launchs_own(tmp_path: Path) -> None:
    saved_checkpoint(tmp_path, 6)
    asked = script("--output_dir", tmp_path, "--overwrite_output_dir")
    (tmp_path / "checkpoint-6").rename(tmp_path / "foreign-checkpoint-6")
    saved_checkpoint(tmp_path, 6)
    assert asked.again(asked.first(2)).words[-2:] == ("--resume_from_checkpoint", "auto")


def test_checkpoints_of_the_model_alone_serve_no_restart() -> None:
    script().require_resumable()
    with pytest.raises(UserError, match="no run can go on from the checkpoints of --save_only_model"):
        script("--save_only_model").require_resumable()
