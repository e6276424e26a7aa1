"""How often a rank waits for its device in a steady step, by place; runs on ranks of the simulated device."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from harness import Trainer, TrainerCallback
from tests.support.simulated_device import device
from tests.support.training import Job, arguments_of, rows

FIRST, STEPS = 3, 2  # the steps that are counted


class CountWaits(TrainerCallback):
    """A callback that counts from the beginning of a step to that of a later one."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in (FIRST, FIRST + STEPS):
            self.found = device.waits(reset=True)


def waits_of(job: Job, folder: str) -> dict[str, float]:
    """Train a job that logs each step; return the waits of one of its steps by place."""
    steps = FIRST + STEPS + 1
    arguments = arguments_of(job, f"{folder}/{Path(job.model).name}{job.layout}", logging_steps=1, max_steps=steps)
    counting = CountWaits()
    trainer = Trainer(job.model, arguments, train_dataset=rows() * steps, callbacks=[counting])
    trainer.train()
    trainer.close()
    return {place: count / STEPS for place, count in counting.found.most_common()}


def waits_of_all(jobs: list[Job], folder: str) -> list[dict[str, float]]:
    """As `waits_of`, for several jobs one after the other."""
    return [waits_of(job, folder) for job in jobs]


def is_own(place: str) -> bool:
    """Whether the program itself waits there, or what it calls, not DeepSpeed within a call of it."""
    return " at deepspeed/" not in place and " in deepspeed/" not in place


def waits_beside_steps(job: Job, folder: str) -> dict[str, dict[str, int]]:
    """Build a Trainer, save twice and export; return the waits of each by place."""
    arguments = arguments_of(job, f"{folder}/{Path(job.model).name}{job.layout}", save_steps=1, max_steps=2)
    device.waits(reset=True)
    trainer = Trainer(job.model, arguments, train_dataset=rows())
    found = {"start": dict(device.waits(reset=True))}
    trainer.train()  # saves beside training after both steps
    found["train"] = dict(device.waits(reset=True))
    trainer.save_checkpoint()
    found["save"] = dict(device.waits(reset=True))
    trainer.save_model()
    found["export"] = dict(device.waits(reset=True))
    trainer.close()
    return found
