"""SimPO (Meng et al. 2024, arXiv 2405.14734)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.preference_losses.dpo import smoothed
from harness.preference_losses.preference_loss import PreferenceLossType, Scores, Settings, margin

if TYPE_CHECKING:
    from torch import Tensor


def losses(scores: Scores, settings: Settings) -> Tensor:
    """Return DPO's loss of b (pc / |yc| - pj / |yj|) - gamma [pairs].

    p: log-probability of the model, |y|: tokens of a completion, b: beta.
    """
    return smoothed(margin(scores.averages) - settings.simpo_gamma / settings.preference_beta, settings)


LOSS = PreferenceLossType(
    name="simpo",
    paper="arXiv 2405.14734",
    of_pairs=losses,
    flags=("preference_label_smoothing", "simpo_gamma"),
    per_token=True,
)
