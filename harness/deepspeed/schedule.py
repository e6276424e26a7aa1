"""Run the harness's pipeline schedules on DeepSpeed's PipelineEngine.

`ScheduledEngine` replaces the engine's instruction list and its forward pass, and adds three features that DeepSpeed
lacks: a backward pass that defers its weight gradients, sends that do not block (`Transfers`), and several model chunks
per stage. An `Observer` looks on: the watchdog, the profiler, the dry run and the benchmarks have one.

DeepSpeed's engine has attributes for only one chunk: buffers, received shapes and the like. They are saved and replaced
whenever the engine switches to another chunk. The previous and the next chunk replace the neighbouring stages.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.torch_autocast import autocast_if_enabled
from deepspeed.runtime.utils import PartitionedTensor, register_output_backward_hooks
from torch import Tensor
from torch.utils._pytree import tree_map

from harness.schedules import ModelChunks
from harness.topology.env import run_timeout

Operands: TypeAlias = Mapping[str, int]
"""The arguments of an instruction: `buffer_id`, `micro_batch`, `chunk`; none for an instruction of the whole step."""
OF_A_CHUNK = (
    *("pipe_buffers", "num_pipe_buffers", "pipe_recv_buf", "grad_layer", "_grad_layer_buf", "meta_buffer"),
    *("first_output_send", "first_gradient_send", "pipe_partition_input_meta_cache"),
    *("pipe_partition_output_meta_cache", "pipe_partition_grad_meta_cache", "grad_partition_grad_layer_meta_cache"),
)
"""Attributes of the engine that are saved and replaced for each chunk."""

# Sends come first: they must complete before weights change. Tied weights come before the data-parallel reduction,
# which must see their sums over stages.
UPDATE = ("AwaitSends", "ReduceTiedGrads", "ReduceGrads", "OptimizerStep")

METHODS: Mapping[str, str] = {
    "LoadMicroBatch": "_exec_load_micro_batch",
    "ForwardPass": "_exec_forward_pass",
    "BackwardPass": "_exec_backward_pass",
    "InputGradients": "_exec_input_gradients",
    "WeightGradients": "_exec_weight_gradients",
    "SendActivation": "_exec_send_activations",
    "RecvActivation": "_exec_recv_activations",
    "SendGrad": "_exec_send_grads",
    "RecvGrad": "_exec_recv_grads",
    "AwaitSends": "_exec_await_sends",
    "ReduceTiedGrads": "_exec_reduce_tied_grads",
    "ReduceGrads": "_exec_reduce_grads",
    "OptimizerStep": "_exec_optimizer_step",
}
"""Name of an instruction -> the engine's method that executes it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Observer:
    """What to call before and after each instruction, with its name and its arguments."""

    begin: Callable[[str, Operands], object]
    end: Callable[[str, Operands], object] | None = None


def announcer(announce: Callable[[str], object]) -> Observer:
    """Return an observer that calls `announce` with text such as `RecvGrad(0)`."""

    def begin(name: str, place: Operands) -> None:
        announce(f"{name}({place['buffer_id']})" if "buffer_id" in place else name)

    return Observer(begin=begin)


@dataclass
class Transfers:
    """Sends and receives activations, or gradients, between one stage and the others.

    Each direction has its own process group. NCCL completes a send only when its receive has begun, and runs the calls
    of one group in order. With one group for both directions, two stages that send to each other would deadlock.

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
        # Keep a reference until the send completes: the tensor's memory must not be reused before.
        self._under_way = [(work, sent) for work, sent in self._under_way if not work.is_completed()]
        tensor = tensor.detach().contiguous()
        stage = self.chunks.stage_of(chunk)
        # Both chunks are on this stage: nothing is sent.
        if stage == self.engine.stage_id:
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
        # Blocking: a receive stands just before the pass that needs the tensor.
        dist.recv(tensor, self.engine.grid.stage_to_global(stage_id=stage), group=group)

    def finish(self) -> None:
        """Wait until all sends are complete."""
        for work, _ in self._under_way:
            work.wait()
        self._under_way.clear()

    def clear(self) -> None:
        self._within.clear()


def open_transfers(engine: PipelineEngine, chunks: ModelChunks) -> tuple[Transfers, Transfers]:
    """Return the transfers of activations and of gradients; all ranks must call it, as it creates groups."""
    activations: dict[bool, dist.ProcessGroup | None] = {True: None}  # None: the default group of all ranks
    gradients: dict[bool, dist.ProcessGroup | None] = {False: engine.grid.get_pipe_parallel_group()}
    # With several chunks per stage, the next one may be on an earlier stage.
    if chunks.per_stage > 1:
        activations[False] = _new_group(engine)
        gradients[True] = _new_group(engine)
    return Transfers(engine, chunks, activations), Transfers(engine, chunks, gradients)


def _new_group(engine: PipelineEngine) -> dist.ProcessGroup | None:
    """Return a new group of the stages of this rank's pipeline; all ranks must call it."""
    mine = None
    # torch requires every rank to create every group, in the same order.
    for ranks in engine.module.topology().get_axis_comm_lists("pipe"):
        group = dist.new_group(ranks, timeout=run_timeout())
        mine = group if engine.global_rank in ranks else mine
    return mine


