"""Preferences as the objective of a run: its samples, its loss, and the model before training.

trainer = Trainer(model, args, pairs, objective=Preferences(PreferenceArguments(preference="dpo")))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

import numpy as np
import torch.distributed as dist
from torch import nn

from harness.arguments import TrainingArguments
from harness.arguments.themes.preferences import SEQUENCES, PreferenceArguments
from harness.batches.collate import Collator, MapDataset, MicroBatch
from harness.console import Console
from harness.data.chat import Encoded
from harness.data.mixing import Joined, Source
from harness.errors import UserError
from harness.hf.adapters import Adapters
from harness.hf.skeleton import ModelSource
from harness.preferences.data import PreferenceData
from harness.preferences.dropout import disable_dropout, dropout_rates
from harness.preferences.items import obstacles
from harness.preferences.losses import LabelledLoss, PairLoss
from harness.preferences.reference import with_reference
from harness.preferences.samples import PreferenceSamples, as_sample, collate
from harness.training.engine.engine import Engine
from harness.training.engine.losses import CausalLoss, Loss
from harness.training.parts.data import Datasets


@dataclass(frozen=True)
class Preferences:
    """Trains on preferences; see `harness.training.parts.objective.Objective`.

    Attributes:
        of: the loss and its settings.

    Raises:
        UserError: `of` names no loss.
    """

    of: PreferenceArguments

    def __post_init__(self) -> None:
        if self.of.preference is None:
            raise UserError('Preferences needs a loss: give PreferenceArguments(preference="dpo"), or another')

    @property
    def name(self) -> str:
        """The flag that asks for it."""
        return f"--preference {self.of.preference}"

    @property
    def settings(self) -> str:
        """The loss and its settings as flags."""
        return self.of.settings

    @property
    def sequences(self) -> int:
        """Two: of a pair, or a labelled completion and that of another prompt."""
        return SEQUENCES

    @cached_property
    def data(self) -> PreferenceData:
        """What makes its samples."""
        return PreferenceData(self.of)

    def obstacles(self, args: TrainingArguments) -> list[str]:
        """Return what is wrong with the arguments of a run with this objective, one line each."""
        return obstacles(self.of, args)

    def prepare_model(self, model: nn.Module) -> None:
        """Switch dropout off, as TRL does."""
        disable_dropout(model)

    def collate(self, samples: Sequence[object]) -> MicroBatch:
        """Return the micro-batch of these samples."""
        return collate(samples)

    def example(self, micro_batch: int, tokens: int) -> MicroBatch:
        """Return a micro-batch of as many samples whose sequences are completions of `tokens` tokens each."""
        encoded = Encoded(ids=np.zeros(tokens, dtype=np.int64), answers=np.ones(tokens, dtype=np.bool_))
        return collate([as_sample(encoded, encoded, tokens, 0)] * micro_batch)

    def loss(self, causal: CausalLoss, data_group: dist.ProcessGroup | None) -> Loss:
        """Return the loss; `causal` is the cross entropy of the same logits, `data_group` the stage's data ranks."""
        return PairLoss(self.of, causal) if self.of.loss.paired else LabelledLoss(self.of, causal, data_group)

    def before_training(
        self,
        engine: Engine,
        data: Datasets,
        collator: Collator,
        source: ModelSource,
        adapters: Adapters | None,
        console: Console,
    ) -> Datasets:
        """Return the data with the log-probabilities of the model before training; all ranks call it."""
        if rates := dropout_rates(source.config):
            listed = ", ".join(f"{name} {rate}" for name, rate in rates.items())
            console.say(f"dropout is off, as in TRL: {listed} of the model's config")
        if not self.of.loss.needs_reference:
            return data

        def compared(samples: MapDataset) -> MapDataset:
            if isinstance(samples, Joined):
                return samples.with_sources([cast("Source", compared(each)) for each in samples.sources])
            assert isinstance(samples, PreferenceSamples)  # a stream has been refused
            return with_reference(samples, engine, collator, source, adapters, console)

        evaluation = data.evaluation
        if isinstance(evaluation, Mapping):
            evaluation = {name: compared(each) for name, each in evaluation.items()}
        elif evaluation is not None:
            evaluation = compared(evaluation)
        return replace(data, train=None if data.train is None else compared(data.train), evaluation=evaluation)
