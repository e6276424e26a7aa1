"""A rank that is stopped, killed, loops or ends early, in several layouts: the others name it, and all end; one in the
user's own code may take its time."""

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
from harness.resilience.process import records
from tests.support.ranks import DEVICE, run_ranks, words_of_failing_ranks

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
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                (2, 1, "kill", 0, r"(ended by SIGKILL|has ended) in step 3, during: ForwardPass\(0\)"),
                (1, 3, "kill", 1, r"(ended by SIGKILL|has ended) in step 3, during: forward of layer 0"),
            )
        ),
        (1, 2, "end", 1, r"(ended with exit code 0|has ended) in step 3, during: forward of layer 0"),
    ],
    ids=lambda value: str(value)[:8],
)
def test_the_rank_at_fault_is_named(stages: int, zero: int, kind: str, rank: int, said: str, tmp_path: Path) -> None:
    words = words_of_failing_ranks(2, train, stages, zero, kind, rank, str(tmp_path))
    lines = re.findall(r"^error: .*$", words, re.MULTILINE)
    assert len(lines) == 1, words
    if DEVICE[0] != "cpu":  # where hosts wait for each other in no layer
        said = said.partition(".*")[0]
    assert re.search(rf"rank {rank} \(stage {rank if stages == 2 else 0}, host .*\) {said}", lines[0]), lines[0]
    stacks = "".join(file.read_text() for file in tmp_path.glob("hang-*.txt"))
    assert ("== rank 0" in stacks and "in loop" in stacks) == (kind == "loop")
    assert ("rank 1 (stage 1" in stacks and "is stopped" in stacks) == (kind == "stop")


class Slow(TrainerCallback):
    """The user's own code everywhere, which rank 1 takes long over, once at each place; best loaded at the end."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def once(self, place: str) -> None:
        """Sleep when the steps have a known length, for longer than a hang in a step is allowed."""
        if records.THIS_RANK.step >= STEP + 1 and place not in self.done:
            self.done.append(place)
            if self.is_slow(place):
                time.sleep(2.0 if place == "loss" else 0.9)  # longer than five slow steps of a busy machine

    def is_slow(self, place: str) -> bool:
        return records.THIS_RANK.rank == (0 if place == "compute_metrics" else 1)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.once("on_step_begin")

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.once("on_step_end")

    def on_log(self, *_: Any, **__: Any) -> None:
        self.once("on_log")

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self.once("on_evaluate")

    def on_save(self, *_: Any, **__: Any) -> None:
        self.once("on_save")

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.once("item")
        return torch.ones(4) * index, torch.ones(4)

    def collate(self, items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        self.once("collator")
        inputs, labels = zip(*items, strict=True)
        return torch.stack(inputs), torch.stack(labels)

    def compute(self, _: Any) -> dict[str, float]:
        self.once("compute_metrics")
        return {"odd": 1.0}

    def preprocess(self, logits: Any, _: Any) -> Any:
        self.once("preprocess")
        return logits

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        self.once("loss")
        return nn.functional.mse_loss(outputs, labels)


def train_with_slow_code(folder: str) -> list[str]:
    slow = Slow()
    arguments = TrainingArguments(
        deepspeed_config={"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4},
        output_dir=folder,
        max_steps=6,
        eval_steps=2,
        save_steps=2,
        hang_seconds=0.5,
    )
    trainer = Trainer(
        [LayerSpec(Layer, 4, 4)],
        arguments,
        slow,
        slow,
        loss_fn=slow.loss,
        data_collator=slow.collate,
        callbacks=[slow],
        compute_metrics=slow.compute,
        preprocess_logits_for_metrics=slow.preprocess,
    )
    trainer.train()
    slow.done += ["predict"] * (len(trainer.predict(slow).predictions) == 16)
    return sorted(slow.done)


def test_code_of_the_user_may_take_longer_than_a_step(tmp_path: Path) -> None:
    found = run_ranks(2, train_with_slow_code, str(tmp_path))
    of_all = [
        "collator",
        "item",
        "loss",
        "on_evaluate",
        "on_log",
        "on_save",
        "on_step_begin",
        "on_step_end",
        "preprocess",
    ]
    assert found == [sorted([*of_all, "compute_metrics", "predict"]), sorted([*of_all, "predict"])]
    assert not list(tmp_path.glob("hang-*.txt"))
