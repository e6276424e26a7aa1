"""The cells of the matrix: how the files that a family writes are compared. No family is run here."""

from __future__ import annotations

import torch
from safetensors.torch import save_file

from harness.verify.trials.cells import stored_difference


def test_directories_are_compared_to_the_bit(tmp_path):
    wanted = {"a": torch.ones(2), "b": torch.zeros(3)}
    cases = {
        "same": (wanted, None),
        "less": ({"a": torch.ones(2)}, "the export lacks b (1 in all)"),
        "more": ({**wanted, "c": torch.ones(1)}, "the export has c, which it should not (1 in all)"),
        "other": ({**wanted, "a": torch.ones(2).nextafter(torch.zeros(2))}, "a has other values"),
        "half": ({**wanted, "a": torch.ones(2).half()}, "a is torch.float16 (2,) instead of torch.float32 (2,)"),
    }
    for name, (tensors, _) in cases.items():
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    for name, (_, difference) in cases.items():
        assert stored_difference(tmp_path / "same", tmp_path / name) == difference
