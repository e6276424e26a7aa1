"""What `ds-harness resolve` prints is a config that DeepSpeed itself, without the harness, starts and trains with."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.pipe import PipelineModule
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from harness.cli import main
from harness.deepspeed.process_wide import avoid_compiling
from tests.support.ranks import here, run_ranks

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).resolve().parents[2]
PRESETS = sorted(path.stem for path in (ROOT / "ds_configs").glob("*.json"))
MODEL = ROOT / "models" / "presets" / "tiny-llama"


def printed(preset: str) -> dict[str, Any]:
    """The config that the command prints, for twice the ranks where two do not make a layout."""
    out = io.StringIO()
    ranks = 4 if preset == "pipeline_3d" else 2
    with contextlib.redirect_stdout(out):
        code = main(["resolve", preset, "--world_size", str(ranks), "--hidden_size", "128", "--format", "json"])
    assert code == 0
    config: dict[str, Any] = json.loads(out.getvalue())
    return config


def train(config: dict[str, Any]) -> tuple[int, bool]:
    """One step of a HuggingFace model; DeepSpeed's global batch, and whether the loss is a number."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODEL))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    ids = torch.arange(16, device=here()).view(1, 16)
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    return engine.train_batch_size(), bool(torch.isfinite(loss))


def train_stages(config: dict[str, Any]) -> tuple[int, bool]:
    """One step of a PipelineModule of two stages."""
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    module = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config, dist_init_required=False)
    batch = (torch.ones(8, 4, device=here()), torch.zeros(8, 4, device=here()))
    loss = engine.train_batch(iter([batch] * engine.gradient_accumulation_steps()))
    return engine.train_batch_size(), bool(torch.isfinite(loss))


def every_preset() -> dict[str, Any]:
    """The outcome of each preset; those that DeepSpeed cuts come last, as it keeps their groups for the process."""
    avoid_compiling()
    configs = {preset: printed(preset) for preset in PRESETS}
    order = sorted(PRESETS, key=lambda preset: "tensor_parallel" in configs[preset])
    return {preset: train(configs[preset]) for preset in order}


def stages() -> tuple[int, bool]:
    """The outcome of the pipeline preset with a PipelineModule."""
    avoid_compiling()
    deepspeed.init_distributed()
    return train_stages(printed("pipeline_checkpointing"))


def test_plain_deepspeed_trains_with_what_every_preset_resolves_to() -> None:
    first, second = run_ranks(2, every_preset)
    assert first == second == dict.fromkeys(PRESETS, (16, True))  # every rank is data-parallel to it


def test_a_pipeline_module_trains_with_what_the_pipeline_preset_resolves_to() -> None:
    assert run_ranks(2, stages) == [(8, True)] * 2
