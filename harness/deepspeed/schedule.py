"""Schedules of one's own on DeepSpeed's PipelineEngine.

The engine executes a list of instructions; it is given another list, and what it does not know yet: a backward pass
whose weight gradients come later, sends that do not wait, and several model chunks on a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from deepspeed.runtime.pipe import schedule as of_deepspeed
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor
from torch.utils._pytree import tree_map

from harness.config.values.model_chunks import ModelChunks
from harness.deepspeed.chunk_switch import ChunkSwitch
from harness.deepspeed.instructions import Execute, Kind, execute_by, executing
from harness.deepspeed.transfers import Transfers, open_transfers


class InputGradients(of_deepspeed.BufferOpInstruction):  # type: ignore[misc]  # DeepSpeed has no types
    """Run a backward pass without the weight gradients that can be put off."""


class WeightGradients(of_deepspeed.BufferOpInstruction):  # type: ignore[misc]  # DeepSpeed has no types
    """Compute the weight gradients that were put off the longest ago."""


class AwaitSends(of_deepspeed.PipeInstruction):  # type: ignore[misc]  # DeepSpeed has no types
    """Wait until all that was sent has arrived."""


class Deferral(Protocol):
    """What puts off weight gradients, and computes them."""

    def put_off(self) -> AbstractContextManager[object]:
        """Return a context in which a backward pass puts them off."""

    def compute(self) -> None:
        """Compute and accumulate those of the oldest backward pass."""

    def clear(self) -> None:
        """Forget what is kept."""


@dataclass(frozen=True)
class StageProgram:
    """What one stage executes in a step.

    Attributes:
        instructions: names of instructions, each with its micro-batch and its model chunk.
        buffers: micro-batches that each chunk of the stage holds at a time.
    """

    instructions: Sequence[tuple[str, int, int]]
    buffers: int

    @property
    def micro_batches(self) -> int:
        """How many it goes through: in an evaluation others than in a step."""
        return 1 + max((micro_batch for _, micro_batch, _ in self.instructions), default=-1)


class OwnSchedule(of_deepspeed.PipeSchedule):  # type: ignore[misc]  # DeepSpeed has no types
    """A program as the engine takes it, and what comes after its last instruction."""

    def __init__(self, engine: PipelineEngine, program: StageProgram, last: Sequence[Kind]) -> None:
        super().__init__(program.micro_batches, engine.num_stages, engine.stage_id)
        self._program, self._last = program, last

    def num_pipe_buffers(self) -> int:
        """Return how many buffers the engine has to hold."""
        return self._program.buffers

    def steps(self) -> Iterator[list[of_deepspeed.PipeInstruction]]:
        """Yield the instructions."""
        for name, micro_batch, chunk in self._program.instructions:
            yield [INSTRUCTIONS[name](self._buffer_idx(micro_batch), micro_batch=micro_batch, chunk=chunk)]
        yield [kind() for kind in self._last]


INSTRUCTIONS: Mapping[str, type[of_deepspeed.BufferOpInstruction]] = {
    kind.__name__: kind
    for kind in (
        of_deepspeed.LoadMicroBatch,
        of_deepspeed.ForwardPass,
        of_deepspeed.BackwardPass,
        of_deepspeed.SendActivation,
        of_deepspeed.RecvActivation,
        of_deepspeed.SendGrad,
        of_deepspeed.RecvGrad,
        InputGradients,
        WeightGradients,
    )
}


UPDATE = (AwaitSends, of_deepspeed.ReduceTiedGrads, of_deepspeed.ReduceGrads, of_deepspeed.OptimizerStep)


def run_schedule(
    engine: PipelineEngine,
    chunks: ModelChunks,
    training: StageProgram,
    evaluation: Callable[[int], StageProgram],
    deferral: Deferral,
) -> None:
    """Have the engine train by a program. It evaluates some micro-batches by `evaluation`, if a stage has several
    model chunks; else it keeps DeepSpeed's schedule."""
    switch = ChunkSwitch(engine, chunks)
    transfers = open_transfers(engine, chunks)
    execute_by(engine, _executors(engine, switch, transfers, deferral))

    def begin(program: StageProgram, last: Sequence[Kind]) -> OwnSchedule:
        for each in transfers:
            each.clear()
        switch.begin(program.buffers)
        return OwnSchedule(engine, program, last)

    def train_schedule() -> OwnSchedule:
        deferral.clear()  # of a step that failed
        return begin(training, UPDATE)

    engine._train_schedule = train_schedule
    if chunks.each > 1:
        engine._inference_schedule = lambda micro_batches: begin(evaluation(micro_batches), (AwaitSends,))


def _executors(
    engine: PipelineEngine, switch: ChunkSwitch, transfers: tuple[Transfers, Transfers], deferral: Deferral
) -> dict[Kind, Execute]:
    """Return what executes each instruction of a schedule that is not DeepSpeed's own."""
    activations, gradients = transfers
    own: dict[Kind, Execute] = {}
    for kind in (of_deepspeed.SendActivation, of_deepspeed.RecvActivation):
        own[kind] = activations.carry(executing(engine, kind))
    for kind in (of_deepspeed.SendGrad, of_deepspeed.RecvGrad):
        own[kind] = gradients.carry(executing(engine, kind))
    backward = switch.give_loss(executing(engine, of_deepspeed.BackwardPass))
    own |= {
        of_deepspeed.LoadMicroBatch: executing(engine, of_deepspeed.LoadMicroBatch),
        of_deepspeed.ForwardPass: switch.keep_loss(executing(engine, of_deepspeed.ForwardPass)),
        of_deepspeed.BackwardPass: backward,
    }

    def input_gradients(engine: PipelineEngine, buffer_id: int) -> None:
        received = engine.grad_layer
        engine.grad_layer = tree_map(_copied, received)  # the engine receives the next one into the same tensor
        with deferral.put_off():
            backward(engine, buffer_id=buffer_id)
        engine.grad_layer = received

    def weight_gradients(engine: PipelineEngine, buffer_id: int) -> None:  # noqa: ARG001  # in the order of the passes
        _accumulate(engine, deferral.compute)

    def await_sends(_engine: PipelineEngine) -> None:
        for each in transfers:
            each.finish()
        switch.leave()

    own |= {InputGradients: input_gradients, WeightGradients: weight_gradients}
    own |= {kind: switch.at_chunk(own[kind]) for kind in INSTRUCTIONS.values()}
    return {**own, AwaitSends: await_sends}


def _copied(value: object) -> object:
    return value.clone() if isinstance(value, Tensor) else value


def _accumulate(engine: PipelineEngine, compute: Callable[[], None]) -> None:
    """Compute gradients as the engine does in a backward pass of its own: in bf16 they are added up in float32."""
    in_float32 = engine.using_bf16_optimizer
    if in_float32:
        engine.optimizer.clear_lp_grads(set_to_none=True)
    engine._running_engine_backward = True
    try:
        compute()
    finally:
        engine._running_engine_backward = False
    if in_float32:
        engine.optimizer.update_hp_grads()
        engine.optimizer.clear_lp_grads(set_to_none=True)
