"""Run DeepSpeed's engines on one rank of many, without the other ranks and with tensors that have no values.

DeepSpeed itself works out what this rank sends. Received tensors are made here, in the shapes that other ranks send.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import ParamSpec, TypeAlias, TypeVar

import torch
from deepspeed.accelerator import real_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.pipe.engine import TENSOR_META_SIZE, PipelineEngine
from deepspeed.runtime.utils import PartitionedTensor
from deepspeed.runtime.zero import utils
from torch import Tensor
from torch.utils._pytree import tree_leaves

from harness.deepspeed.engine import GRADIENTS
from harness.deepspeed.initialize import replacing
from harness.deepspeed.schedule import Observer, Operands, ScheduledEngine

P = ParamSpec("P")
R = TypeVar("R")

Received: TypeAlias = Tensor | tuple[Tensor, ...]
"""A tensor or a tuple of tensors, as stages exchange them."""


@contextmanager
def trusting_peers() -> Iterator[None]:
    """Compute on the CPU, skip DeepSpeed's cross-rank checks and report fp16 as supported while the context lasts."""
    processor = CPU_Accelerator()
    with replacing(
        (real_accelerator, "ds_accelerator", processor),
        (PartitionedTensor.from_meta.__func__, "__defaults__", (processor.device_name(),)),  # the device at its import
        (processor, "is_fp16_supported", lambda: True),
        (utils, "assert_lst_len_same_as_other_ranks", lambda _: None),
        (utils, "get_lst_from_rank0", lambda numbers: numbers),
    ):
        yield


def expect_from_peers(engine: ScheduledEngine, received: Mapping[int, Received]) -> None:
    """Have a stage "receive" tensors with the shapes of `received` from the previous model chunk.

    From the next chunk it gets gradients with the shapes of what it sends. The metadata from which a partitioned tensor
    is put together again would be received as values, which these tensors lack, so it is computed here.

    Args:
        received: tensors by the index of the receiving chunk (the stage, if each has one chunk). The first chunk
            receives nothing.
    """

    def restore_metadata(name: str, place: Operands) -> None:
        if name == "RecvGrad" and engine.is_grad_partitioned:
            engine.grad_partition_grad_layer_meta_cache = engine.pipe_buffers["outputs"][place["buffer_id"]][0]

    engine.observe(Observer(begin=lambda _name, _place: None, end=restore_metadata))

    def buffers(sender: int) -> Received:
        # The first message of DeepSpeed's protocol: the number, dtypes and shapes of the tensors. They are known here;
        # the receive is there to be counted.
        p2p.recv(torch.empty(TENSOR_META_SIZE, dtype=torch.int32, device=engine.device), sender)
        value = received[sender + 1]
        tensors = value if isinstance(value, tuple) else (value,)
        if engine.is_pipe_partitioned:
            part = PartitionedTensor(tensor=tensors[0], group=engine.grid.get_slice_parallel_group())
            tensors = (part.to_meta(), part.data(), *tensors[1:])
        made = [_buffer(engine, index, tensor) for index, tensor in enumerate(tensors)]
        return tuple(made) if len(made) > 1 else made[0]

    engine._recv_tensor_meta = buffers


def _buffer(engine: PipelineEngine, index: int, like: Tensor) -> Tensor:
    """Return the engine's own buffer for a received tensor, or the tensor itself if its values matter (integers)."""
    buffer: Tensor = engine._allocate_or_extend_buffers(index, list(like.shape), like.dtype)
    return buffer if like.is_floating_point() else like


def cut_step(engine: DeepSpeedEngine, micro_batches: int) -> None:
    """Shorten the next step to its last `micro_batches`, so that it still ends in the optimizer step."""
    if isinstance(engine, PipelineEngine):
        engine.micro_batches = micro_batches
    # DeepSpeed updates after the micro-batch that makes `micro_steps` a multiple of the accumulation steps
    engine.micro_steps = engine.gradient_accumulation_steps() - micro_batches


def announce_halves(engine: DeepSpeedEngine, announce: Callable[[str], None]) -> None:
    """Have `announce` called before each backward and each step of an engine without a pipeline.

    It gets the names of a pipeline's instructions, `BackwardPass` and `OptimizerStep`. On the last micro-batch of a
    step, after which weights change, it gets `LastBackward` and `LastStep`.
    """
    for name, first, last in (("backward", "BackwardPass", "LastBackward"), ("step", "OptimizerStep", "LastStep")):
        setattr(engine, name, _announced(engine, getattr(engine, name), (first, last), announce))


def _announced(
    engine: DeepSpeedEngine, run: Callable[P, R], names: tuple[str, str], announce: Callable[[str], None]
) -> Callable[P, R]:
    def announced(*args: P.args, **kwargs: P.kwargs) -> R:
        announce(names[engine.is_gradient_accumulation_boundary()])
        return run(*args, **kwargs)

    return announced


def gradients_of(engine: DeepSpeedEngine, parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return all gradients that exist now, each once: those on parameters, in the parameter's precision and in the
    optimizer's, and the parts of them that ZeRO keeps."""
    found = [getattr(parameter, name, None) for parameter in parameters for name in GRADIENTS]
    names = ("averaged_gradients", "grad_partitions_flat_buffer")
    kept = [getattr(engine.optimizer, name, None) for name in names]
    for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"):  # of ZeRO-1 and 2, and of ZeRO-3
        kept += [part.grad for part in getattr(engine.optimizer, name, None) or ()]  # there where they are offloaded
    found += [leaf for leaf in tree_leaves(kept) if isinstance(leaf, Tensor)]
    return list({id(gradient): gradient for gradient in found if gradient is not None}.values())
