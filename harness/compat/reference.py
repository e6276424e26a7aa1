"""The training in one process that a layout is held to, and how far rounding alone may lead from it.

Curves are the loss and the gradient norm of each step. The reference runs in the micro-batches of the layouts, because
a model's choice among equals (of experts, of keys) may depend on shapes. What rounding does is measured by training
again with weights that are off by rounding errors.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from harness.parallel.generators import own_generators

BLOCK, BATCH, MICRO, STEPS = 32, 8, 2, 3
TEXT = b"Sphinx of black quartz, judge my vow; 0123456789 + 9876543210. "
# relative: of every loss, of the first gradient norm, of the later ones, where Adam has divided rounding by rounding
ALLOWED = (5e-6, 2e-5, 5e-4)
MOST = (1e-4, 1e-3, 1e-2)  # however much rounding errors do
NOISE = 30
ROUNDING = 2e-7

Curve = list[tuple[float, float]]


def allowance(directory: Path, curve: Curve, seeds: Iterable[int]) -> list[float]:
    """By how much a curve may be off: what rounding errors in the weights do to it, several times over."""
    apart = [worst(reference(directory, rounding=seed), curve) for seed in seeds]
    most = [NOISE * max(values) for values in zip(*apart, strict=True)]
    return [max(least, min(noise, limit)) for least, noise, limit in zip(ALLOWED, most, MOST, strict=True)]


def samples() -> list[dict[str, list[int]]]:
    """One global batch: bytes of a text, as noise would make Adam divide noise by noise."""
    text = TEXT * (BLOCK * BATCH // len(TEXT) + 1)
    return [{"input_ids": list(text[start : start + BLOCK])} for start in range(0, BATCH * BLOCK, BLOCK)]


def reference(directory: Path, rounding: int | None = None) -> Curve:
    """Return the training in one process; with `rounding`, a seed, of weights that are off by rounding errors."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True).train()
    if rounding is not None:
        with torch.no_grad(), own_generators(rounding):
            for parameter in model.parameters():
                parameter.mul_(1 + ROUNDING * (torch.randint_like(parameter, 2) * 2 - 1))
    ids = torch.tensor([sample["input_ids"] for sample in samples()])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    curve = []
    for _ in range(STEPS):
        loss = torch.zeros(())
        for part in ids.split(MICRO):  # the shapes of the layouts: a choice among equals may depend on them
            logits = model(input_ids=part, use_cache=False).logits
            mean = cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]).float(), part[:, 1:].reshape(-1))
            (mean * MICRO / BATCH).backward()
            loss += mean.detach() * MICRO / BATCH
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        curve.append((loss.item(), norm.item()))
    return curve


def worst(curve: Curve, wanted: Curve) -> tuple[float, float, float]:
    """Return the largest relative difference of the losses, of the first norm, and of the later ones."""
    pairs = list(zip(curve, wanted, strict=True))
    losses, norms = ([abs(a[i] - b[i]) / max(abs(b[i]), 1e-30) for a, b in pairs] for i in range(2))
    return max(losses), norms[0], max(norms[1:])
