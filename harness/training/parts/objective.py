"""The interface of a training objective that replaces next-token prediction, such as preferences.

An objective makes the samples and micro-batches, and a loss of the logits. A sample may hold several sequences: a
micro-batch of B samples then has ids [B x sequences, tokens], while its labels begin with a tensor [B, ...], so that
batch sizes, the order and every count stay those of samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist
from torch import nn

from harness.arguments import TrainingArguments
from harness.batches.collate import Collator, MicroBatch
from harness.console import Console
from harness.hf.adapters import Adapters
from harness.hf.skeleton import ModelSource
from harness.training.engine.engine import Engine
from harness.training.engine.losses import CausalLoss, Loss
from harness.training.parts.data import DataPart, Datasets


class Objective(Protocol):
    """A training objective."""

    @property
    def name(self) -> str:
        """The objective's name in messages, such as `--preference dpo`."""

    @property
    def settings(self) -> str:
        """The objective with all that decides its numbers, as flags: a checkpoint is resumed with the same."""

    @property
    def sequences(self) -> int:
        """The number of sequences per sample."""

    @property
    def data(self) -> DataPart:
        """The data part that makes the objective's samples; it replaces the run's."""

    def obstacles(self, args: TrainingArguments) -> list[str]:
        """Return the problems of a run's arguments with this objective, one line each."""

    def prepare_model(self, model: nn.Module, /) -> None:
        """Change the model, on the meta device, before it is cut; its config stays as it is."""

    def collate(self, samples: Sequence[object]) -> MicroBatch:
        """Collate samples into a micro-batch."""

    def example(self, micro_batch: int, tokens: int) -> MicroBatch:
        """Return a micro-batch of as many samples, each sequence of `tokens` tokens, for a dry run."""

    def loss(self, causal: CausalLoss, data_group: dist.ProcessGroup | None) -> Loss:
        """Return the loss; `causal` is the cross entropy of the same logits, `data_group` the data-parallel group."""

    def before_training(
        self,
        engine: Engine,
        data: Datasets,
        collator: Collator,
        source: ModelSource,
        adapters: Adapters | None,
        console: Console,
    ) -> Datasets:
        """Return the data to train on; all ranks call it with the initial weights, before a checkpoint is loaded.

        `collator` is the run's, which checks the result of `collate`.
        """
