"""IPO (Azar et al. 2023, arXiv 2310.12036)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.preference_losses.preference_loss import PreferenceLossType, Scores, Settings, margin

if TYPE_CHECKING:
    from torch import Tensor


def losses(scores: Scores, settings: Settings) -> Tensor:
    """Return (rc / |yc| - rj / |yj| - 1 / (2 b))^2 [pairs].

    r: log of the model's probability over that before training, |y|: tokens of a completion, b: beta. As in TRL, r
    is an average over tokens.
    """
    return (margin(scores.ratios / scores.tokens) - 1 / (2 * settings.preference_beta)) ** 2


LOSS = PreferenceLossType(name="ipo", paper="arXiv 2310.12036", of_pairs=losses, needs_reference=True)
