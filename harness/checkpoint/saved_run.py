"""Compare a checkpoint with the run that resumes it. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.checkpoint.directories import TrainingProgress, read_progress
from harness.config.values.json_object import JsonObject
from harness.errors import UserError
from harness.optimizers import find


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint with its `state.json`, which is read once.

    Each method raises UserError if a run with other settings would resume the checkpoint.
    """

    checkpoint: Path
    progress: TrainingProgress

    @classmethod
    def read(cls, checkpoint: Path) -> SavedRun:
        """Read a checkpoint's `state.json`. Raises UserError if it cannot be read."""
        return cls(checkpoint, read_progress(checkpoint))

    def require_same_optimizer(self, ours: str) -> None:
        """Require the optimizer states of the run's optimizer `ours`; layout, ZeRO stage and precision may differ."""
        if self.progress.model_only:
            raise UserError(
                f"{self.checkpoint} contains only the model (--save_only_model), so no run can resume it: start a new "
                f"run with --model_name_or_path {self.checkpoint}"
            )
        saved = self.progress.optimizer
        theirs = find(saved)
        own = find(ours)
        same_state = theirs is not None and own is not None and own.shares_state_with(theirs)
        if saved and saved.lower() != ours.lower() and not same_state:
            raise UserError(
                f"{self.checkpoint} contains the state of {saved}, but this run uses {ours}: use the saved one"
            )

    def require_same_adapters(self, adapters: str) -> None:
        """Require the run's adapters, by their fingerprint; "" if the run trains all weights."""
        saved = self.progress.adapters
        if saved != adapters:
            theirs = "adapters" if saved else "all weights"
            ours = "adapters" if adapters else "all weights"
            other = " of another config" if saved and adapters else ""
            raise UserError(
                f"{self.checkpoint} contains {theirs}{other}, but this run trains {ours}: resume with the saved "
                "settings"
            )

    def require_same_objective(self, objective: str) -> None:
        """Require the run's objective with the same settings."""
        saved = self.progress.objective
        if saved != objective:
            raise UserError(
                f"{self.checkpoint} was trained on {saved or 'the next token'}, but this run on "
                f"{objective or 'the next token'}: resume with the saved settings"
            )

    def require_same_base(self, base: Mapping[str, str]) -> None:
        """Require that adapters were trained on the run's base model.

        Only weights of the same name are compared: a model in memory may have other names than its files.

        Args:
            base: checksums of this run's base model, as in `TrainingProgress.base`.
        """
        saved = self.progress.base
        for name in sorted(saved.keys() & base.keys()):
            if saved[name] != base[name]:
                raise UserError(
                    f"{self.checkpoint} contains adapters for another base model, whose {name} has other values than "
                    "this run's: resume with the saved base model"
                )

    def require_same_model(self, model: str, model_config: JsonObject) -> None:
        """Require the layers, sizes and config values of the run's model."""
        saved = self.progress
        if saved.model and saved.model != model:
            raise UserError(
                f"{self.checkpoint} contains a model of {saved.model}, but this run's model has {model}: "
                "resume with the saved model"
            )
        theirs = saved.model_config
        # Through JSON, like the saved one: it turns tuples into lists, and keys into text.
        ours = json.loads(json.dumps(model_config))
        for name in sorted(theirs.keys() & ours.keys()):
            if theirs[name] != ours[name]:
                raise UserError(
                    f"{self.checkpoint} contains a model whose {name} is {theirs[name]}, but this run's has "
                    f"{ours[name]}: resume with the saved model"
                )
