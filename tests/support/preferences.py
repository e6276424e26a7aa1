"""Preference data, and training on them in float64 by the formulas of the papers and of TRL, pair by pair."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from math import exp, log1p
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import PreTrainedModel

from harness.batches.order import batch_indices

END = 256
PAIRS = [
    {
        "prompt": f"{i} plus {i} is ",
        "chosen": f"{2 * i}" + "." * (i % 3),
        "rejected": f"{2 * i + 1}, or nearly so"[: 5 + i],
    }
    for i in range(8)
]
LABELLED = [
    {"prompt": pair["prompt"], "completion": pair["chosen" if i % 3 else "rejected"], "label": i % 3 != 0}
    for i, pair in enumerate(PAIRS)
]
FLAGS = {
    "beta": "preference_beta",
    "smoothing": "preference_label_smoothing",
    "gamma": "simpo_gamma",
    "desirable": "desirable_weight",
    "undesirable": "undesirable_weight",
}
"""Names of the settings here -> flags."""
DEFAULTS = {"beta": 0.1, "smoothing": 0.0, "gamma": 0.5, "desirable": 1.0, "undesirable": 1.0}

Step = dict[str, float]
"""Loss, gradient norm and metrics of a step, under the names of metrics.jsonl."""


def log_probs(model: PreTrainedModel, prompt: str, completion: str) -> tuple[Tensor, Tensor]:
    """The log-probabilities of the completion's tokens, and of all tokens, as the bytes tokenizer makes them."""
    ids = torch.tensor([[*prompt.encode(), *completion.encode(), END]])
    found = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return found[len(prompt.encode()) - 1 :], found


@torch.no_grad()
def of_tokens(model: PreTrainedModel, prompt: str, completion: str) -> Tensor:
    """Of the completion's tokens: mean logit, entropy, and whether the model would choose the token [3, tokens]."""
    first, ids = len(prompt.encode()) - 1, torch.tensor([*prompt.encode(), *completion.encode(), END])
    logits = model(ids[None]).logits[0, first:-1]
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    return torch.stack([logits.mean(-1), entropy, logits.argmax(-1) == ids[first + 1 :]])


def pair_loss(
    kind: str, policy: Sequence[Tensor], before: Sequence[float], of: Mapping[str, float]
) -> tuple[Tensor, Step]:
    """Loss and metrics of one pair, from the log-probabilities of the tokens of both completions; for orpo without its
    cross entropy."""
    beta, wrong = of["beta"], of["smoothing"]
    sums, sizes = [each.sum() for each in policy], [len(each) for each in policy]
    rewards = [beta * (total - old) for total, old in zip(sums, before, strict=True)]
    if kind in ("simpo", "orpo"):
        sums = [each.mean() for each in policy]
        rewards = [beta * each for each in sums]
    if kind == "dpo":
        margin = rewards[0] - rewards[1]
        loss = -(1 - wrong) * logsigmoid(margin) - wrong * logsigmoid(-margin)
    elif kind == "ipo":
        averages = [(total - old) / size for total, old, size in zip(sums, before, sizes, strict=True)]
        loss = (averages[0] - averages[1] - 1 / (2 * beta)) ** 2
    elif kind == "simpo":
        margin = rewards[0] - rewards[1] - of["gamma"]
        loss = -(1 - wrong) * logsigmoid(margin) - wrong * logsigmoid(-margin)
    else:
        odds = [each - torch.log1p(-each.exp()) for each in sums]
        loss = -beta * logsigmoid(odds[0] - odds[1])
    metrics = {
        "rewards/chosen": rewards[0].item(),
        "rewards/rejected": rewards[1].item(),
        "rewards/accuracies": float(rewards[0] > rewards[1]),
        "rewards/margins": (rewards[0] - rewards[1]).item(),
        "logps/chosen": sums[0].item(),
        "logps/rejected": sums[1].item(),
    }
    if kind == "orpo":
        numbers = [each.item() for each in sums]
        odds_of_chosen = numbers[0] - numbers[1] - log1p(-exp(numbers[0])) + log1p(-exp(numbers[1]))
        metrics |= {"log_odds_chosen": odds_of_chosen, "log_odds_ratio": -log1p(exp(-odds_of_chosen))}
    return loss, metrics


