"""Several model chunks on one stage of DeepSpeed's PipelineEngine, which knows but one.

The engine is at one chunk at a time. What it keeps for a chunk, as buffers and the shapes that it receives, is put away
when it goes to another; and it takes the chunks before and after for its neighbouring stages.
"""

from __future__ import annotations

import copy
from collections import deque

from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from harness.config.values.model_chunks import ModelChunks
from harness.deepspeed.instructions import Execute

OF_A_CHUNK = (
    *("pipe_buffers", "num_pipe_buffers", "pipe_recv_buf", "grad_layer", "_grad_layer_buf", "meta_buffer"),
    *("first_output_send", "first_gradient_send", "pipe_partition_input_meta_cache"),
    *("pipe_partition_output_meta_cache", "pipe_partition_grad_meta_cache", "grad_partition_grad_layer_meta_cache"),
)
"""What the engine keeps for a chunk."""


class ChunkSwitch:
    """Brings an engine that has just been built from chunk to chunk.

    Args:
        chunks: of the whole model. With one chunk a stage the engine stays as it is.
    """

    def __init__(self, engine: PipelineEngine, chunks: ModelChunks) -> None:
        self._engine, self._last = engine, chunks.count - 1
        self._own = chunks.of_stage(engine.stage_id)
        self._at: int | None = None
        self._buffers = 0
        self._losses: dict[int, Tensor] = {}
        self._loaded: dict[int, deque[object]] = {chunk: deque() for chunk in self._own if chunk in (0, self._last)}
        if chunks.each > 1:
            state = {name: getattr(engine, name) for name in OF_A_CHUNK}
            self._kept = {chunk: copy.deepcopy(state) for chunk in self._own}
            self._take_over(chunks.loss_stage)

    def _take_over(self, loss_stage: int) -> None:
        """Have the engine ask here what depends on the chunk."""
        engine, reset, next_batch = self._engine, self._engine.reset_activation_shape, self._engine._next_batch

        def reset_activation_shape() -> None:
            for chunk in self._own:
                self._enter(chunk)
                reset()
            self.leave()

        def load() -> object:
            if not self._loaded[self._here[0]]:  # a stage with the first and the last chunk reads each batch for both
                batch = next_batch()
                for waiting in self._loaded.values():
                    waiting.append(batch)
            return self._loaded[self._here[0]].popleft()

        engine.is_first_stage = lambda: 0 in self._here
        engine.is_last_stage = lambda: self._last in self._here
        engine._loss_stage_global_rank = lambda: engine.grid.stage_to_global(loss_stage)
        engine.reset_activation_shape, engine._next_batch = reset_activation_shape, load

    @property
    def _here(self) -> list[int]:
        """The chunk at which the engine is; outside of a schedule all of the stage."""
        return self._own if self._at is None else [self._at]

    def begin(self, buffers: int) -> None:
        """Begin a schedule in which each chunk holds so many micro-batches at a time."""
        self.leave()
        self._buffers = buffers
        self._losses.clear()
        for waiting in self._loaded.values():
            waiting.clear()

    def at_chunk(self, execute: Execute) -> Execute:
        """Return an instruction that is executed at its chunk. Without one it is of DeepSpeed's schedule.

        The number of its micro-batch is for those who watch.
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
        """Return a forward pass after which another one may come before its backward pass."""

        def run(engine: PipelineEngine, buffer_id: int) -> None:
            forward(engine, buffer_id=buffer_id)
            if engine.is_last_stage() and engine.module.training:
                self._losses[buffer_id] = engine.loss

        return run

    def give_loss(self, backward: Execute) -> Execute:
        """Return the backward pass of such a forward pass."""

        def run(engine: PipelineEngine, buffer_id: int) -> None:
            if engine.is_last_stage():
                engine.loss = self._losses.pop(buffer_id)
            backward(engine, buffer_id=buffer_id)

        return run

    def leave(self) -> None:
        """Put away what the engine keeps for the chunk at which it is."""
        if self._at is not None:
            self._kept[self._at] = {name: getattr(self._engine, name) for name in OF_A_CHUNK}
        self._at = None

    def _enter(self, chunk: int) -> None:
        if chunk == self._at:
            return
        self.leave()
        self._at, engine = chunk, self._engine
        for name, value in self._kept[chunk].items():
            setattr(engine, name, value)
        engine._reserve_pipe_buffers(self._buffers)
        engine.prev_stage, engine.next_stage = chunk - 1, chunk + 1
        engine.module.chunk = chunk
