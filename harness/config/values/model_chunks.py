"""Model chunks (virtual stages): which stage of a pipeline has which consecutive layers."""

from __future__ import annotations

from dataclasses import dataclass

from harness.config.values.layout_keys import FOLDED_SCHEDULES, INTERLEAVED

DEFAULT_CHUNKS = 2


@dataclass(frozen=True)
class ModelChunks:
    """The model chunks in the order of their layers, and the stage of each.

    Chunks are dealt to the p stages in turn: stage 0 has chunks 0, p, 2 p, ... If they are folded, every other round
    runs backwards: with two rounds stage 0 has the first and the last chunk.

    Attributes:
        stages: number of pipeline stages.
        each: chunks that a stage has.
        folded: whether every other round runs backwards.
    """

    stages: int
    each: int = 1
    folded: bool = False

    @property
    def count(self) -> int:
        """Number of chunks in the whole model."""
        return self.stages * self.each

    @property
    def loss_stage(self) -> int:
        """The stage that has the last chunk, and computes the loss."""
        return self.stage_of(self.count - 1)

    def stage_of(self, chunk: int) -> int:
        """Return the stage that has a chunk."""
        round_, position = divmod(chunk, self.stages)
        return self.stages - 1 - position if self.folded and round_ % 2 else position

    def of_stage(self, stage: int) -> list[int]:
        """Return the chunks of a stage, in the order of their layers."""
        return [chunk for chunk in range(self.count) if self.stage_of(chunk) == stage]


def model_chunks(stages: int, schedule: str, asked: int | None = None) -> ModelChunks:
    """Return the chunks into which a schedule cuts the model.

    Args:
        asked: chunks a stage (`pipeline.chunks_per_stage`), for a schedule that leaves their number open.
    """
    if stages > 1 and schedule in FOLDED_SCHEDULES:
        return ModelChunks(stages, 2, folded=True)
    if stages > 1 and schedule == INTERLEAVED:
        return ModelChunks(stages, asked or DEFAULT_CHUNKS)
    return ModelChunks(stages)
