"""Model chunks (virtual stages): the assignment of consecutive layers to pipeline stages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class ModelChunks:
    """The model chunks in layer order, and the stage of each.

    Chunks are assigned to the p stages in turn: stage 0 has chunks 0, p, 2 p, ... If folded, every other round runs
    backwards: with two rounds, stage 0 has the first and the last chunk.

    Attributes:
        num_stages: number of pipeline stages.
        per_stage: number of chunks per stage.
        folded: whether every other round runs backwards.
    """

    num_stages: int
    per_stage: int = 1
    folded: bool = False

    @cached_property
    def count(self) -> int:
        """Number of chunks in the whole model."""
        return self.num_stages * self.per_stage

    @property
    def loss_stage(self) -> int:
        """The stage with the last chunk, which computes the loss."""
        return self.stage_of(self.count - 1)

    def stage_of(self, chunk: int) -> int:
        """Return the stage that has a chunk; in a folded schedule, every second round runs from the last stage back."""
        round_, position = divmod(chunk, self.num_stages)
        return self.num_stages - 1 - position if self.folded and round_ % 2 else position

    def of_stage(self, stage: int) -> list[int]:
        """Return the chunks of a stage in layer order."""
        return [chunk for chunk in range(self.count) if self.stage_of(chunk) == stage]
