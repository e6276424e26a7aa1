"""Find out when a pipeline stage receives what it waits for, if all stages take equally long for their passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.parallel.pipeline.instructions import Action, Instruction
from harness.schedules import ModelChunks

SENDER = {Action.RECEIVE_ACTIVATION: (Action.SEND_ACTIVATION, -1), Action.RECEIVE_GRADIENT: (Action.SEND_GRADIENT, 1)}
"""What is received -> how it was sent, and by which chunk, relative to the one that receives it."""


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Seconds from the beginning of the first forward pass.

    Attributes:
        arrivals: when what an instruction receives has arrived.
        end: when the last stage has finished all passes.
    """

    arrivals: dict[Instruction, float]
    end: float


def stage_times(
    programs: Sequence[Sequence[Instruction]],
    chunks: ModelChunks,
    seconds: Callable[[Action, int, int], float],
    sent_seconds: float,
) -> StageTimes:
    """Run the instructions of all stages, each of which waits for what others send.

    Args:
        programs: the instructions of each stage.
        seconds: returns the time of an action for a chunk on a stage.
        sent_seconds: time from one stage to another; within a stage none.
    """
    now = [0.0] * len(programs)
    next_one = [0] * len(programs)
    sent: dict[Instruction, float] = {}
    arrivals: dict[Instruction, float] = {}
    moved = True
    while moved:
        moved = False
        for stage, program in enumerate(programs):
            for instruction in program[next_one[stage] :]:
                if instruction.action in SENDER:
                    action, offset = SENDER[instruction.action]
                    origin = Instruction(action, instruction.micro_batch, instruction.chunk + offset)
                    if origin not in sent:
                        break
                    is_far = chunks.stage_of(origin.chunk) != stage
                    arrivals[instruction] = sent[origin] + (sent_seconds if is_far else 0.0)
                    now[stage] = max(now[stage], arrivals[instruction])
                now[stage] += seconds(instruction.action, instruction.chunk, stage)
                sent[instruction] = now[stage]
                next_one[stage] += 1
                moved = True
    assert all(done == len(program) for done, program in zip(next_one, programs, strict=True))
    return StageTimes(arrivals=arrivals, end=max(now))