@contextmanager
def in_place_of_p2p(transfers: Transfers) -> Iterator[None]:
    """In this context, DeepSpeed sends and receives by `transfers`: its methods call functions of one module."""
    before = p2p.send, p2p.recv
    p2p.send = transfers.send
    p2p.recv = transfers.receive
    try:
        yield
    finally:
        p2p.send, p2p.recv = before


@dataclass(frozen=True)
class StageProgram:
    """The instructions of one stage in a step.

    Attributes:
        instructions: name, micro-batch and model chunk of each instruction, in order.
        buffers: largest number of micro-batches that a chunk of the stage holds at a time.
        last: names of the instructions of the whole stage, which follow.
    """

    instructions: Sequence[tuple[str, int, int]]
    buffers: int
    last: Sequence[str] = ()


class Deferring(Protocol):
    """Weight gradients deferred by backward passes (`parallel/weight_gradients.py`)."""

    def defer(self) -> AbstractContextManager[object]:
        """Return a context in which a backward pass defers its weight gradients."""

    def compute(self) -> None:
        """Compute and accumulate the weight gradients of the oldest deferring backward pass."""

    def clear(self) -> None:
        """Drop all deferred weight gradients."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The schedule of one stage.

    Attributes:
        training: returns the stage's instructions for a step with a number of micro-batches.
        evaluation: returns the instructions that evaluate a number of micro-batches.
        deferred: the weight gradients that backward passes defer.
        defers: whether any backward pass defers.
    """

    chunks: ModelChunks
    training: Callable[[int], StageProgram]
    evaluation: Callable[[int], StageProgram]
    deferred: Deferring
    defers: bool


