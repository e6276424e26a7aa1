"""The checksums of a base model tell its weights, wherever they lie and in whatever dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig

from harness.extras import lora
from harness.extras.lora import base_checksums
from harness.hf.skeleton import ModelSource


def source(weights: Any) -> ModelSource:
    return ModelSource(name="base", config=LlamaConfig(), weights=weights)


def test_files_and_memory_agree_and_each_value_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "WHOLE", 100)
    monkeypatch.setattr(lora, "BLOCK", 10)
    torch.manual_seed(0)
    tensors = {"large": torch.randn(30, 20).bfloat16(), "small": torch.randn(9), "none": torch.empty(0, 3)}
    save_file(tensors, tmp_path / "model.safetensors")
    found = base_checksums(source(tmp_path))
    assert sorted(found) == ["large", "none", "small"]
    wide = {name: nn.Parameter(tensor.float()) for name, tensor in tensors.items()}
    assert base_checksums(source({**wide, "buffer": torch.zeros(2)})) == found
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    assert base_checksums(source(tmp_path)) == found
    for name, place in (("large", (0, 0)), ("large", (29, 19)), ("small", (4,))):
        with torch.no_grad():
            wide[name][place] += 1
        assert base_checksums(source(wide))[name] != found[name]


def test_what_is_trained_or_made_from_the_seed_is_left_out() -> None:
    weights = {name: nn.Parameter(torch.ones(2)) for name in ("model.norm.weight", "lm_head.weight")}
    assert list(base_checksums(source(weights), ["lm_head"])) == ["model.norm.weight"]
    assert base_checksums(source(None)) == {}
