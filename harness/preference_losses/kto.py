"""KTO (Ethayarajh et al. 2024, arXiv 2402.01306)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.preference_losses.preference_loss import PreferenceLossType, Settings

if TYPE_CHECKING:
    from torch import Tensor


def losses(ratios: Tensor, desirable: Tensor, kl: Tensor, settings: Settings) -> Tensor:
    """Return wd (1 - s(b (r - kl))) of desirable completions, wu (1 - s(b (kl - r))) of others [completions].

    r: log of the model's probability over that before training, b: beta, s: the sigmoid, wd and wu: the weights. kl is
    a mean over the micro-batch and the data ranks, so it depends on these.
    """
    import torch

    wanted = desirable > 0
    gains = torch.sigmoid(settings.preference_beta * torch.where(wanted, ratios - kl, kl - ratios))
    return torch.where(wanted, settings.desirable_weight, settings.undesirable_weight) * (1 - gains)


LOSS = PreferenceLossType(
    name="kto",
    paper="arXiv 2402.01306",
    of_labelled=losses,
    flags=("desirable_weight", "undesirable_weight"),
    needs_reference=True,
)
