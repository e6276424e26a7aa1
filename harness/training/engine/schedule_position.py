"""Bring an engine's schedule of the learning rate to any step.

It is a function of the step, and belongs to the arguments of the run that goes on, not to a checkpoint.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau


class SchedulePosition:
    """Remembers the schedule, and the options of the parameter groups, as they were built."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = engine
        scheduler = engine.lr_scheduler
        self._schedule = copy.deepcopy(scheduler.state_dict()) if scheduler is not None else None
        groups = engine.optimizer.param_groups
        self._groups = [copy.deepcopy({key: group[key] for key in group if key != "params"}) for group in groups]

    def go_to(self, steps: int) -> None:
        """Let the schedule stand where it stands after `steps` steps that updated the weights."""
        scheduler = self._engine.lr_scheduler
        for group, built in zip(self._engine.optimizer.param_groups, self._groups, strict=True):
            group.update(copy.deepcopy(built))
        if scheduler is not None:
            scheduler.load_state_dict(copy.deepcopy(self._schedule))
        if scheduler is not None and steps:
            advance_schedule(scheduler, steps, self._engine.train_batch_size())


def advance_schedule(scheduler: Any, steps: int, train_batch: int) -> None:
    """Bring a schedule that was just built to where it stands after `steps` steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch misses the optimizer steps, which the checkpoint has done
        if isinstance(scheduler, LambdaLR):  # a function of the step alone
            scheduler.last_epoch = steps - 1
            scheduler._step_count = steps  # noqa: SLF001  # torch's own, which `step` counts up
            scheduler.step()
        elif hasattr(scheduler, "last_batch_iteration"):  # DeepSpeed's own, likewise; they count from 0
            scheduler.step(steps - 1)
        else:
            for _ in range(steps):
                # DeepSpeed gives this one the batch size for a loss
                scheduler.step(*([train_batch] if isinstance(scheduler, ReduceLROnPlateau) else []))
