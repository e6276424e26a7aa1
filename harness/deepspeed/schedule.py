"""Run other schedules than 1F1B on DeepSpeed's PipelineEngine.

The engine executes a list of instructions. It gets another list, and three things that it lacks: a backward pass that
defers its weight gradients, sends that do not block (`Transfers`), and several model chunks per stage (`ChunkSwitch`).

The engine has attributes for one chunk only: buffers, received shapes and the like. They are saved and replaced
whenever it switches to another chunk. The previous and the next chunk take the place of the neighbouring stages.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch.distributed as dist
from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.pipe import schedule as of_deepspeed
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor
from torch.utils._pytree import tree_map

from harness.config.values.model_chunks import ModelChunks
from harness.deepspeed.instructions import Execute, InstructionType, execute_by, executing
from harness.topology.env import run_timeout


@dataclass
class Transfers:
    """Sends and receives activations, or gradients, between one stage and the others.

    Each direction has a process group of its own. NCCL completes a send only when its receive has begun, and runs the
    calls of one group in order. With one group for both directions, two stages that send to each other would deadlock.

    Attributes:
        groups: process group for tensors to a later stage (True), and to an earlier stage (False).
    """

    engine: PipelineEngine
    chunks: ModelChunks
    groups: Mapping[bool, dist.ProcessGroup | None]
    _under_way: list[tuple[dist.Work, Tensor]] = field(default_factory=list)
    _within: deque[Tensor] = field(default_factory=deque)

    def send(self, tensor: Tensor, chunk: int) -> None:
        """Start to send a tensor (any shape) to the stage of a chunk; replaces DeepSpeed's `p2p.send`."""
        # keep a reference until the send is complete: the tensor's memory must not be reused before
        self._under_way = [(work, sent) for work, sent in self._under_way if not work.is_completed()]
        tensor, stage = tensor.detach().contiguous(), self.chunks.stage_of(chunk)
        if stage == self.engine.stage_id:  # both chunks are on this stage: no communication
            self._within.append(tensor)
            return
        group = self.groups[stage > self.engine.stage_id]
        work = dist.isend(tensor, self.engine.grid.stage_to_global(stage_id=stage), group=group)
        if work is not None:
            self._under_way.append((work, tensor))

    def receive(self, tensor: Tensor, chunk: int) -> None:
        """Receive into `tensor` (any shape) from the stage of a chunk; replaces DeepSpeed's `p2p.recv`."""
        stage = self.chunks.stage_of(chunk)
        if stage == self.engine.stage_id:
            tensor.copy_(self._within.popleft())
            return
        group = self.groups[stage < self.engine.stage_id]
        dist.recv(tensor, self.engine.grid.stage_to_global(stage_id=stage), group=group)

    def finish(self) -> None:
        """Wait until all sends are complete."""
        for work, _ in self._under_way:
            work.wait()
        self._under_way.clear()

    def clear(self) -> None:
        """Drop tensors between chunks of this stage that a failed step has left."""
        self._within.clear()

    def carry(self, execute: Execute) -> Execute:
        """Wrap an instruction of the engine so that it sends and receives by these transfers."""

        def run(engine: PipelineEngine, **kwargs: object) -> None:
            with _in_place_of_p2p(self):
                execute(engine, **kwargs)

        return run


def open_transfers(engine: PipelineEngine, chunks: ModelChunks) -> tuple[Transfers, Transfers]:
    """Return the transfers of activations and those of gradients; all ranks must call it, as it creates groups."""
    activations: dict[bool, dist.ProcessGroup | None] = {True: None}  # None: the default group of all ranks
    gradients: dict[bool, dist.ProcessGroup | None] = {False: engine.grid.get_pipe_parallel_group()}
    if chunks.per_stage > 1:  # the next chunk may be on an earlier stage
        activations[False], gradients[True] = _new_group(engine), _new_group(engine)
    return Transfers(engine, chunks, activations), Transfers(engine, chunks, gradients)


def _new_group(engine: PipelineEngine) -> dist.ProcessGroup | None:
    """Return a new group of the stages of this rank's pipeline; all ranks must call it."""
    mine = None  # torch wants every rank to create every group, in one order
    for ranks in engine.module.topology().get_axis_comm_lists("pipe"):
        group = dist.new_group(ranks, timeout=run_timeout())
        mine = group if engine.global_rank in ranks else mine
    return mine


@contextmanager
def _in_place_of_p2p(transfers: Transfers) -> Iterator[None]:
    before = p2p.send, p2p.recv
    p2p.send = transfers.send
    p2p.recv = transfers.receive
    try:
        yield
    finally:
        p2p.send, p2p.recv = before


