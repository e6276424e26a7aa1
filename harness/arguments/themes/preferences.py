"""The flags of training on preferences."""

from dataclasses import dataclass, fields
from typing import ClassVar

from harness.arguments.themes.flags import Flags, flag
from harness.errors import UserError
from harness.preference_losses import PREFERENCE_LOSSES, PreferenceLossType

SEQUENCES = 2
"""Sequences of a sample, which is a pair, or a labelled completion with that of another prompt."""
_OF_SOME = {name for loss in PREFERENCE_LOSSES.values() for name in loss.flags}
_PAPERS = ", ".join(f"{loss.name} ({loss.paper})" for loss in PREFERENCE_LOSSES.values())


@dataclass(kw_only=True)
class PreferenceArguments(Flags):
    """Losses over pairs of a chosen and a rejected completion, with TRL's defaults."""

    TITLE: ClassVar[str] = "Preferences"

    preference: str | None = flag(
        None,
        f"train on preferences: {_PAPERS}; kto for completions with a label, the others for pairs",
        choices=tuple(PREFERENCE_LOSSES),
    )
    preference_beta: float = flag(
        0.1, "scale of the rewards; orpo: weight of the odds ratio (for simpo, its authors use 2 to 10)"
    )
    preference_label_smoothing: float = flag(
        0.0, "probability that a preference is the wrong way round, for dpo and simpo: below 0.5", least=0
    )
    simpo_gamma: float = flag(0.5, "margin that the reward of the chosen completion must win by", least=0)
    desirable_weight: float = flag(1.0, "weight of the completions labelled true, for kto", least=0)
    undesirable_weight: float = flag(1.0, "weight of the completions labelled false, for kto", least=0)

    def check(self) -> None:
        """Refuse flags that have no effect, and values outside their range."""
        for item in fields(self):
            name = item.name
            kind = self.preference
            if name not in self.given or name == "preference":
                continue
            if kind is None:
                raise UserError(f"--{name} has no effect without --preference")
            if name not in self._acting:
                raise UserError(f"--{name} has no effect with --preference {kind}: it belongs to {_losses_with(name)}")
        if self.preference_beta <= 0:
            raise UserError(f"--preference_beta {self.preference_beta}: must be above 0")
        if self.preference_label_smoothing >= 0.5:
            raise UserError(f"--preference_label_smoothing {self.preference_label_smoothing}: must be below 0.5")

    @property
    def loss(self) -> PreferenceLossType:
        """The loss that --preference names."""
        assert self.preference is not None
        return PREFERENCE_LOSSES[self.preference]

    @property
    def settings(self) -> str:
        """The flags that act with this loss, with their values; "" without one."""
        return " ".join(f"--{name} {getattr(self, name)}" for name in self._acting)

    @property
    def _acting(self) -> list[str]:
        """The flags that act with this loss."""
        if self.preference is None:
            return []
        return [item.name for item in fields(self) if item.name in self.loss.flags or item.name not in _OF_SOME]


def _losses_with(flag: str) -> str:
    """Return the losses that a flag belongs to."""
    return " and ".join(loss.name for loss in PREFERENCE_LOSSES.values() if flag in loss.flags)
