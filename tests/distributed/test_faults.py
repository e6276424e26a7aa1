"""A rank that is stopped, killed, loops, ends early or sleeps, in several layouts: the others name it, and all end."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from harness import Trainer, TrainerCallback, TrainingArguments
from tests.distributed.ranks import words_of_failing_ranks

pytestmark = pytest.mark.ranks

STEP = 3


def loop() -> None:
    while True:
        pass


FAULTS: dict[str, Callable[[], None]] = {
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "loop": loop,
    "sleep": lambda: time.sleep(600),
    "end": lambda: os._exit(0),
}


class Layer(nn.Linear):
    """A layer with a fault in its forward or its backward: in one rank and step."""

    fault: Callable[[], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if Layer.fault is not None:
            Layer.fault()
        return super().forward(x)


class Fault(TrainerCallback):
    """Puts the fault into the layers of one rank."""

    def __init__(self, kind: str, rank: int) -> None:
        self.kind, self.rank = kind, rank

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == STEP and kwargs["trainer"].run.groups.rank == self.rank:
            Layer.fault = staticmethod(FAULTS[self.kind])


def train(stages: int, zero: int, kind: str, rank: int, folder: str) -> None:
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "pipeline": {"stages": stages, "partition": "uniform"},
        "zero_optimization": {"stage": zero},
    }
    arguments = TrainingArguments(
        deepspeed_config=config, output_dir=folder, max_steps=50, save_steps=0, hang_seconds=3
    )
    data = [(torch.ones(4) * i, torch.ones(4)) for i in range(16)]
    layers = [LayerSpec(Layer, 4, 4) for _ in range(4)]
    loss = nn.functional.mse_loss
    Trainer(layers, arguments, train_dataset=data, loss_fn=loss, callbacks=[Fault(kind, rank)]).train()


@pytest.mark.parametrize(
    ("stages", "zero", "kind", "rank", "said"),
    [
        (2, 0, "stop", 1, r"hangs in step 3, during: ForwardPass\(0\), stopped .*rank 0 waits for it \(RecvGrad\(0\)"),
        (
            1,
            3,
            "loop",
            0,
            r"hangs in step 3, during: forward of layer 0, at test_faults.py:\d+ in loop,.*1 waits.*wait_for_ranks",
        ),
        (2, 1, "kill", 0, r"(ended by SIGKILL|has ended) in step 3, during: ForwardPass\(0\)"),
        (1, 3, "kill", 1, r"(ended by SIGKILL|has ended) in step 3, during: forward of layer 0"),
        (1, 2, "end", 1, r"(ended with exit code 0|has ended) in step 3, during: forward of layer 0"),
    ],
    ids=lambda value: str(value)[:8],
)
def test_the_rank_at_fault_is_named(stages: int, zero: int, kind: str, rank: int, said: str, tmp_path: Path) -> None:
    words = words_of_failing_ranks(2, train, stages, zero, kind, rank, str(tmp_path))
    lines = re.findall(r"^error: .*$", words, re.MULTILINE)
    assert len(lines) == 1, words
    assert re.search(rf"rank {rank} \(stage {rank if stages == 2 else 0}, host .*\) {said}", lines[0]), lines[0]
    stacks = "".join(file.read_text() for file in tmp_path.glob("hang-*.txt"))
    assert ("== rank 0" in stacks and "in loop" in stacks) == (kind == "loop")
    assert ("rank 1 (stage 1" in stacks and "is stopped" in stacks) == (kind == "stop")