OF_A_CHUNK = (
    *("pipe_buffers", "num_pipe_buffers", "pipe_recv_buf", "grad_layer", "_grad_layer_buf", "meta_buffer"),
    *("first_output_send", "first_gradient_send", "pipe_partition_input_meta_cache"),
    *("pipe_partition_output_meta_cache", "pipe_partition_grad_meta_cache", "grad_partition_grad_layer_meta_cache"),
)
"""Attributes of the engine that `ChunkSwitch` saves and replaces for each chunk."""


class ChunkSwitch:
    """Switches a newly built engine from chunk to chunk.

    Args:
        chunks: the chunks of the whole model. With one chunk per stage the engine is unchanged.
    """

    def __init__(self, engine: PipelineEngine, chunks: ModelChunks) -> None:
        self._engine = engine
        self._last = chunks.count - 1
        self._own = chunks.of_stage(engine.stage_id)
        self._at: int | None = None
        self._buffers = 0
        self._losses: dict[int, Tensor] = {}
        self._loaded: dict[int, deque[object]] = {chunk: deque() for chunk in self._own if chunk in (0, self._last)}
        if chunks.per_stage > 1:
            state = {name: getattr(engine, name) for name in OF_A_CHUNK}
            self._kept = {chunk: copy.deepcopy(state) for chunk in self._own}
            self._take_over(chunks.loss_stage)

    def _take_over(self, loss_stage: int) -> None:
        """Replace the methods of the engine whose answer depends on the chunk."""
        engine, reset, next_batch = self._engine, self._engine.reset_activation_shape, self._engine._next_batch

        def reset_activation_shape() -> None:
            for chunk in self._own:
                self._enter(chunk)
                reset()
            self.leave()

        def load() -> object:
            # A stage with both the first chunk (which needs the ids) and the last (labels) loads each batch twice in
            # the schedule, but must read it only once. It keeps a queue for each of the two chunks.
            if not self._loaded[self._here[0]]:
                batch = next_batch()
                for waiting in self._loaded.values():
                    waiting.append(batch)
            return self._loaded[self._here[0]].popleft()

        engine.is_first_stage = lambda: 0 in self._here
        engine.is_last_stage = lambda: self._last in self._here
        engine._loss_stage_global_rank = lambda: engine.grid.stage_to_global(loss_stage)
        engine.reset_activation_shape = reset_activation_shape
        engine._next_batch = load

    @property
    def _here(self) -> list[int]:
        """The chunk that the engine works on, as a list; outside of a schedule all chunks of the stage."""
        return self._own if self._at is None else [self._at]

    def begin(self, buffers: int) -> None:
        """Begin a schedule in which each chunk holds up to `buffers` micro-batches at a time."""
        self.leave()
        self._buffers = buffers
        self._losses.clear()
        for waiting in self._loaded.values():
            waiting.clear()

    def at_chunk(self, execute: Execute) -> Execute:
        """Wrap an instruction so that the engine switches to its chunk first.

        DeepSpeed's own schedule gives no `chunk`. `micro_batch` is only for wrappers that report instructions, such as
        the profiler's.
        """

        def run(
            engine: PipelineEngine,
            buffer_id: int,
            chunk: int | None = None,
            micro_batch: int | None = None,  # noqa: ARG001
        ) -> None:
            if chunk is not None and len(self._own) > 1:
                self._enter(chunk)
            execute(engine, buffer_id=buffer_id)

        return run

    def keep_loss(self, forward: Execute) -> Execute:
        """Wrap a forward pass so that its loss is kept by buffer: the engine itself keeps only the last loss, and other
        forward passes may come before this one's backward."""

        def run(engine: PipelineEngine, buffer_id: int) -> None:
            forward(engine, buffer_id=buffer_id)
            if engine.is_last_stage() and engine.module.training:
                self._losses[buffer_id] = engine.loss

        return run

    def give_loss(self, backward: Execute) -> Execute:
        """Wrap a backward pass so that it starts from the loss of its own micro-batch."""

        def run(engine: PipelineEngine, buffer_id: int) -> None:
            if engine.is_last_stage():
                engine.loss = self._losses.pop(buffer_id)
            backward(engine, buffer_id=buffer_id)

        return run

    def leave(self) -> None:
        """Save the engine's attributes for the chunk that it works on; it then works on none."""
        if self._at is not None:
            self._kept[self._at] = {name: getattr(self._engine, name) for name in OF_A_CHUNK}
        self._at = None

    def _enter(self, chunk: int) -> None:
        if chunk == self._at:
            return
        self.leave()
        self._at = chunk
        engine = self._engine
        for name, value in self._kept[chunk].items():
            setattr(engine, name, value)
        engine._reserve_pipe_buffers(self._buffers)
        # The engine passes these to `p2p.send` and `p2p.recv`; `Transfers` replaces those, and takes chunks, not stages
        engine.prev_stage = chunk - 1
        engine.next_stage = chunk + 1
        engine.module.chunk = chunk


