"""Which layers a stage holds: cut as a run cuts them, from the same costs by the same method."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from harness.config.values.model_chunks import ModelChunks
from harness.parallel.pipeline.partition import LayerCost, stage_boundaries
from harness.planner.shape import DecoderShape, LayerShape


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The layers of one stage, in all its chunks: kinds with their counts, and whether the first and the last pipeline
    layer are here."""

    layers: tuple[tuple[LayerShape, int], ...]
    is_first: bool
    is_last: bool

    @property
    def depth(self) -> int:
        """Decoder layers."""
        return sum(count for _, count in self.layers)


@lru_cache(maxsize=1024)
def stages_of(
    shape: DecoderShape,
    count: int,
    method: str,
    sequence: int,
    checkpointed: bool,
    each: int = 1,
    folded: bool = False,
    given: tuple[int, ...] | None = None,
) -> tuple[Stage, ...]:
    """Return the stages that `pipeline.partition` makes of a decoder, of `each` chunks. UserError where there are too
    few layers.

    `measured` is planned as `balanced`: what a run will measure is what these costs predict. `given` are the boundaries
    of a run that has chosen its own.
    """
    chunks = ModelChunks(count, each, folded)
    boundaries = [0, len(shape.layers) + 2]
    if given is not None:
        boundaries = list(given)
    elif count > 1:
        boundaries = stage_boundaries(
            method,
            chunks.count,
            costs=[cost.flops_per_token() for cost in _costs(shape, sequence, checkpointed)],
            parameters=[shape.prologue_parameters, *(x.parameters for x in shape.layers), shape.epilogue_parameters],
            names=["Prologue", *("DecoderLayer" for _ in shape.layers), "Epilogue"],
        )
    return tuple(_stage(shape, boundaries, chunks.of_stage(stage)) for stage in range(count))


def _stage(shape: DecoderShape, boundaries: list[int], own: list[int]) -> Stage:
    """Return the stage of the chunks `own`; pipeline layer 0 is the prologue, the last one the epilogue."""
    inside: list[LayerShape] = []
    for chunk in own:
        start, stop = boundaries[chunk], boundaries[chunk + 1]
        inside = [*inside, *shape.layers[max(0, start - 1) : min(stop - 1, len(shape.layers))]]
    return Stage(
        layers=tuple(Counter(inside).items()),
        is_first=0 in own,
        is_last=len(boundaries) - 2 in own,
    )


def _costs(shape: DecoderShape, sequence: int, checkpointed: bool) -> list[LayerCost]:
    """Return what the pipeline layers cost, counted as a run counts them."""
    tables = 2 if shape.position_rows else 1
    return [
        LayerCost(lookup_width=tables * shape.hidden),
        *(
            LayerCost(
                matmul_parameters=layer.active_parameters,
                vector_parameters=layer.vectors,
                attention_width=layer.output,
                sequence_length=sequence,
                checkpointed=checkpointed,
            )
            for layer in shape.layers
        ),
        LayerCost(
            matmul_parameters=shape.vocab * shape.hidden,
            vector_parameters=shape.outer_vectors,
            logits=shape.vocab,
        ),
    ]
