"""Continue token sequences with a model that is spread over ranks, through its engine's evaluation forward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from harness.data.batches.evaluation import EvaluationBatch
from harness.resilience.process.distributed import any_rank
from harness.training.engine.engine import Engine
from harness.training.engine.kept_outputs import whole_outputs
from harness.training.engine.losses import Outputs, Targets


def continued(
    engine: Engine, prompts: Sequence[Sequence[int]], most: int, length: int, ends: int | None
) -> list[list[int]]:
    """Return what follows each prompt: at most `most` tokens, each the most likely one, `length` with the prompt.

    A continuation stops before the id `ends`. All ranks call it and get the same, but for data ranks that round
    differently. Every token costs a forward of all prompts at their full length, as no rank keeps a cache of keys.
    """
    rows = [list(prompt) for prompt in prompts]
    done = [False] * len(rows)
    while any_rank(not all(done), engine.device):
        new = _next_tokens(engine, rows, length)
        for index, token in enumerate(new):
            if not done[index] and token != ends:
                rows[index].append(token)
            done[index] = done[index] or token == ends or len(rows[index]) == min(length, len(prompts[index]) + most)
    return [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]


def _next_tokens(engine: Engine, rows: Sequence[list[int]], length: int) -> list[int]:
    """Return the most likely token after each row; each is a micro-batch, filled up at the right."""
    found: list[torch.Tensor] = []

    def note(outputs: Outputs, _targets: Targets) -> None:
        logits = whole_outputs(engine.loss.loss, outputs)
        found.append(logits[0, len(rows[len(found)]) - 1].argmax())

    batches = []
    for row in rows:
        ids = torch.tensor([row + [row[-1]] * (length - len(row))])
        batches.append(EvaluationBatch(inputs=ids, labels=ids.clone(), rows=1))
    engine.loss.observer = note
    try:
        engine.evaluate(batches if engine.reads_data else [], len(batches))
    finally:
        engine.loss.observer = None
    tokens = torch.stack(found) if found else torch.zeros(len(rows), dtype=torch.long, device=engine.device)
    if engine.groups.pp_group is not None:
        source = dist.get_process_group_ranks(engine.groups.pp_group)[engine.groups.loss_stage]
        dist.broadcast(tokens, source, group=engine.groups.pp_group)
    return [int(token) for token in tokens.tolist()]
