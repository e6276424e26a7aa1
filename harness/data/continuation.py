"""Continue prompts with the engine of a run in training (`--sample_prompts`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from harness.batches.evaluation import EvaluationBatch
from harness.topology.agreement import any_rank
from harness.training.engine.engine import Engine
from harness.training.engine.losses import Outputs, Targets


def continued(
    engine: Engine, prompts: Sequence[Sequence[int]], most: int, length: int, ends: int | None
) -> list[list[int]]:
    """Continue each prompt greedily by at most `most` tokens, up to `length` tokens with the prompt.

    A continuation stops before the id `ends`. All ranks call it and get the same result, up to rounding differences
    between data ranks. There is no key-value cache: every token costs a forward pass of all prompts.
    """
    rows = [list(prompt) for prompt in prompts]
    done = [False] * len(rows)
    # Ranks may round differently and finish at different tokens; all must call the same forward passes.
    while any_rank(not all(done)):
        new = _next_tokens(engine, rows, length)
        for index, token in enumerate(new):
            if not done[index] and token != ends:
                rows[index].append(token)
            done[index] = done[index] or token == ends or len(rows[index]) == min(length, len(prompts[index]) + most)
    return [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]


def _next_tokens(engine: Engine, rows: Sequence[list[int]], length: int) -> list[int]:
    """Return the most likely next token of each row; each row is a micro-batch, padded on the right to `length`."""
    found: list[torch.Tensor] = []

    def note(outputs: Outputs, targets: Targets) -> None:
        logits = engine.loss.loss.kept(outputs, targets)
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
