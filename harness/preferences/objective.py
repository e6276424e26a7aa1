"""Preferences as the objective of a run: its samples, its loss, and the model before training.

trainer = Trainer(model, args, pairs, objective=Preferences(PreferenceArguments(preference="dpo")))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch.distributed as dist

from harness.arguments import TrainingArguments
from harness.arguments.themes.preferences import SEQUENCES, PreferenceArguments
from harness.batches.collate import Collator, MapDataset, MicroBatch
from harness.console import Console
from harness.errors import UserError
from harness.hf.adapters import Adapters
from harness.hf.skeleton import ModelSource
from harness.preferences.data import PreferenceData
from harness.preferences.items import obstacles
from harness.preferences.losses import LabelledLoss, PairLoss
from harness.preferences.reference import with_reference
from harness.preferences.samples import PreferenceSamples, collate
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

    def collate(self, samples: Sequence[object]) -> MicroBatch:
        """Return the micro-batch of these samples."""
        return collate(samples)

    def loss(self, causal: CausalLoss, data_group: dist.ProcessGroup | None) -> Loss:
        """Return the loss; `causal` is the cross entropy of the same logits, `data_group` the stage's data ranks."""
        return PairLoss(self.of, causal) if self.of.paired else LabelledLoss(self.of, causal, data_group)

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
        if not self.of.needs_reference:
            return data

        def compared(samples: MapDataset) -> PreferenceSamples:
            assert isinstance(samples, PreferenceSamples)
            return with_reference(samples, engine, collator, source, adapters, console)

        evaluation = data.evaluation
        if isinstance(evaluation, Mapping):
            evaluation = {name: compared(each) for name, each in evaluation.items()}
        elif evaluation is not None:
            evaluation = compared(evaluation)
        return replace(data, train=None if data.train is None else compared(data.train), evaluation=evaluation)
