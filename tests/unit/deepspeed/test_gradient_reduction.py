"""A bucket of ZeRO's gradients is summed where it lies, if it is one run of memory; else as DeepSpeed does."""

import pytest
import torch
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from harness.deepspeed.gradient_reduction import reduce_in_place


def summed_by(bucket: list[Tensor]) -> list[Tensor]:
    """What DeepSpeed's own reduction is given for a bucket."""
    given: list[Tensor] = []
    optimizer = DeepSpeedZeroOptimizer.__new__(DeepSpeedZeroOptimizer)
    optimizer.allreduce_bucket = lambda tensors, *_, **__: given.extend(tensors)
    reduce_in_place(optimizer)
    optimizer.allreduce_bucket(bucket, torch.float32, divide=False)
    return given


def test_neighbours_are_one_tensor_of_their_memory() -> None:
    memory = torch.arange(24.0)
    (whole,) = summed_by([memory[2:8], memory[8:20].view(3, 4), memory[20:21]])
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
def test_others_are_left_to_deepspeed(bucket: list[Tensor]) -> None:
    given = summed_by(bucket)
    assert [id(tensor) for tensor in given] == [id(tensor) for tensor in bucket]


def test_other_optimizers_are_left_alone() -> None:
    optimizer = torch.optim.AdamW([torch.zeros(2, requires_grad=True)])
    reduce_in_place(optimizer)
    assert not hasattr(optimizer, "allreduce_bucket")
