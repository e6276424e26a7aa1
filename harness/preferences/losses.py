"""The losses of `harness/preference_losses` in every layout: their sums over tokens and ranks, and TRL's metrics.

A loss is a mean over the global batch: over its pairs, and its cross entropy over its tokens. KTO's is a mean over
completions.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from harness.arguments.themes.preferences import PreferenceArguments
from harness.batches.collate import IGNORED
from harness.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy
from harness.preference_losses import Scores
from harness.preferences.token_numbers import NUMBERS, token_numbers
from harness.training.engine.losses import CausalLoss, Labels, Loss, Targets

PER_PAIR = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
)
OF_TOKENS = ("logits/chosen", "logits/rejected", "entropy", "mean_token_accuracy", "tokens/chosen", "tokens/rejected")
OF_LABELLED = ("rewards", "logps", "logits", "tokens", "count")


class PreferenceLoss(Loss):
    """A loss over samples of two sequences each. Subclasses say which.

    Logits are [2 x samples, tokens, vocabulary or this rank's part]. The tensors of labels are: ids [samples, 2,
    tokens], -100 for padding; whether an id is in the completion, of that shape; the log-probabilities of the model
    before training [samples, 2]; labels 0 or 1 [samples].

    Args:
        of: the loss and its settings.
        causal: the cross entropy of the same logits.
    """

    def __init__(self, of: PreferenceArguments, causal: CausalLoss) -> None:
        self.of = of
        self.causal = causal
        self._found: dict[str, Tensor] = {}

    @property
    def is_cross_entropy(self) -> bool:
        """False: its exponential is not a perplexity."""
        return False

    def count(self, _labels: Labels, rows: int) -> int:
        """Return the number of samples."""
        return rows

    def of_tile(self, targets: Targets, logits: Tensor, start: int, stop: int) -> Tensor:
        """Return this rank's part of `sums`, of a tile's tokens alone."""
        return self._sums(targets, logits, (start, stop))

    def kept(self, outputs: Tensor, targets: Targets) -> Tensor:
        """Return the log-probability of each completion [samples, 2]."""
        return self.sums(outputs, targets)[..., 0]

    def sums(self, outputs: Tensor, targets: Targets) -> Tensor:
        """Return sums over the tokens of completions [samples, 2, 4 or 5]: of their log-probabilities, and of NUMBERS.

        Last, if the loss needs it, the log-probability of the whole sequence. `outputs`: logits, or the total of
        `of_tile` over all tiles. All context ranks call it.
        """
        context = self.causal.context
        own: Tensor = outputs if outputs.dim() == 2 else self._sums(targets, outputs)
        whole: Tensor = context.join(own.unsqueeze(1), context.size).sum(1).unflatten(0, (-1, 2))
        return whole

    def _sums(self, targets: Targets, logits: Tensor, tile: tuple[int, int] | None = None) -> Tensor:
        """Return `sums` [2 x samples, 4 or 5] over this rank's tokens, or a tile of them."""
        ids, answers = (tensor.flatten(0, 1) for tensor in targets[4:6])
        wanted = ids if self.of.loss.adds_cross_entropy else ids.masked_fill(~answers, IGNORED)
        wanted, answers = (
            functional.pad(each[:, 1:], (0, 1), value=end) for each, end in ((wanted, IGNORED), (answers, 0))
        )
        if self.causal.context.size > 1:
            wanted, answers = (self.causal.context.own(each) for each in (wanted, answers))
        if tile is not None:
            wanted = wanted[:, slice(*tile)]
            answers = answers[:, slice(*tile)]
        size = self.causal.vocab_size if self.causal.group is not None else logits.shape[-1]
        numbers = token_numbers(logits, wanted, self.causal.group, size)
        log_probs = -vocab_parallel_cross_entropy(logits, wanted, self.causal.group, size)
        columns = [(each * answers).sum(1) for each in (log_probs, *numbers)]
        return torch.stack([*columns, log_probs.sum(1)] if self.of.loss.adds_cross_entropy else columns, dim=1)

    def parts(self, _outputs: Tensor) -> dict[str, Tensor]:
        """Return sums over the samples of the last micro-batch, scalars."""
        return self._found


