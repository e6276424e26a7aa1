"""The flags of training on preferences."""

from dataclasses import dataclass, fields
from typing import ClassVar

from harness.arguments.themes.flags import Flags, flag
from harness.errors import UserError

DPO, IPO, SIMPO, ORPO, KTO = "dpo", "ipo", "simpo", "orpo", "kto"
PREFERENCES = (DPO, IPO, SIMPO, ORPO, KTO)
NEED_REFERENCE = frozenset((DPO, IPO, KTO))
"""Losses that compare the model with the model before training."""
SEQUENCES = 2
"""Sequences of a sample, which is a pair, or a labelled completion with that of another prompt."""
_OF_SOME = {
    "preference_label_smoothing": (DPO, SIMPO),
    "simpo_gamma": (SIMPO,),
    "desirable_weight": (KTO,),
    "undesirable_weight": (KTO,),
}
"""Flag -> the losses that it belongs to."""


@dataclass(kw_only=True)
class PreferenceArguments(Flags):
    """Losses over pairs of a chosen and a rejected completion, with TRL's defaults."""

    TITLE: ClassVar[str] = "Preferences"

    preference: str | None = flag(
        None,
        "train on preferences: dpo (arXiv 2305.18290), ipo (2310.12036), simpo (2405.14734), orpo (2403.07691), or kto "
        "(2402.01306) for completions with a label",
        choices=PREFERENCES,
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
            name, kind = item.name, self.preference
            if name not in self.given or name == "preference":
                continue
            if kind is None:
                raise UserError(f"--{name} has no effect without --preference")
            if kind not in _OF_SOME.get(name, PREFERENCES):
                raise UserError(f"--{name} has no effect with --preference {kind}: it belongs to {_listed(name)}")
        if self.preference_beta <= 0:
            raise UserError(f"--preference_beta {self.preference_beta}: must be above 0")
        if self.preference_label_smoothing >= 0.5:
            raise UserError(f"--preference_label_smoothing {self.preference_label_smoothing}: must be below 0.5")

    @property
    def settings(self) -> str:
        """The flags that act with this loss, with their values; "" without one."""
        if self.preference is None:
            return ""
        acting = (item.name for item in fields(self) if self.preference in _OF_SOME.get(item.name, PREFERENCES))
        return " ".join(f"--{name} {getattr(self, name)}" for name in acting)

    @property
    def paired(self) -> bool:
        """Whether the loss is over pairs; otherwise over completions with a label."""
        return self.preference != KTO

    @property
    def needs_reference(self) -> bool:
        """Whether the loss needs the log-probabilities of the model before training."""
        return self.preference in NEED_REFERENCE


def _listed(name: str) -> str:
    return " and ".join(_OF_SOME[name])