class InputGradients(of_deepspeed.BufferOpInstruction):  # type: ignore[misc]  # DeepSpeed has no types
    """Instruction: run a backward pass, but defer the weight gradients that can be deferred."""


class WeightGradients(of_deepspeed.BufferOpInstruction):  # type: ignore[misc]  # DeepSpeed has no types
    """Instruction: compute the weight gradients of the oldest backward pass that has deferred some."""


class AwaitSends(of_deepspeed.PipeInstruction):  # type: ignore[misc]  # DeepSpeed has no types
    """Instruction: wait until all sends of the step are complete."""


@dataclass(frozen=True)
class StageProgram:
    """The instructions of one stage in a step.

    Attributes:
        instructions: name, micro-batch and model chunk of each instruction, in order.
        buffers: largest number of micro-batches that a chunk of the stage holds at a time.
    """

    instructions: Sequence[tuple[str, int, int]]
    buffers: int

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches in the program; an evaluation may have another than a step."""
        return 1 + max((micro_batch for _, micro_batch, _ in self.instructions), default=-1)


class OwnSchedule(of_deepspeed.PipeSchedule):  # type: ignore[misc]  # DeepSpeed has no types
    """A stage program in the form of a DeepSpeed schedule; the instructions `last` follow it."""

    def __init__(self, engine: PipelineEngine, program: StageProgram, last: Sequence[InstructionType]) -> None:
        super().__init__(program.micro_batches, engine.num_stages, engine.stage_id)
        self._program = program
        self._last = last

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


# Tied weights first: DeepSpeed sums them over stages before the data-parallel reduction, which must see the sums.
UPDATE = (AwaitSends, of_deepspeed.ReduceTiedGrads, of_deepspeed.ReduceGrads, of_deepspeed.OptimizerStep)


def run_schedule(
    engine: PipelineEngine,
    chunks: ModelChunks,
    training: StageProgram,
    evaluation: Callable[[int], StageProgram],
    *,
    defer: Callable[[], AbstractContextManager[object]],
    compute: Callable[[], None],
    clear: Callable[[], None],
) -> None:
    """Have the engine train by a program.

    Args:
        training: this stage's instructions in each training step.
        evaluation: returns its instructions to evaluate a number of micro-batches.
        defer: returns a context in which a backward pass defers its weight gradients.
        compute: computes and accumulates the weight gradients of the oldest backward pass that has deferred some.
        clear: drops all deferred weight gradients.
    """
    switch = ChunkSwitch(engine, chunks)
    transfers = open_transfers(engine, chunks)
    execute_by(engine, _executors(engine, switch, transfers, defer, compute))

    def begin(program: StageProgram, last: Sequence[InstructionType]) -> OwnSchedule:
        for each in transfers:
            each.clear()
        switch.begin(program.buffers)
        return OwnSchedule(engine, program, last)

    def train_schedule() -> OwnSchedule:
        clear()  # a failed step may have left some
        return begin(training, UPDATE)

    engine._train_schedule = train_schedule
    engine._inference_schedule = lambda micro_batches: begin(evaluation(micro_batches), (AwaitSends,))


def _executors(
    engine: PipelineEngine,
    switch: ChunkSwitch,
    transfers: tuple[Transfers, Transfers],
    defer: Callable[[], AbstractContextManager[object]],
    compute: Callable[[], None],
) -> dict[InstructionType, Execute]:
    """Return the function for each instruction of a schedule that is not DeepSpeed's own."""
    activations, gradients = transfers
    own: dict[InstructionType, Execute] = {}
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
        # The engine receives the next gradient into the same tensor, but the deferred weight gradients need this one.
        engine.grad_layer = tree_map(_copied, received)
        with defer():
            backward(engine, buffer_id=buffer_id)
        engine.grad_layer = received

    def weight_gradients(engine: PipelineEngine, buffer_id: int) -> None:  # noqa: ARG001  # always the oldest first
        _accumulate(engine, compute)

    def await_sends(_engine: PipelineEngine) -> None:
        for each in transfers:
            each.finish()
        switch.leave()  # what follows is of the whole stage: the reductions, the update and the mean loss

    own |= {InputGradients: input_gradients, WeightGradients: weight_gradients}
    # Outermost, because the wrappers inside ask whether the engine is the last stage, and that depends on the chunk.
    own |= {kind: switch.at_chunk(own[kind]) for kind in INSTRUCTIONS.values()}
    return {**own, AwaitSends: await_sends}


def _copied(value: object) -> object:
    return value.clone() if isinstance(value, Tensor) else value


def _accumulate(engine: PipelineEngine, compute: Callable[[], None]) -> None:
    """Call `compute` as the engine calls a backward pass of its own: bf16 gradients are accumulated in float32.

    The engine clears the bf16 gradients before, adds the new ones to its float32 tensors after, and clears them again.
    While `_running_engine_backward` is unset, its gradient hooks would take this for a backward pass of the user's.
    """
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
