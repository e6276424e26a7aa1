"""A loss over preferences: its formula, and what it needs.

A sequence's log-probability is the sum over its completion's tokens, in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Settings(Protocol):
    """The flags of a loss."""

    preference_beta: float
    preference_label_smoothing: float
    simpo_gamma: float
    desirable_weight: float
    undesirable_weight: float


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Log-probabilities of a micro-batch, float32 [pairs, 2]: of the chosen and the rejected completion.

    Attributes:
        policy: of the model.
        reference: of the model before training.
        tokens: number of tokens in each completion.
    """

    policy: Tensor
    reference: Tensor
    tokens: Tensor

    @property
    def averages(self) -> Tensor:
        """The model's log-probabilities for each token on average [pairs, 2]."""
        return self.policy / self.tokens

    @property
    def ratios(self) -> Tensor:
        """Log of the model's probability over that before training [pairs, 2]."""
        return self.policy - self.reference


def margin(values: Tensor) -> Tensor:
    """Return chosen less rejected [pairs] of values [pairs, 2]."""
    return values[:, 0] - values[:, 1]


@dataclass(frozen=True, kw_only=True)
class PreferenceLossType:
    """A loss by its name, with one of the two formulas.

    Attributes:
        name: value of --preference.
        paper: its source, for the flag's help.
        of_pairs: returns the loss of each pair [pairs].
        of_labelled: returns the loss of each completion that has a label [completions], from the log of the model's
            probability over that before training, labels 0 or 1 [completions], and kl, a scalar: the mean of that log
            over completions that belong to other prompts, at least 0, without a gradient.
        flags: the flags that act, besides --preference_beta.
        needs_reference: whether it compares the model with the model before training.
        per_token: whether rewards and log-probabilities are averages over a completion's tokens.
        adds_cross_entropy: whether the cross entropy of the chosen sequence, prompt included, is added.
        reports: metrics of its own, by name, each a value for each pair [pairs].
    """

    name: str
    paper: str
    of_pairs: Callable[[Scores, Settings], Tensor] | None = None
    of_labelled: Callable[[Tensor, Tensor, Tensor, Settings], Tensor] | None = None
    flags: tuple[str, ...] = ()
    needs_reference: bool = False
    per_token: bool = False
    adds_cross_entropy: bool = False
    reports: Mapping[str, Callable[[Scores], Tensor]] = field(default_factory=dict)

    @property
    def paired(self) -> bool:
        """Whether the loss is over pairs; otherwise over completions with a label."""
        return self.of_pairs is not None

    def rewards(self, scores: Scores, settings: Settings) -> Tensor:
        """Return the implicit rewards [pairs, 2]."""
        return settings.preference_beta * (scores.averages if self.per_token else scores.ratios)
