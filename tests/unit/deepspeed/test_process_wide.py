"""What is changed of DeepSpeed for a whole process."""

from __future__ import annotations

import pytest
import torch
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

from harness.deepspeed.process_wide import ask_torch_for_free_memory, mask_norms_on_the_device


def test_free_memory_is_known_where_devices_are_chosen_by_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = CUDA_Accelerator()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8f6d,GPU-2b1a")
    with pytest.raises(ValueError, match="invalid literal"):  # DeepSpeed's own way to the device
        accelerator._get_nvml_gpu_id(1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (10 + index, 80))
    ask_torch_for_free_memory(accelerator)
    assert accelerator.available_memory(1) == 11


def test_a_norm_that_is_not_finite_is_marked_as_deepspeed_does(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime.zero import stage_1_and_2

    norms = [torch.tensor([3.0, float("inf"), float("nan")]) for _ in range(2)]
    monkeypatch.setattr(stage_1_and_2, "mask_nan_or_inf_with_val_inplace", mark := _of_deepspeed())
    mark(norms[0], device=torch.device("cpu"))
    mask_norms_on_the_device()
    stage_1_and_2.mask_nan_or_inf_with_val_inplace(norms[1], device=torch.device("cpu"))
    assert norms[0].tolist() == norms[1].tolist() == [3.0, -1.0, -1.0]


def _of_deepspeed() -> object:
    from deepspeed.runtime.utils import mask_nan_or_inf_with_val_inplace

    return mask_nan_or_inf_with_val_inplace
