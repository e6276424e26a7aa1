"""Schedules of one's own on DeepSpeed's PipelineEngine.

The engine executes a list of instructions; it is given another list, and what it does not know yet: a backward pass
whose weight gradients come later, and sends that do not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch.distributed as dist
from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.pipe import schedule as of_deepspeed
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor
from torch.utils._pytree import tree_map

Execute = Callable[..., None]


class InputGradients(of_deepspeed.BufferOpInstruction):  # type: ignore[misc]  # DeepSpeed has no types
    """Run a backward pass without the weight gradients that can be put off."""


class WeightGradients(of_deepspeed.BufferOpInstruction):  # type: ignore[misc]  # DeepSpeed has no types
    """Compute the weight gradients that were put off the longest ago."""


class AwaitSends(of_deepspeed.PipeInstruction):  # type: ignore[misc]  # DeepSpeed has no types
    """Wait until all that was sent has arrived."""


class Deferral(Protocol):
    """What puts off weight gradients, and computes them."""

    def put_off(self) -> Any:
        """Return a context in which a backward pass puts them off."""

    def compute(self) -> None:
        """Compute and accumulate those of the oldest backward pass."""

    def clear(self) -> None:
        """Forget what is kept."""


@dataclass(frozen=True)
class StageProgram:
    """What one stage executes in a step.

    Attributes:
        instructions: names of instructions, each with its micro-batch.
        buffers: micro-batches that the stage holds at a time.
    """

    instructions: Sequence[tuple[str, int]]
    buffers: int


class OwnSchedule(of_deepspeed.PipeSchedule):  # type: ignore[misc]  # DeepSpeed has no types
    """A program as the engine takes it; gradients are reduced and the optimizer steps after its last instruction."""

    def __init__(self, engine: PipelineEngine, program: StageProgram) -> None:
        super().__init__(engine.micro_batches, engine.num_stages, engine.stage_id)
        self._program = program

    def num_pipe_buffers(self) -> int:
        """Return how many buffers the engine has to hold."""
        return self._program.buffers

    def steps(self) -> Iterator[list[of_deepspeed.PipeInstruction]]:
        """Yield the instructions."""
        for name, micro_batch in self._program.instructions:
            yield [INSTRUCTIONS[name](self._buffer_idx(micro_batch))]
        last = (AwaitSends, of_deepspeed.ReduceTiedGrads, of_deepspeed.ReduceGrads, of_deepspeed.OptimizerStep)
        yield [kind() for kind in last]


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


@dataclass
class _Transfers:
    """The transfers of one stage with its neighbours, through one process group.

    Activations and gradients have a group each: where a send is held back until its receive begins (NCCL), what goes
    forwards must not wait for what goes backwards.
    """

    engine: PipelineEngine
    group: dist.ProcessGroup | None
    _under_way: list[tuple[dist.Work, Tensor]] = field(default_factory=list)

    def send(self, tensor: Tensor, stage: int) -> None:
        """Begin to send a tensor, which is kept until it has arrived."""
        self._under_way = [(work, sent) for work, sent in self._under_way if not work.is_completed()]
        tensor = tensor.detach().contiguous()
        work = dist.isend(tensor, self.engine.grid.stage_to_global(stage_id=stage), group=self.group)
        if work is not None:
            self._under_way.append((work, tensor))

    def receive(self, tensor: Tensor, stage: int) -> None:
        """Receive a tensor."""
        dist.recv(tensor, self.engine.grid.stage_to_global(stage_id=stage), group=self.group)

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
        for work, _ in self._under_way:
            work.wait()
        self._under_way.clear()

    def carry(self, execute: Execute) -> Execute:
        """Return an instruction of the engine whose transfers are these."""

        def run(engine: PipelineEngine, **kwargs: object) -> None:
            with _in_place_of_p2p(self):
                execute(engine, **kwargs)

        return run


@contextmanager
def _in_place_of_p2p(transfers: _Transfers) -> Iterator[None]:
    before = p2p.send, p2p.recv
    p2p.send, p2p.recv = transfers.send, transfers.receive
    try:
        yield
    finally:
        p2p.send, p2p.recv = before


def run_schedule(engine: PipelineEngine, program: StageProgram, deferral: Deferral) -> None:
    """Have the engine train by `program`; evaluations keep DeepSpeed's schedule."""
    forwards = _Transfers(engine, None)
    backwards = _Transfers(engine, engine.grid.get_pipe_parallel_group())
    own: dict[type[of_deepspeed.PipeInstruction], Execute] = dict(engine._INSTRUCTION_MAP)
    own[of_deepspeed.SendActivation] = forwards.carry(own[of_deepspeed.SendActivation])
    own[of_deepspeed.SendGrad] = backwards.carry(own[of_deepspeed.SendGrad])
    own[of_deepspeed.RecvGrad] = backwards.carry(own[of_deepspeed.RecvGrad])
    backward = own[of_deepspeed.BackwardPass]

    def input_gradients(engine: PipelineEngine, buffer_id: int) -> None:
        received = engine.grad_layer
        engine.grad_layer = tree_map(_copied, received)  # the engine receives the next one into the same tensor
        with deferral.put_off():
            backward(engine, buffer_id=buffer_id)
        engine.grad_layer = received

    def weight_gradients(engine: PipelineEngine, buffer_id: int) -> None:  # noqa: ARG001  # in the order of the passes
        _accumulate(engine, deferral.compute)

    def await_sends(_engine: PipelineEngine) -> None:
        forwards.finish()
        backwards.finish()

    own |= {InputGradients: input_gradients, WeightGradients: weight_gradients, AwaitSends: await_sends}
    engine._INSTRUCTION_MAP = own

    def train_schedule() -> OwnSchedule:
        deferral.clear()  # of a step that failed
        return OwnSchedule(engine, program)

    engine._train_schedule = train_schedule


def _copied(value: Any) -> Any:
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
