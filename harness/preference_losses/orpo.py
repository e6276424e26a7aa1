"""ORPO (Hong et al. 2024, arXiv 2403.07691)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.preference_losses.preference_loss import PreferenceLossType, Scores, Settings, margin

if TYPE_CHECKING:
    from torch import Tensor


def losses(scores: Scores, settings: Settings) -> Tensor:
    """Return -b log s(log odds(pc / |yc|) - log odds(pj / |yj|)) [pairs], to which the cross entropy is added.

    p: log-probability of the model, |y|: tokens of a completion, b: beta, s: the sigmoid.
    """
    return -settings.preference_beta * log_odds_ratio(scores)


def log_odds(scores: Scores) -> Tensor:
    """Return the log of the odds of chosen over those of rejected completions, per token on average [pairs]."""
    averages = scores.averages
    return margin(averages - (-averages.exp()).log1p())


def log_odds_ratio(scores: Scores) -> Tensor:
    """Return the log of the sigmoid of `log_odds` [pairs]: TRL's name for it."""
    from torch.nn.functional import logsigmoid

    return logsigmoid(log_odds(scores))


LOSS = PreferenceLossType(
    name="orpo",
    paper="arXiv 2403.07691",
    of_pairs=losses,
    per_token=True,
    adds_cross_entropy=True,
    reports={"log_odds_ratio": log_odds_ratio, "log_odds_chosen": log_odds},
)