class ScheduledEngine(PipelineEngine):
    """A PipelineEngine that follows a `Schedule`, with any number of model chunks per stage.

    Attributes:
        observers: called before and after each instruction.
        micro_batch: the current instruction's micro-batch; None for instructions of the whole step.
    """

    grad_layer: object
    total_loss: Tensor | None
    total_additional_losses: dict[str, Tensor] | None
    pipe_partition_input_meta_cache: Tensor | None
    # Off during DeepSpeed's constructor, which communicates with neighbouring stages by their stage numbers.
    _speaks_of_chunks = False

    def __init__(self, schedule: Schedule, **of_deepspeed: object) -> None:
        super().__init__(**of_deepspeed)
        self.schedule = schedule
        self.observers: list[Observer] = []
        self.micro_batch: int | None = None
        self._own = schedule.chunks.of_stage(self.stage_id)
        self._at: int | None = None
        self._slots = 0
        self._losses: dict[int, Tensor] = {}
        ends = (0, schedule.chunks.count - 1)
        self._loaded: dict[int, deque[object]] = {chunk: deque() for chunk in self._own if chunk in ends}
        self._chunk_state: dict[int, dict[str, object]] = {}
        if len(self._own) > 1:
            state = {name: getattr(self, name) for name in OF_A_CHUNK}
            self._chunk_state = {chunk: copy.deepcopy(state) for chunk in self._own}
        self._transfers = open_transfers(self, schedule.chunks) if schedule.chunks.count > 1 else None
        self._speaks_of_chunks = True

    # Execution and observers.

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Call `observer` around each instruction from now on; return a function that removes it."""
        self.observers.append(observer)
        return partial(self.observers.remove, observer)

    def _train_schedule(self) -> StageProgram:
        if self.schedule.defers:
            # Left by a failed step.
            self.schedule.deferred.clear()
        return self._begin(self.schedule.training(self.micro_batches), UPDATE)

    def _inference_schedule(self, micro_batches: int) -> StageProgram:
        return self._begin(self.schedule.evaluation(micro_batches), ("AwaitSends",))

    def _begin(self, program: StageProgram, last: Sequence[str]) -> StageProgram:
        # A failed step may have left tensors behind, which would be taken for this step's.
        for transfers in self._transfers or ():
            transfers.clear()
        self._leave_chunk()
        self._slots = program.buffers
        self._losses.clear()
        for waiting in self._loaded.values():
            waiting.clear()
        return replace(program, last=last)

    def _exec_schedule(self, program: StageProgram) -> None:
        self._reserve_pipe_buffers(program.buffers)
        self.fwd_outputs: list[Tensor] = []
        # A chunk's micro-batches end in the order in which they began, so micro-batches in flight are consecutive, and
        # no two share a buffer.
        steps: list[tuple[str, Operands]] = [
            (name, {"buffer_id": micro_batch % program.buffers, "micro_batch": micro_batch, "chunk": chunk})
            for name, micro_batch, chunk in program.instructions
        ]
        for name, place in [*steps, *((name, {}) for name in program.last)]:
            for observer in self.observers:
                observer.begin(name, place)
            self.micro_batch = place.get("micro_batch")
            if place and len(self._own) > 1:
                self._enter_chunk(place["chunk"])
            method = getattr(self, METHODS[name])
            method(place["buffer_id"]) if place else method()
            for observer in self.observers:
                if observer.end is not None:
                    observer.end(name, place)

    # Passes.

    def _exec_forward_pass(self, buffer_id: int) -> None:
        """Pass a micro-batch through the layers of the chunk; on the last one, compute its loss."""
        # In place of two methods of DeepSpeed, whose other features the harness does not have.
        ends_here = self.is_last_stage()
        loss_fn = self.module.loss_fn
        labels = self.pipe_buffers["labels"][buffer_id] if ends_here else None
        inputs = self._inputs_of(buffer_id)
        if isinstance(self.optimizer, ZeROOptimizer):
            # This is a new micro-batch, not the recomputation of a layer during a backward pass.
            self.optimizer.clear_backward_seen_flag()
        # With tiling the last layer computes the loss of each tile.
        loss_fn.expect(labels)
        with autocast_if_enabled(self):  # the config's `torch_autocast`
            # Called, not its `forward`: DeepSpeed's hooks on it cast inputs to fp16, and time and profile it.
            outputs = self.module(inputs)
        # Once the gradient of the outputs is there, the optimizer prepares for that of the parameters. DeepSpeed would
        # also divide it by the number of micro-batches, but the loss is divided already.
        register_output_backward_hooks(outputs, self._backward_prologue)
        if not self.module.training:
            # Recomputation keeps buffers for a backward pass, which does not come.
            checkpointing.reset()
        if ends_here:
            loss = loss_fn(outputs, labels)
            # DeepSpeed keeps only the last loss, but in other schedules than 1F1B other forward passes may come before
            # this one's backward pass
            self._losses[buffer_id] = loss
            self._add_losses(loss.detach())
            # Otherwise the logits would stay in memory until a later micro-batch's logits replace them.
            outputs = None
        elif self.is_pipe_partitioned:
            outputs = self._part_of(outputs, buffer_id)
        self.pipe_buffers["outputs"][buffer_id] = outputs
        loss_fn.expect(None)

    def _add_losses(self, loss: Tensor) -> None:
        """Add the loss of a micro-batch, and the other losses that the model reports, to the step's sums."""
        self.fwd_outputs.append(loss)
        self.total_loss = loss.clone() if self.total_loss is None else self.total_loss + loss
        for name, other in (self.module.get_additional_losses() or {}).items():
            totals = self.total_additional_losses = self.total_additional_losses or {}
            totals[name] = other.detach() + totals.get(name, 0.0)

    def _inputs_of(self, buffer_id: int) -> Tensor | tuple[Tensor, ...]:
        """Return the input of the chunk for a micro-batch, whole if each tensor-parallel rank has received its part."""
        # A copy: what an earlier stage has sent is a leaf, which a layer could not change in place.
        inputs: Tensor | tuple[Tensor, ...] = tree_map(torch.clone, self.pipe_buffers["inputs"][buffer_id])
        if not self.is_pipe_partitioned or self.is_first_stage():
            return inputs
        # The sizes are read on the host, which waits for the device: once, until `reset_activation_shape`.
        if self.pipe_partition_input_meta_cache is None:
            self.pipe_partition_input_meta_cache = inputs[0].to("cpu")
        meta = self.pipe_partition_input_meta_cache
        group = self.grid.get_slice_parallel_group()
        first = PartitionedTensor.from_meta(meta=meta, local_part=inputs[1], group=group).full().requires_grad_()
        # The leaf whose gradient is sent back.
        self.pipe_buffers["inputs"][buffer_id] = whole = (first, *inputs[2:]) if len(inputs) > 2 else first
        return whole

    def _part_of(self, outputs: Tensor | tuple[Tensor, ...], buffer_id: int) -> Tensor | tuple[Tensor, ...]:
        """Return what this tensor-parallel rank sends of the outputs: its part of the first tensor, and the others."""
        first, *others = outputs if isinstance(outputs, tuple) else (outputs,)
        assert not any(other.requires_grad for other in others), "the next stage returns one gradient"
        part = PartitionedTensor(tensor=first, group=self.grid.get_slice_parallel_group())
        # Frees the memory of the whole tensor but keeps its graph, through which the backward pass runs.
        first.data = torch.zeros(1, device=first.device)
        self.pipe_buffers["output_tensors"][buffer_id] = first
        return part.to_meta(), part.data(), *others

    def _exec_backward_pass(self, buffer_id: int) -> None:
        if self.is_last_stage():
            self.loss = self._losses.pop(buffer_id)
        super()._exec_backward_pass(buffer_id)

    def _exec_input_gradients(self, buffer_id: int) -> None:
        received = self.grad_layer
        # The engine receives the next gradient into the same tensor, but the deferred weight gradients need this one.
        self.grad_layer = tree_map(_copied, received)
        with self.schedule.deferred.defer():
            self._exec_backward_pass(buffer_id)
        self.grad_layer = received

    def _exec_weight_gradients(self, _buffer_id: int) -> None:
        # The oldest ones. Schedules defer and compute in the same order, so no buffer is named.
        # Without this, DeepSpeed's gradient hooks would take it for a backward pass started by the user.
        self._running_engine_backward = True
        try:
            self.schedule.deferred.compute()
        finally:
            self._running_engine_backward = False

    # Sends and receives are DeepSpeed's, but by transfers that do not wait for the receiver.

    def _exec_send_activations(self, buffer_id: int) -> None:
        with self._by_transfers(0):
            super()._exec_send_activations(buffer_id)

    def _exec_recv_activations(self, buffer_id: int) -> None:
        with self._by_transfers(0):
            super()._exec_recv_activations(buffer_id)

    def _exec_send_grads(self, buffer_id: int) -> None:
        with self._by_transfers(1):
            super()._exec_send_grads(buffer_id)

    def _exec_recv_grads(self, buffer_id: int) -> None:
        with self._by_transfers(1):
            super()._exec_recv_grads(buffer_id)

    def _exec_await_sends(self) -> None:
        for transfers in self._transfers or ():
            transfers.finish()
        # The reductions, the update and the mean loss belong to the whole stage.
        self._leave_chunk()

    def _by_transfers(self, direction: int) -> AbstractContextManager[None]:
        assert self._transfers is not None, "a model of one chunk neither sends nor receives"
        return in_place_of_p2p(self._transfers[direction])

    # Several chunks per stage: DeepSpeed's questions about its stage are answered for the current chunk.

    @property
    def _here(self) -> list[int]:
        """The current chunk, as a list; outside a schedule all chunks of the stage."""
        return self._own if self._at is None else [self._at]

    def is_first_stage(self) -> bool:
        """Return whether the current chunk, or any chunk of the stage, is the first one."""
        return 0 in self._here if self._speaks_of_chunks else bool(super().is_first_stage())

    def is_last_stage(self) -> bool:
        """Return whether the current chunk, or any chunk of the stage, is the last one."""
        return self.schedule.chunks.count - 1 in self._here if self._speaks_of_chunks else bool(super().is_last_stage())

    def _loss_stage_global_rank(self) -> int:
        # DeepSpeed broadcasts from the last stage. The last chunk of a folded schedule is on the first one.
        return int(self.grid.stage_to_global(self.schedule.chunks.loss_stage))

    def reset_activation_shape(self) -> None:
        """Make the stages exchange shapes again, for each chunk."""
        if not self._chunk_state:
            super().reset_activation_shape()
        for chunk in self._chunk_state:
            self._enter_chunk(chunk)
            super().reset_activation_shape()
        self._leave_chunk()

    def _next_batch(self) -> object:
        # A stage with both the first chunk (which needs the ids) and the last (labels) loads each batch twice, but must
        # read it only once. It keeps a queue for each of the two chunks.
        if len(self._own) == 1:
            return super()._next_batch()
        if not self._loaded[self._here[0]]:
            batch = super()._next_batch()
            for waiting in self._loaded.values():
                waiting.append(batch)
        return self._loaded[self._here[0]].popleft()

    def _enter_chunk(self, chunk: int) -> None:
        """Switch to a chunk: replace the stage's attributes by the chunk's."""
        if chunk == self._at:
            return
        self._leave_chunk()
        self._at = chunk
        for name, value in self._chunk_state[chunk].items():
            setattr(self, name, value)
        self._reserve_pipe_buffers(self._slots)
        # DeepSpeed passes these to `p2p.send` and `p2p.recv`, which `Transfers` replaces and which then take chunks.
        self.prev_stage = chunk - 1
        self.next_stage = chunk + 1
        self.module.chunk = chunk

    def _leave_chunk(self) -> None:
        """Save the current chunk's attributes; the engine then has no current chunk."""
        if self._at is not None and self._chunk_state:
            self._chunk_state[self._at] = {name: getattr(self, name) for name in OF_A_CHUNK}
        self._at = None


def _copied(value: object) -> object:
    return value.clone() if isinstance(value, Tensor) else value
