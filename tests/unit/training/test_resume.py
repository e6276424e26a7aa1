"""Resuming with other values than those of the checkpoint: which are reported, and where a schedule goes on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime import lr_schedules as own
from torch.optim import lr_scheduler as of_torch
from transformers import get_scheduler

from harness import TrainingArguments, UserError
from harness.checkpoint.directories import (
    TrainingProgress,
    contents,
    finish,
    optimizer_name,
    partial_name,
    set_aside,
)
from harness.checkpoint.integrity import find_resume
from harness.checkpoint.saved_run import SavedRun
from harness.installed import read_run_config
from harness.training.engine.optimizer import advance_schedule
from harness.training.saving.resume import changes, hyperparameters

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "linear": lambda o: get_scheduler("linear", o, 3, 20),
    "cosine": lambda o: get_scheduler("cosine", o, 3, 20),
    "WarmupLR": lambda o: own.WarmupLR(o, warmup_max_lr=0.1, warmup_num_steps=5),
    "WarmupDecayLR": lambda o: own.WarmupDecayLR(o, 20, warmup_max_lr=0.1, warmup_num_steps=5),
    "WarmupCosineLR": lambda o: own.WarmupCosineLR(o, 20, warmup_num_steps=5),
    "LRRangeTest": lambda o: own.LRRangeTest(o, lr_range_test_step_size=3),
    "OneCycle": lambda o: own.OneCycle(o, 1e-3, 1e-1, cycle_first_step_size=4, decay_lr_rate=0.1),
    "CosineAnnealingLR": lambda o: of_torch.CosineAnnealingLR(o, T_max=9),
    "ExponentialLR": lambda o: of_torch.ExponentialLR(o, gamma=0.9),
    "StepLR": lambda o: of_torch.StepLR(o, step_size=3),
    "ReduceLROnPlateau": lambda o: of_torch.ReduceLROnPlateau(o, patience=2),
}


def schedule(name: str) -> Any:
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.AdamW([{"params": [weight]} for weight in weights], lr=0.1)
    return SCHEDULES[name](optimizer)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_new_schedule_goes_to_a_step_as_if_it_had_made_all_of_them(name: str) -> None:
    made, taken = schedule(name), schedule(name)
    given = (8,) if name == "ReduceLROnPlateau" else ()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(7):
            made.step(*given)
        advance_schedule(taken, 7, 8)
        for _ in range(2):
            for one, other in zip(made.optimizer.param_groups, taken.optimizer.param_groups, strict=True):
                assert (one["lr"], one["betas"]) == (other["lr"], other["betas"])
            made.step(*given)
            taken.step(*given)


def values(config: dict[str, Any] | None = None, **arguments: Any) -> dict[str, Any]:
    args = TrainingArguments(deepspeed_config=config, **arguments)
    resolved, steps = read_run_config(args, world_size=1).for_data(args, None)
    return hyperparameters(args, resolved, steps)


def test_what_changed_is_reported_by_the_name_that_the_user_gave() -> None:
    saved = values(max_steps=10, learning_rate=1e-3)
    assert changes(saved, values(max_steps=10, learning_rate=1e-3)) == []
    assert changes({}, saved) == []  # a checkpoint that does not say
    told = changes(saved, values(max_steps=20, learning_rate=5e-4, adam_beta2=0.95, max_grad_norm=0.5))
    assert told == [
        "learning_rate: 0.001 in the checkpoint, 0.0005 in this run, which uses 0.0005",
        "adam_beta2: 0.999 in the checkpoint, 0.95 in this run, which uses 0.95",
        "max_steps: 10 in the checkpoint, 20 in this run, which uses 20",
        "max_grad_norm: 1.0 in the checkpoint, 0.5 in this run, which uses 0.5",
    ]


@pytest.mark.parametrize(
    ("saved", "now", "told"),
    [
        pytest.param({"a": 1}, {"a": 1.0}, [], id="the-same-number-of-another-type"),
        pytest.param({"a": 1}, {"a": "1"}, [], id="the-same-word"),
        pytest.param({"a": None}, {}, ["a: None in the checkpoint, not set in this run"], id="gone"),
        pytest.param(
            {"a": 1}, {"a": 1, "b": 0}, ["b: not set in the checkpoint, 0 in this run, which uses 0"], id="new"
        ),
        pytest.param({"a": 1, "b": 2}, {"b": 2, "a": 1}, [], id="another-order"),
        pytest.param({}, {"a": 1}, [], id="a-checkpoint-that-does-not-say"),
    ],
)
def test_only_other_values_are_changes(saved: dict[str, Any], now: dict[str, Any], told: list[str]) -> None:
    assert changes(saved, now) == told


def test_values_of_the_json_count_like_arguments() -> None:
    section = {"type": "AdamW", "params": {"lr": 5e-4, "betas": [0.9, 0.99], "weight_decay": 0.1}}
    config = {"train_batch_size": 8, "optimizer": section, "scheduler": {"type": "WarmupLR", "params": {}}}
    told = changes(values({"train_batch_size": 8}, max_steps=10), values(config, max_steps=10, learning_rate=5e-4))
    assert [line.partition(":")[0] for line in told] == [
        *("learning_rate", "weight_decay", "adam_beta2", "adam_epsilon"),
        *("lr_scheduler_type", "warmup_steps", "max_steps", "scheduler.type"),
    ]


def saved_by(folder: Path, **changes: Any) -> Path:
    (folder / partial_name(1)).mkdir(parents=True)
    (folder / partial_name(1) / "model.safetensors").touch()
    told = dict(step=1, consumed_samples=8, layout="pp1 x dp1 x tp1", zero_stage=0, precision="fp32", seed=42, data="")
    return finish(folder, TrainingProgress(**{**told, **changes}), contents(folder / partial_name(1)))


def test_the_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    saved = saved_by(tmp_path, optimizer="AdamW")
    args = TrainingArguments()
    plain, _ = read_run_config(args, world_size=1).for_data(args, None)
    SavedRun.read(saved).require_same_optimizer(optimizer_name(plain))
    assert optimizer_name(plain) == "AdamW"
    config = {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    args = TrainingArguments(deepspeed_config=config, learning_rate=0.1)
    other, _ = read_run_config(args, world_size=1).for_data(args, None)
    with pytest.raises(UserError, match="contains the state of AdamW, but this run uses SGD"):
        SavedRun.read(saved).require_same_optimizer(optimizer_name(other))
    elsewhere = saved_by(tmp_path / "adam", optimizer="Adam", layout="pp2", zero_stage=3)
    SavedRun.read(elsewhere).require_same_optimizer("AdamW")


def test_a_checkpoint_of_a_run_elsewhere_does_not_go_on_in_a_used_folder(tmp_path: Path) -> None:
    saved = saved_by(tmp_path / "old")
    assert find_resume(tmp_path / "old", str(saved)) == saved
    assert find_resume(tmp_path / "new", str(saved)) == saved
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="already holds a run"):
        find_resume(tmp_path / "new", str(saved))


def test_metrics_of_an_earlier_run_are_kept_under_a_free_name(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert set_aside(path) is None
    for number, text in ((1, "first"), (2, "second")):
        path.write_text(text)
        assert set_aside(path) == tmp_path / f"metrics.{number}.jsonl"
    assert (tmp_path / "metrics.1.jsonl").read_text() == "first"
    assert not path.exists()


def test_a_run_that_overwrites_begins_afresh_where_another_is(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-5").mkdir()
    with pytest.raises(UserError, match="or --overwrite_output_dir to begin afresh"):
        find_resume(tmp_path, None)
    assert find_resume(tmp_path, None, overwrites=True) is None