def pair_step(
    model: PreTrainedModel, before: PreTrainedModel, kind: str, rows: Sequence[Any], of: Mapping[str, float]
) -> tuple[Tensor, Step]:
    """Loss and metrics of a global batch of pairs."""
    losses, metrics, entropies = [], [], []
    for row in rows:
        both = [log_probs(model, row["prompt"], row[name]) for name in ("chosen", "rejected")]
        with torch.no_grad():
            old = [log_probs(before, row["prompt"], row[name])[0].sum().item() for name in ("chosen", "rejected")]
        loss, found = pair_loss(kind, [each for each, _ in both], old, of)
        losses.append(loss)
        metrics.append(found)
        entropies.append(-both[0][1])
    chosen, rejected = (
        torch.cat([of_tokens(model, row["prompt"], row[name]) for row in rows], dim=1)
        for name in ("chosen", "rejected")
    )
    total = torch.stack(losses).mean()
    means = {name: mean(each[name] for each in metrics) for name in metrics[0]}
    if abs(means["rewards/margins"]) < 1e-6:  # before training the harness's rewards are rounding alone
        del means["rewards/accuracies"]
    means |= {"logits/chosen": chosen[0].mean().item(), "logits/rejected": rejected[0].mean().item()}
    means |= {
        "entropy": torch.cat([chosen[1], rejected[1]]).mean().item(),
        "mean_token_accuracy": chosen[2].mean().item(),
    }
    if kind == "orpo":
        means["nll_loss"] = torch.cat(entropies).mean().item()
        total = total + torch.cat(entropies).mean()
    return total, means


def labelled_step(
    model: PreTrainedModel,
    before: PreTrainedModel,
    batches: Sequence[Sequence[int]],
    of: Mapping[str, float],
    group: int,
) -> tuple[Tensor, Step]:
    """Loss and metrics of a global batch of LABELLED, whose micro-batches over all data ranks are `batches`; `group`
    consecutive rows exchange their completions."""
    losses, kls, found = [], [], {True: [], False: []}
    for batch in batches:
        moved, ratios = [], []
        for index in batch:
            row = LABELLED[index]
            start = index - index % group
            other = LABELLED[start + (index - start - 1) % group]["completion"]
            ratio = log_probs(model, row["prompt"], row["completion"])[0].sum()
            with torch.no_grad():
                moved.append(
                    log_probs(model, row["prompt"], other)[0].sum() - log_probs(before, row["prompt"], other)[0].sum()
                )
                old = log_probs(before, row["prompt"], row["completion"])[0].sum()
            ratios.append((row["label"], ratio - old, ratio))
        kls.append(max(torch.stack(moved).mean().item(), 0.0))
        for label, ratio, policy in ratios:
            gain = torch.sigmoid(of["beta"] * (ratio - kls[-1] if label else kls[-1] - ratio))
            losses.append(of["desirable" if label else "undesirable"] * (1 - gain))
            found[label].append((of["beta"] * ratio.item(), policy.item()))
    rows = [LABELLED[index] for batch in batches for index in batch]
    of_rows = [(row["label"], of_tokens(model, row["prompt"], row["completion"])) for row in rows]
    metrics = {"kl": mean(kls), "entropy": torch.cat([each[1] for _, each in of_rows]).mean().item()}
    for label, name in ((True, "chosen"), (False, "rejected")):
        metrics[f"logits/{name}"] = torch.cat([each[0] for kind, each in of_rows if kind == label]).mean().item()
        metrics[f"rewards/{name}"], metrics[f"logps/{name}"] = (
            mean(column) for column in zip(*found[label], strict=True)
        )
    metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    return torch.stack(losses).mean(), metrics


def trained(
    model: PreTrainedModel,
    kind: str,
    *,
    steps: int,
    batch: int,
    micro: int = 1,
    group: int = 0,
    rate: float = 1e-3,
    seed: int = 42,
    before: PreTrainedModel | None = None,
    in_order: bool = False,
    **of: float,
) -> list[Step]:
    """Train `model` in float64 by plain torch on global batches of `batch` rows, in the harness's order of samples, or
    with `in_order` as a stream has them.

    For kto, `micro` is the number of micro-batches of a global batch, each over all data ranks.
    """
    settings = DEFAULTS | of
    model = model.double()
    before = copy.deepcopy(model) if before is None else before.double()
    parameters = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    curve = []
    for step in range(steps):
        order = batch_indices(step * batch, batch, len(PAIRS), seed).tolist()
        if in_order:
            order = [index % len(PAIRS) for index in range(step * batch, (step + 1) * batch)]
        if kind == "kto":
            cut = [order[start : start + batch // micro] for start in range(0, batch, batch // micro)]
            loss, metrics = labelled_step(model, before, cut, settings, group)
        else:
            loss, metrics = pair_step(model, before, kind, [PAIRS[index] for index in order], settings)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        curve.append({"loss": loss.item(), "grad_norm": norm.item(), **metrics})
    return curve


@torch.no_grad()
def evaluated(model: PreTrainedModel, before: PreTrainedModel, kind: str, **of: float) -> Step:
    """The numbers of an evaluation of all pairs."""
    loss, metrics = pair_step(model, before, kind, PAIRS, DEFAULTS | of)
    return {"loss": loss.item(), **metrics}
