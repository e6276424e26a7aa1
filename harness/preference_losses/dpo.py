"""DPO (Rafailov et al. 2023, arXiv 2305.18290), with label smoothing (conservative DPO)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.preference_losses.preference_loss import PreferenceLossType, Scores, Settings, margin

if TYPE_CHECKING:
    from torch import Tensor


def losses(scores: Scores, settings: Settings) -> Tensor:
    """Return -(1 - e) log s(b (rc - rj)) - e log s(-b (rc - rj)) [pairs].

    r: log of the model's probability over that before training, of the chosen c and the rejected j; e: label smoothing;
    b: beta; s: the sigmoid.
    """
    return smoothed(margin(scores.ratios), settings)


def smoothed(margins: Tensor, settings: Settings) -> Tensor:
    """Return the loss of margins [pairs] of which a share is the wrong way round."""
    from torch.nn.functional import logsigmoid

    beta, wrong = settings.preference_beta, settings.preference_label_smoothing
    return -logsigmoid(beta * margins) * (1 - wrong) - logsigmoid(-beta * margins) * wrong


LOSS = PreferenceLossType(
    name="dpo",
    paper="arXiv 2305.18290",
    of_pairs=losses,
    flags=("preference_label_smoothing",),
    needs_reference=True,
)
