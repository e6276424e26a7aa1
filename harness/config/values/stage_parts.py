"""Which stage of a pipeline has which parts of the model: one part each, or several."""

from __future__ import annotations

from dataclasses import dataclass

from harness.config.values.layout_keys import FOLDED_SCHEDULES, ROUND_ROBIN_SCHEDULES

DEFAULT_PARTS = 2


@dataclass(frozen=True)
class StageParts:
    """The parts of the model in the order of its layers, and the stage of each.

    Parts go round the stages: stage 0 has parts 0, p, 2 p, ... Where they are folded, every other round runs backwards:
    with two rounds stage 0 has the first and the last part.

    Attributes:
        stages: number of pipeline stages.
        each: parts that a stage has.
        folded: whether every other round runs backwards.
    """

    stages: int
    each: int = 1
    folded: bool = False

    @property
    def count(self) -> int:
        """Number of parts."""
        return self.stages * self.each

    @property
    def loss_stage(self) -> int:
        """The stage that has the last part, and computes the loss."""
        return self.stage_of(self.count - 1)

    def stage_of(self, part: int) -> int:
        """Return the stage that has a part."""
        lap, place = divmod(part, self.stages)
        return self.stages - 1 - place if self.folded and lap % 2 else place

    def of_stage(self, stage: int) -> list[int]:
        """Return the parts of a stage, in the order of their layers."""
        return [part for part in range(self.count) if self.stage_of(part) == stage]


def stage_parts(stages: int, schedule: str, asked: int | None = None) -> StageParts:
    """Return the parts by which a schedule cuts the model; `asked`: parts a stage, where the schedule has no number of
    its own."""
    if stages > 1 and schedule in FOLDED_SCHEDULES:
        return StageParts(stages, 2, folded=True)
    if stages > 1 and schedule in ROUND_ROBIN_SCHEDULES:
        return StageParts(stages, asked or DEFAULT_PARTS)
    return StageParts(stages)
