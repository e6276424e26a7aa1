"""Partition the layers into pipeline stages by cost, and report the stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from harness.config import Resolved
from harness.config.values.batch import bubble, idle, micro_batches_wanted
from harness.console import Console
from harness.deepspeed.zero3_parameters import held_tensor
from harness.errors import UserError
from harness.parallel.pipeline.partition import stage_boundaries
from harness.schedules import DEFAULT, ModelChunks
from harness.topology.agreement import all_gather_object
from harness.topology.groups import Groups
from harness.topology.layout import Layout
from harness.training.prepare.trainable import TrainableModel
from harness.wording import counted


@dataclass(frozen=True)
class StageLine:
    """One stage, as reported to the user and in `run.json`.

    Attributes:
        ranks: global ranks of the stage.
        first, last: indices of the stage's first and last pipeline layer.
        chunks: first and last layer index of each model chunk.
        kinds: class name -> number of layers.
        parameters: number of parameters on one rank of the stage.
    """

    stage: int
    ranks: list[int]
    first: int
    last: int
    chunks: list[tuple[int, int]]
    kinds: dict[str, int]
    parameters: int

    def __str__(self) -> str:
        kinds = ", ".join(name if n == 1 else f"{n} x {name}" for name, n in self.kinds.items())
        ranks = f"rank {self.ranks[0]}" if len(self.ranks) == 1 else f"ranks {self.ranks[0]}-{self.ranks[-1]}"
        layers = " and ".join(f"{first}-{last}" for first, last in self.chunks)
        return f"stage {self.stage} on {ranks}: layers {layers} ({kinds}), {self.parameters:,} parameters a rank"


def choose_boundaries(trainable: TrainableModel, resolved: Resolved, measured: Sequence[float] | None) -> list[int]:
    """Return the boundaries of the model chunks (one per stage by default) by `pipeline.partition`.

    All ranks call it and get the same result: index of the first layer of each chunk, followed by the number of layers.

    Args:
        measured: measured costs of the layers; None for the computed ones.

    Raises:
        UserError: there are fewer layers than chunks, or a chunk has no trained parameter.
    """
    chunks = resolved.chunks
    if chunks.per_stage > 1 and chunks.count > len(trainable.layers):
        raise UserError(
            f"pipeline.schedule {resolved.schedule}: {chunks.num_stages} stages of {chunks.per_stage} model "
            f"chunks, but the model has only {counted(len(trainable.layers), 'layer')}: use fewer stages or chunks, or "
            "another schedule"
        )
    boundaries = [0, len(trainable.layers)]
    if chunks.count > 1:
        boundaries = stage_boundaries(
            resolved.partition,
            chunks.count,
            costs=trainable.costs if measured is None else measured,
            parameters=trainable.parameters,
            names=trainable.names,
        )
    for chunk, (start, stop) in enumerate(pairwise(boundaries)):
        # DeepSpeed's engines do not support a stage without a trained parameter.
        if not sum(trainable.trained[start:stop]):
            where = f"stage {chunk}" if chunks.per_stage == 1 else f"model chunk {chunk}"
            if chunks.count == 1:
                raise UserError("the model has nothing to train: each of its parameters is frozen, or it has none")
            raise UserError(f"{where} has nothing to train: use another pipeline.partition or fewer stages")
    return boundaries


def stage_costs(layers: Sequence[float], boundaries: Sequence[int], chunks: ModelChunks) -> list[float]:
    cost = [sum(layers[start:stop]) for start, stop in pairwise(boundaries)]
    return [sum(cost[chunk] for chunk in chunks.of_stage(stage)) for stage in range(chunks.num_stages)]


def stage_lines(
    trainable: TrainableModel, boundaries: Sequence[int], module: nn.Module, chunks: ModelChunks, groups: Groups
) -> list[StageLine]:
    """Return one line for each stage; all ranks call it."""
    held = sum(held_tensor(parameter).numel() for parameter in module.parameters())
    sizes = all_gather_object((groups.coordinate.stage, held))
    # Ranks of one stage may hold shards of unequal size: report the largest.
    largest = {stage: max(size for s, size in sizes if s == stage) for stage, _ in sizes}
    lines = []
    for stage in sorted(largest):
        own = [(boundaries[chunk], boundaries[chunk + 1] - 1) for chunk in chunks.of_stage(stage)]
        kinds = Counter(name for first, last in own for name in trainable.names[first : last + 1])
        lines.append(
            StageLine(
                stage=stage,
                ranks=groups.layout.stage_ranks(stage),
                first=own[0][0],
                last=own[-1][1],
                chunks=own,
                kinds=dict(kinds),
                parameters=largest[stage],
            )
        )
    return lines


def batch_warning(
    num_stages: int, micro: int, accumulation: int, schedule: str = DEFAULT, chunks_per_stage: int | None = None
) -> str | None:
    """Return a warning with a remedy if the pipeline bubble exceeds a fifth of a step, else None."""
    order = schedule, chunks_per_stage
    wanted = micro_batches_wanted(num_stages, *order)
    if accumulation >= wanted:
        return None
    flag = "--gradient_accumulation_steps"
    remedy = f"{flag} {wanted} leaves {bubble(num_stages, wanted, *order):.0%}"
    share = micro * accumulation
    finer = next((size for size in range(micro - 1, 0, -1) if share % size == 0 and share // size >= wanted), None)
    if finer is not None:
        remedy += f"; with the same batch --per_device_train_batch_size {finer} {flag} {share // finer}"
    return f"{idle(num_stages, accumulation, *order)}: {remedy}"


def report_stages(console: Console, layout: Layout, resolved: Resolved, steps: int, lines: Sequence[StageLine]) -> None:
    """Report the layout, the batch, each stage's layers and parameters, and the scope of weight decay."""
    named = layout.pp_size > 1 and resolved.schedule != DEFAULT
    schedule = f", {resolved.schedule}" if named else ""
    console.say(
        f"{layout}{schedule}, ZeRO-{resolved.zero_stage}, {resolved.precision}: {counted(steps, 'step')} "
        f"of {counted(resolved.train_batch, 'sample')} "
        f"({resolved.accumulation} x {resolved.micro_batch} a data rank)"
    )
    for line in lines:
        console.say(f"  {line}")
    if resolved.config.get("optimizer", {}).get("params", {}).get("weight_decay"):
        console.say("  the JSON's weight_decay: not of biases and norms, as in HuggingFace; DeepSpeed decays these too")
    order = resolved.schedule, resolved.chunks.per_stage
    warning = batch_warning(layout.pp_size, resolved.micro_batch, resolved.accumulation, *order)
    if warning is not None:
        console.warn(warning)
