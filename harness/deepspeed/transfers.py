"""What a stage of DeepSpeed's pipeline sends to the others, without waiting for them, and what it receives."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch.distributed as dist
from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from harness.config.values.model_chunks import ModelChunks
from harness.deepspeed.instructions import Execute
from harness.topology.env import run_timeout


@dataclass
class Transfers:
    """The transfers of activations, or of gradients, of one stage with the others.

    Each direction has a process group: where a send is held back until its receive begins (NCCL), what goes to later
    stages must not wait for what goes to earlier ones. The engine names model chunks where it has stages.

    Attributes:
        groups: by whether a tensor goes to a later stage.
    """

    engine: PipelineEngine
    chunks: ModelChunks
    groups: Mapping[bool, dist.ProcessGroup | None]
    _under_way: list[tuple[dist.Work, Tensor]] = field(default_factory=list)
    _within: deque[Tensor] = field(default_factory=deque)

    def send(self, tensor: Tensor, chunk: int) -> None:
        """Begin to send a tensor to a chunk, and keep it until it has arrived."""
        self._under_way = [(work, sent) for work, sent in self._under_way if not work.is_completed()]
        tensor, stage = tensor.detach().contiguous(), self.chunks.stage_of(chunk)
        if stage == self.engine.stage_id:
            self._within.append(tensor)
            return
        group = self.groups[stage > self.engine.stage_id]
        work = dist.isend(tensor, self.engine.grid.stage_to_global(stage_id=stage), group=group)
        if work is not None:
            self._under_way.append((work, tensor))

    def receive(self, tensor: Tensor, chunk: int) -> None:
        """Receive a tensor from a chunk."""
        stage = self.chunks.stage_of(chunk)
        if stage == self.engine.stage_id:
            tensor.copy_(self._within.popleft())
            return
        group = self.groups[stage < self.engine.stage_id]
        dist.recv(tensor, self.engine.grid.stage_to_global(stage_id=stage), group=group)

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
        for work, _ in self._under_way:
            work.wait()
        self._under_way.clear()

    def clear(self) -> None:
        """Forget what a step that failed has left within the stage."""
        self._within.clear()

    def carry(self, execute: Execute) -> Execute:
        """Return an instruction of the engine whose transfers are these."""

        def run(engine: PipelineEngine, **kwargs: object) -> None:
            with _in_place_of_p2p(self):
                execute(engine, **kwargs)

        return run


def open_transfers(engine: PipelineEngine, chunks: ModelChunks) -> tuple[Transfers, Transfers]:
    """Return the transfers of activations and those of gradients; all ranks of a pipeline call it together."""
    activations: dict[bool, dist.ProcessGroup | None] = {True: None}
    gradients: dict[bool, dist.ProcessGroup | None] = {False: engine.grid.get_pipe_parallel_group()}
    if chunks.each > 1:  # the way from chunk to chunk leads back
        activations[False], gradients[True] = _new_group(engine), _new_group(engine)
    return Transfers(engine, chunks, activations), Transfers(engine, chunks, gradients)


def _new_group(engine: PipelineEngine) -> dist.ProcessGroup | None:
    """Return another group of the stages of this rank's pipeline; all ranks create the groups of all pipelines."""
    mine = None
    for ranks in engine.module.topology().get_axis_comm_lists("pipe"):
        group = dist.new_group(ranks, timeout=run_timeout())
        mine = group if engine.global_rank in ranks else mine
    return mine


@contextmanager
def _in_place_of_p2p(transfers: Transfers) -> Iterator[None]:
    before = p2p.send, p2p.recv
    p2p.send, p2p.recv = transfers.send, transfers.receive
    try:
        yield
    finally:
        p2p.send, p2p.recv = before
