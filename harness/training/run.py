"""One run on this rank, from what the user gave to the engine that trains.

A run grows in three phases, each a dataclass that adds fields to the one before: `RunInputs` (what a program hands to
the Trainer), `RunPlan` (what follows from that on this rank alone) and `Run` (all there is once the ranks have met and
the engine is built). A function says by the type of its argument how far the run must be.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from harness.checkpoint.training_state import EngineState
from harness.config.values.json_object import JsonObject
from harness.hf.lora import saved_name
from harness.topology.placement import Hosts
from harness.training.engine.context import EngineContext
from harness.training.engine.engine import Engine
from harness.training.prepare.dataset_check import DatasetCheck
from harness.training.prepare.forecast import Forecast
from harness.training.prepare.plan import RunPlan
from harness.training.prepare.sample_prompts import SamplePrompts
from harness.training.prepare.stages import StageLine
from harness.training.prepare.trainable import TrainableModel


@dataclass(kw_only=True)
class Run(RunPlan, EngineContext):
    """A run that is ready for its first step, or for the checkpoint to resume.

    Layers that move between stages (`--rebalance_steps`) and a resume set its fields anew; nothing keeps a copy.

    Attributes:
        data_check: looks at the first samples of a data set.
        trainable: the model as pipeline layers, with its loss.
        base: checksums of what adapters stand on, by name, on rank 0; empty elsewhere and without adapters.
        boundaries: index of the first pipeline layer of each stage, then the number of layers.
        stages: one line a stage, as reported to the user.
        hyperparameters: what decides about the steps to come, by the names that a user knows.
        foreign_groups: process groups that were open before the run.
        hosts: which rank runs on which host.
        samples: prompts that the model continues at each evaluation; None without any.
        expected: what the planner says of memory and speed; None where it does not know the model.
        run_id: made when the run began afresh; a run that resumes a checkpoint has the one of that.
    """

    data_check: DatasetCheck
    trainable: TrainableModel
    base: dict[str, str]
    boundaries: list[int]
    engine: Engine
    stages: list[StageLine]
    hyperparameters: JsonObject
    foreign_groups: frozenset[dist.ProcessGroup]
    hosts: Hosts
    run_id: str
    samples: SamplePrompts | None = None
    expected: Forecast | None = None

    @property
    def module(self) -> nn.Module:
        """This rank's layers, as DeepSpeed holds them."""
        module: nn.Module = self.engine.deepspeed.module
        return module

    @property
    def engine_state(self) -> EngineState:
        """What of the engine a checkpoint stores, and under which names."""
        adapters, name = self.adaptation is not None, self.trainable.stored_name
        return EngineState(
            engine=self.engine.deepspeed,
            groups=self.groups,
            rename=(lambda key: saved_name(name(key))) if adapters else name,
            adapters=adapters,
            compression=self.engine.compression,
            one_host=len(self.hosts.names) == 1,
        )
