"""Which optimizer is torch's and which DeepSpeed's, and what a GPU needs for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness.errors import UserError
from harness.training.engine import optimizer

GPU, CPU = torch.device("cuda:0"), torch.device("cpu")
HOST = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}


def config(name: str, **sections: Any) -> dict[str, Any]:
    return {"optimizer": {"type": name, "params": {"lr": 0.1}}, **sections}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    programs: set[str] = set()
    monkeypatch.setattr(optimizer.shutil, "which", lambda name, path=None: name if name in programs else None)
    monkeypatch.delenv("CXX", raising=False)
    return programs


def test_adam_needs_no_compiler_on_any_device(installed: set[str]) -> None:
    for device in (GPU, CPU):
        for sections in ({}, HOST):
            assert optimizer.makes_torchs_class(config("AdamW", **sections), device)
            assert optimizer.compiled_optimizer(config("Adam", **sections), device) is None


def test_adam_on_the_host_of_a_gpu_is_deepspeeds_where_it_can_be_compiled(installed: set[str]) -> None:
    installed |= {"c++", "ninja"}
    assert not optimizer.makes_torchs_class(config("AdamW", **HOST), GPU)
    assert optimizer.compiled_optimizer(config("AdamW", **HOST), GPU) == "AdamW"
    assert optimizer.makes_torchs_class(config("AdamW"), GPU) and optimizer.makes_torchs_class(config("Adam"), CPU)


def test_what_compiles_an_optimizer_is_asked_for_in_one_line(installed: set[str]) -> None:
    with pytest.raises(UserError, match=r"^optimizer Lamb is compiled .*: install nvcc and ninja, or use AdamW"):
        optimizer.compiled_optimizer(config("Lamb"), GPU)
    installed |= {"nvcc", "ninja"}
    assert optimizer.compiled_optimizer(config("Lamb"), GPU) == "Lamb"
    with pytest.raises(UserError, match=r"install c\+\+, or use AdamW"):
        optimizer.compiled_optimizer(config("Lion", **HOST), GPU)
    assert optimizer.compiled_optimizer(config("SGD"), GPU) is None
    assert optimizer.compiled_optimizer(config("Lamb"), CPU) is None


def test_parameters_of_deepspeeds_adam_are_those_of_torchs_fused_one() -> None:
    given = {"lr": 0.1, "bias_correction": True, "set_grad_none": True, "weight_decay": 0.2}
    assert optimizer.torchs_options(given) == {"torch_adam": True, "fused": True, "lr": 0.1, "weight_decay": 0.2}
    assert "fused" not in optimizer.torchs_options({"foreach": True})
    assert optimizer.torchs_options({"torch_adam": False}) == {"torch_adam": True, "fused": True}  # its default
    biased = {"optimizer": {"type": "Adam", "params": {"bias_correction": False}}}
    assert not optimizer.makes_torchs_class(biased, GPU)  # torch always corrects
