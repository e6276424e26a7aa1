"""A bucket of ZeRO-2's gradients is summed where it lies, if it is one run of memory; else as DeepSpeed does."""

import pytest
import torch
from torch import Tensor

from harness.deepspeed.update import joined


def test_neighbours_are_one_tensor_of_their_memory() -> None:
    memory = torch.arange(24.0)
    whole = joined([memory[2:8], memory[8:20].view(3, 4), memory[20:21]])
    assert whole is not None
    assert torch.equal(whole, memory[2:21]) and whole.data_ptr() == memory[2:].data_ptr()
    whole.zero_()
    assert memory.tolist() == [0.0, 1.0, *[0.0] * 19, 21.0, 22.0, 23.0]


MEMORY = torch.arange(24.0)


@pytest.mark.parametrize(
    "bucket",
    [
        [MEMORY[:4], MEMORY[5:8]],
        [MEMORY[4:8], MEMORY[:4]],
        [MEMORY[:4], torch.zeros(4)],
        [MEMORY[:6].view(2, 3).t(), MEMORY[6:9]],
        [MEMORY[:8:2], MEMORY[4:6]],
    ],
    ids=["a gap", "another order", "two memories", "turned", "every second"],
)
def test_others_are_copied_by_deepspeed(bucket: list[Tensor]) -> None:
    assert joined(bucket) is None