class PairLoss(PreferenceLoss):
    """A loss of pairs: a sample is a chosen and a rejected sequence with one prompt."""

    @property
    def reports(self) -> tuple[str, ...]:
        """The sums that `metrics` divides."""
        of_sum = ("nll", "nll tokens", "pair losses") if self.of.loss.adds_cross_entropy else ()
        return (*PER_PAIR, *self.of.loss.reports, *of_sum, *OF_TOKENS, "pairs")

    def count(self, labels: Labels, rows: int) -> int:
        """Return the number of pairs, or of the chosen sequences' tokens, over which a cross entropy is averaged."""
        return int((labels[0][:rows, 0, 1:] != IGNORED).sum()) if self.of.loss.adds_cross_entropy else rows

    def __call__(self, outputs: Tensor, targets: Targets) -> Tensor:
        """Return the weighted sum of the pairs' losses."""
        weight, rows, share, _sources, ids, answers, reference, _labels = targets
        sums = self.sums(outputs, targets)
        scores = Scores(policy=sums[..., 0], reference=reference, tokens=answers[..., 1:].sum(-1))
        valid = (torch.arange(len(ids), device=ids.device) < rows).float()
        assert self.of.loss.of_pairs is not None
        losses = self.of.loss.of_pairs(scores, self.of)
        total = (losses * valid).sum()
        found = self._of_pairs(scores) | self._of_tokens(sums.detach(), scores.tokens)
        if not self.of.loss.adds_cross_entropy:
            loss = total * weight / self.causal.context.size
        else:
            nll = -(sums[:, 0, -1] * valid).sum()
            found |= {"nll": -sums[:, 0, -1].detach(), "nll tokens": (ids[:, 0, 1:] != IGNORED).sum(-1)}
            found["pair losses"] = losses.detach()
            loss = nll * weight / self.causal.context.size + total * share / rows.clamp(min=1)
        found["pairs"] = torch.ones_like(valid)
        of_valid = torch.stack([found[name].float() for name in self.reports]) @ valid
        self._found = dict(zip(self.reports, of_valid, strict=True))
        return loss

    @torch.no_grad()
    def _of_pairs(self, scores: Scores) -> dict[str, Tensor]:
        """Return the metrics of each pair [pairs]."""
        loss = self.of.loss
        rewards = loss.rewards(scores, self.of)
        margins = rewards[:, 0] - rewards[:, 1]
        logps = scores.averages if loss.per_token else scores.policy
        columns = (*rewards.unbind(1), margins > 0, margins, *logps.unbind(1))
        return dict(zip(PER_PAIR, columns, strict=True)) | {name: of(scores) for name, of in loss.reports.items()}

    def _of_tokens(self, sums: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        """Return sums over each pair's tokens [pairs], and the numbers of `tokens` [pairs, 2]."""
        logits, entropy, correct = sums[..., 1 : 1 + len(NUMBERS)].unbind(-1)
        columns = (*logits.unbind(1), entropy.sum(1), correct[:, 0], *tokens.unbind(1))
        return dict(zip(OF_TOKENS, columns, strict=True))

    def metrics(self, parts: Mapping[str, float]) -> dict[str, float]:
        """Return the means over pairs, and over the tokens of completions, by TRL's names."""
        if not parts.get("pairs"):
            return {}
        found = {name: parts[name] / parts["pairs"] for name in (*PER_PAIR, *self.of.loss.reports)}
        *of_tokens, chosen, rejected = (parts[name] for name in OF_TOKENS)
        counts = (chosen, rejected, chosen + rejected, chosen)
        found |= {name: total / n for name, total, n in zip(OF_TOKENS, of_tokens, counts, strict=False)}
        return found | ({"nll_loss": parts["nll"] / parts["nll tokens"]} if self.of.loss.adds_cross_entropy else {})

    def mean(self, total: float, counted: float, parts: Mapping[str, float]) -> float:
        """Return the loss of an evaluation: the mean over its pairs, and of a cross entropy over its tokens."""
        if not self.of.loss.adds_cross_entropy:
            return super().mean(total, counted, parts)
        return parts["nll"] / parts["nll tokens"] + parts["pair losses"] / parts["pairs"]


class LabelledLoss(PreferenceLoss):
    """A loss of labelled completions: a sample is a prompt with its completion and label, and another's completion.

    Args:
        data_group: the data ranks of this stage, over which kl is averaged; None for one rank.
    """

    def __init__(self, of: PreferenceArguments, causal: CausalLoss, data_group: dist.ProcessGroup | None) -> None:
        super().__init__(of, causal)
        self.data_group = data_group

    @property
    def reports(self) -> tuple[str, ...]:
        """The sums that `metrics` divides."""
        of_kinds = (f"{what}/{kind}" for what in OF_LABELLED for kind in ("chosen", "rejected"))
        return (*of_kinds, "entropy", "kl", "micro_batches")

    def __call__(self, outputs: Tensor, targets: Targets) -> Tensor:
        """Return the weighted sum of the completions' losses."""
        weight, rows, _share, _sources, ids, answers, reference, labels = targets
        sums = self.sums(outputs, targets)
        policy = sums[..., 0]
        valid = (torch.arange(len(ids), device=ids.device) < rows).float()
        ratios, others = (policy - reference).unbind(1)
        kl = self._kl(others.detach(), valid)
        assert self.of.loss.of_labelled is not None
        losses = self.of.loss.of_labelled(ratios, labels, kl, self.of)
        of_completions = (self.of.preference_beta * ratios, *sums[:, 0, :2].unbind(1), answers[:, 0, 1:].sum(-1))
        of_kinds = self._of_kinds(torch.stack([each.detach().float() for each in of_completions]), labels, valid)
        entropy = sums[:, 0, 1 + NUMBERS.index("entropy")].detach() @ valid
        self._found = of_kinds | {"entropy": entropy, "kl": kl, "micro_batches": torch.ones_like(kl)}
        return (losses * valid).sum() * weight / self.causal.context.size

    def _kl(self, ratios: Tensor, valid: Tensor) -> Tensor:
        """Return the mean over this micro-batch and those of the other data ranks, at least 0, a scalar."""
        both = torch.stack([ratios @ valid, valid.sum()])
        if self.data_group is not None:
            dist.all_reduce(both, group=self.data_group)
        return (both[0] / both[1].clamp(min=1)).clamp(min=0)

    def _of_kinds(self, values: Tensor, labels: Tensor, valid: Tensor) -> dict[str, Tensor]:
        """Return the sums of OF_LABELLED for each label; `values` [4, samples] are those of all but count."""
        kinds = torch.stack([labels * valid, (1 - labels) * valid], dim=1)
        sums = torch.cat([values, torch.ones_like(values[:1])]) @ kinds
        return dict(zip(self.reports, sums.flatten(), strict=False))

    def metrics(self, parts: Mapping[str, float]) -> dict[str, float]:
        """Return the means over completions of each label, and over their tokens, by TRL's names, and kl."""
        found: dict[str, float] = {}
        for kind in ("chosen", "rejected"):
            if count := parts.get(f"count/{kind}"):
                found |= {f"{what}/{kind}": parts[f"{what}/{kind}"] / count for what in ("rewards", "logps")}
                found[f"logits/{kind}"] = parts[f"logits/{kind}"] / parts[f"tokens/{kind}"]
        if {"rewards/chosen", "rewards/rejected"} <= found.keys():
            found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
        if parts.get("micro_batches"):
            found["kl"] = parts["kl"] / parts["micro_batches"]
            found["entropy"] = parts["entropy"] / (parts["tokens/chosen"] + parts["tokens/rejected"])
        return found
