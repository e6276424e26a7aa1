"""A cut that is not the model is found out before training, on all ranks alike; a right one is let through.

Two ranks start a Trainer for each case. The wrong plans are what a hand-written file gets wrong: all but
one run without an error, and give numbers that are not the model's.
"""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import PretrainedConfig

from harness import Trainer, TrainingArguments
from harness.console import Console
from harness.errors import UserError
from harness.hf import causal
from harness.hf.locate import PLANS
from harness.verify.tiny_copy import tiny_config
from tests.support.ranks import run_ranks
from tests.support.training import Job, rows

pytestmark = pytest.mark.ranks

MLP = "layers.*.mlp"
NO_SHARES = "no shares of the sequence"  # which its layers would join with all of it
WRONG_STYLES: dict[str, dict[str, str | None]] = {
    "columns in another order": {f"{MLP}.gate_proj": "packed_colwise"},
    "summed twice": {MLP: "all_reduce"},
    "a rule is missing": {f"{MLP}.down_proj": None},
}


def with_plan(changes: dict[str, str | None]) -> PretrainedConfig:
    config = tiny_config("llama")
    plan = {**type(config).base_model_tp_plan, **changes}
    config.base_model_tp_plan = {name: style for name, style in plan.items() if style is not None}
    return config


def cases(folder: str) -> dict[str, Any]:
    parts = json.loads((PLANS / "gpt2.json").read_text())
    parts["styles"]["transformer.h.*.attn.c_attn"]["parts"] = 1
    (Path(folder) / "gpt2.json").write_text(json.dumps(parts))
    wrong = {name: with_plan(changes) for name, changes in WRONG_STYLES.items()}
    shutil.copy(PLANS / "bert.json", folder)
    shared = tiny_config("bert")
    shared.is_decoder = True
    right = {"as declared": with_plan({}), NO_SHARES: shared}
    return {**right, **wrong, "wrong parts": tiny_config("gpt2"), "no decoder": encoder()}


def encoder() -> PretrainedConfig:
    config = tiny_config("bert")
    config.is_decoder = False
    return config


def start_all(names: tuple[str, ...], folder: str) -> dict[str, str]:
    """What a Trainer says to each model: its last word where it starts, the error where it refuses."""
    causal.PLANS = Path(folder)
    configs = cases(folder)
    return {name: start(configs[name], folder, name) for name in names}


def start(config: PretrainedConfig, folder: str, name: str) -> str:
    said = io.StringIO()
    layout = "tp1dp2z0" if name == "no decoder" else "tp2z0"
    config_of_run = Job("", layout).deepspeed_config()
    config_of_run["tensor_parallel"]["sequence_parallel"] = name == NO_SHARES
    arguments = TrainingArguments(deepspeed_config=config_of_run, output_dir=f"{folder}/{name}", verify_plan="on")
    try:
        trainer = Trainer(config, arguments, train_dataset=rows(), console=Console(out=said, error=said, speaks=True))
    except UserError as error:
        return str(error)
    trainer.close()
    return next(line for line in said.getvalue().splitlines() if "tiny" in line).partition(" (")[0]


def require_refused(told: dict[str, str]) -> None:
    """Each cut is told to be another than the model, and by how much if it runs at all."""
    for name, text in told.items():
        assert "split over 2 tensor-parallel ranks, does not match the whole one" in text, name
        assert "correct its plan" in text, name
        assert ("RuntimeError" if name == "a rule is missing" else "of its largest entry") in text, name


def test_a_wrong_cut_is_refused_on_all_ranks_alike(tmp_path: Path) -> None:
    names = ("as declared", NO_SHARES, "a rule is missing")
    told, other = run_ranks(2, start_all, names, str(tmp_path), timeout_s=240)
    assert told == other
    assert told.pop("as declared") == "verified: the sharded model matches the whole one"
    assert "cannot have its sequence split over 2" in (refused := told.pop(NO_SHARES)) and "Error" not in refused
    require_refused(told)


@pytest.mark.thorough
def test_other_wrong_cuts_and_an_encoder_are_refused_too(tmp_path: Path) -> None:
    names = ("wrong parts", "columns in another order", "summed twice", "no decoder")
    told, other = run_ranks(2, start_all, names, str(tmp_path), timeout_s=240)
    assert told == other
    assert "its logits depend on later tokens" in told.pop("no decoder")
    require_refused(told)
