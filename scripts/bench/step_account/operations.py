"""Record what a GPU computes in a step: the operations of a dry run, with their tensors and their purpose.

The purpose of an operation is that of the function or the module in which it runs. Operations of a backward pass run
outside of both: their purpose is that of the forward operation with the same sequence number.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from types import CodeType, FrameType
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from harness.dry_run.kernel_time import WRITE_ONLY, Kernel, kernel_of
from harness.dry_run.ledger import sent_by
from harness.extras.fusing.fused import Rotation
from harness.parallel.values import Keyword, Operation, Positional
from harness.planner.hardware import Hardware
from harness.planner.traffic import collective

PRODUCTS, ATTENTION, NORMS, ROTARY = "matrix products", "attention", "norms", "rotary"
ELEMENTWISE, RESIDUALS, LOSS = "elementwise", "residuals and copies", "loss"
ROUNDING = "rounding to fp8"
SUMS, ZEROING, REDUCTION, NORM = "sums of gradients", "zeroing", "reduction", "norm of gradients"
CLIP, OPTIMIZER, WEIGHTS = "clip", "optimizer", "copy of weights"
PARTS = (
    *(PRODUCTS, ROUNDING, ATTENTION, NORMS, ELEMENTWISE, ROTARY, LOSS, RESIDUALS),
    *(SUMS, ZEROING, REDUCTION, NORM, CLIP, OPTIMIZER, WEIGHTS),
)

OF_FILES = {
    "harness/training/engine/losses.py": LOSS,
    "harness/parallel/tensor/cross_entropy.py": LOSS,
    "harness/deepspeed/gradient_norm.py": NORM,
    "deepspeed/runtime/zero/partition_parameters.py": WEIGHTS,  # ZeRO-3 gathers them
    "deepspeed/runtime/zero/partitioned_param_coordinator.py": WEIGHTS,
}
OF_FUNCTIONS = {
    "FlatOptimizer._add": SUMS,
    "FlatOptimizer.start_mean": REDUCTION,
    "FlatOptimizer._copy_slice": WEIGHTS,
    "FlatOptimizer.send_weights": WEIGHTS,
    "StagedEngine._clip_and_skip_on_device": CLIP,
    "clip": CLIP,
    # DeepSpeed's optimizers for ZeRO-2 (and some of ZeRO-1) and for ZeRO-3
    "DeepSpeedZeroOptimizer.copy_grads_in_partition": SUMS,
    "DeepSpeedZeroOptimizer.fill_grad_accum_attribute": SUMS,
    "DeepSpeedZeroOptimizer._add_to_grad_partition_buffer": SUMS,
    "DeepSpeedZeroOptimizer._build_compact_grad_partition_buffer": SUMS,
    "DeepSpeedZeroOptimizer._add_full_reduction_to_compact_grad_partition": SUMS,
    "DeepSpeedZeroOptimizer.get_flat_partition": SUMS,
    "DeepSpeedZeroOptimizer.independent_gradient_partition_epilogue": SUMS,
    "DeepSpeedZeroOptimizer.reduce_independent_p_g_buckets_and_remove_grads": REDUCTION,
    "DeepSpeedZeroOptimizer.reduce_ipg_grads": REDUCTION,
    "DeepSpeedZeroOptimizer.scaled_global_norm": NORM,
    "DeepSpeedZeroOptimizer.check_overflow": NORM,
    "DeepSpeedZeroOptimizer.step": REDUCTION,
    "DeepSpeedZeroOptimizer_Stage3.partition_grads": SUMS,
    "DeepSpeedZeroOptimizer_Stage3.__add_grad_to_ipg_bucket": REDUCTION,
    "DeepSpeedZeroOptimizer_Stage3.__reduce_and_partition_ipg_grads": REDUCTION,
    "DeepSpeedZeroOptimizer_Stage3._get_norm_groups": NORM,
    "DeepSpeedZeroOptimizer_Stage3._overflow_check_and_loss_scale_update": NORM,
    "DeepSpeedZeroOptimizer_Stage3._prepare_sub_group": REDUCTION,
    "DeepSpeedZeroOptimizer_Stage3._reassign_or_swap_out_partitioned_parameters": WEIGHTS,
    "DeepSpeedZeroOptimizer_Stage3.step": REDUCTION,
}
"""Qualified name of a function -> the part of a step that it computes; the innermost function decides."""
OF_CODES = {inspect.unwrap(each).__code__: ROTARY for each in (Rotation.forward, Rotation.backward)}
"""The same for the harness's own operations of layers, by their code."""
NAMED_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm")
NAMED_COPIES = (
    *("add", "add_", "clone", "copy_", "_to_copy", "cat", "stack", "embedding", "embedding_dense_backward"),
    *("index_select", "index", "gather", "scatter", "slice_backward", "select_backward", "constant_pad_nd"),
)
# ATen/native/cuda/MultiTensorApply.cuh: elements of a chunk, chunks of a kernel, and tensors of a kernel that reads one
# list, two lists, ...
CHUNK, CHUNKS, TENSORS = 65536, 320, (110, 64, 48, 36, 30)


@dataclass(frozen=True)
class Operand:
    """A tensor that an operation reads or writes.

    Attributes:
        memory: number of the storage; equal for tensors that share one.
        place: offset in the storage, in elements, and number of elements.
        size: bytes; those of expanded dimensions count once.
        limit: bytes of the whole storage.
    """

    memory: int
    place: tuple[int, int]
    size: int
    limit: int


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """An operation of a step.

    Attributes:
        name: torch's name of it, without an overload; of a collective, the usual one.
        part: what it is for, one of `PARTS`.
        call: number of the innermost module call in whose forward or backward it runs; 0 outside of all.
        layer: the same of the layer of the pipeline.
        backward: whether autograd's backward pass runs it.
        collective: whether it is a message between ranks.
        bytes, seconds, kernels: what it costs a GPU.
    """

    name: str
    part: str
    bytes: float
    seconds: float
    kernels: int = 1
    reads: tuple[Operand, ...] = ()
    writes: tuple[Operand, ...] = ()
    call: int = 0
    layer: int = 0
    backward: bool = False
    collective: bool = False


@dataclass(frozen=True)
class _Place:
    """Where an operation of a forward pass runs."""

    part: str | None = None
    call: int = 0
    layer: int = 0


class _AutogradNode(Protocol):
    def name(self) -> str: ...
    def _sequence_nr(self) -> int: ...


class StepRecorder(TorchDispatchMode):
    """Records the operations that run while it is entered; `watching_modules` tells it where.

    Args:
        hardware: the device on which operations are costed.
        layers: the modules that count as layers.
    """

    def __init__(self, hardware: Hardware, layers: Iterable[nn.Module] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._hardware = hardware
        self.recorded: list[Recorded] = []
        self._layers = frozenset(map(id, layers))
        self._numbers = WeakIdKeyDictionary()
        self._count = 0
        self._calls: list[tuple[nn.Module, int]] = []
        self._forward: dict[int, _Place] = {}
        self._codes: dict[CodeType, str | None] = {}

    @contextmanager
    def watching_modules(self) -> Iterator[None]:
        """Note while the context lasts which module computes."""

        def begin(module: nn.Module, _inputs: object) -> None:
            if next(module.children(), None) is not None or next(module.parameters(), None) is not None:
                self._calls.append((module, self._next()))

        def end(module: nn.Module, _inputs: object, _outputs: object) -> None:
            if self._calls and self._calls[-1][0] is module:
                self._calls.pop()

        hooks = register_module_forward_pre_hook(begin), register_module_forward_hook(end, always_call=True)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def __torch_dispatch__(
        self, func: Operation, _types: object, args: Positional = (), kwargs: Keyword | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        # Views run no kernel, but their backward passes do: those are found by where the view was made.
        place, backward = self._place()
        if func.namespace == "c10d":
            self._record_collective(func.overloadpacket.__name__, args, place)
        elif (kernel := kernel_of(self._hardware, func, args, kwargs or {}, result)) is not None:
            self._record(func, kernel, args, kwargs or {}, result, place, backward=backward)
        return result

    def _record(
        self,
        func: Operation,
        kernel: Kernel,
        args: Positional,
        kwargs: Keyword,
        result: object,
        place: _Place,
        *,
        backward: bool,
    ) -> None:
        reads, writes = _reads_and_writes(func, kernel.name, args, kwargs, result)
        kernels = kernels_of(kernel.name, args)
        self.recorded.append(
            Recorded(
                name=kernel.name,
                part=_part_of(kernel.name, place.part),
                bytes=kernel.bytes,
                seconds=kernel.seconds + (kernels - 1) * self._hardware.kernel_seconds,
                kernels=kernels,
                reads=tuple(map(self._operand, reads)),
                writes=tuple(map(self._operand, writes)),
                call=place.call,
                layer=place.layer,
                backward=backward,
            )
        )

    def _record_collective(self, name: str, args: Sequence[object], place: _Place) -> None:
        sent = sent_by(name, args)
        if sent is not None:
            seconds = collective(self._hardware, sent.operation, sent.ranks, sent.size)
            part = place.part or REDUCTION
            self.recorded.append(
                Recorded(name=sent.operation, part=part, bytes=sent.size, seconds=seconds, collective=True)
            )

    def _place(self) -> tuple[_Place, bool]:
        """Return where the operation that runs now belongs, and whether that is in a backward pass."""
        part = self._part_of_stack(sys._getframe(2))  # noqa: SLF001  # as in torch: who called
        if self._calls:  # also where a backward pass recomputes a layer
            module, call = self._calls[-1]
            if part is None and "norm" in type(module).__name__.lower():
                part = NORMS
            layer = next((number for each, number in self._calls if id(each) in self._layers), 0)
            place = _Place(part, call, layer)
            self._forward.setdefault(_sequence(), place)
            return place, torch._C._current_graph_task_id() != -1  # noqa: SLF001  # torch has no public name
        node = cast("_AutogradNode | None", torch._C._current_autograd_node())  # noqa: SLF001  # torch has no public name
        if node is None:
            self._forward.setdefault(_sequence(), _Place(part))
            return _Place(part), False
        if node.name() == "torch::autograd::AccumulateGrad":
            return _Place(part or SUMS), True
        made = self._forward.get(node._sequence_nr() + 1, _Place())  # noqa: SLF001  # torch has no public name
        return _Place(part or made.part, made.call, made.layer), True

    def _part_of_stack(self, frame: FrameType | None) -> str | None:
        while frame is not None:
            code = frame.f_code
            if code not in self._codes:
                self._codes[code] = _part_of_code(code)
            found = self._codes[code]
            if found is None and code.co_name == "step" and isinstance(frame.f_locals.get("self"), Optimizer):
                found = OPTIMIZER
            if found is not None:
                return found
            frame = frame.f_back
        return None

    def _next(self) -> int:
        self._count += 1
        return self._count

    def _operand(self, tensor: Tensor) -> Operand:
        storage = tensor.untyped_storage()
        if storage not in self._numbers:
            self._numbers[storage] = self._next()
        elements = 1
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            elements *= size if stride else min(size, 1)
        return Operand(
            memory=self._numbers[storage],
            place=(int(tensor.storage_offset()), elements),
            size=elements * tensor.element_size(),
            limit=storage.nbytes(),
        )


def kernels_of(name: str, args: Positional) -> int:
    """Return the kernels in which CUDA runs an operation: one, or a few for a list of tensors."""
    if not name.startswith(("_foreach_", "_fused_")):
        return 1
    lists = [arg for arg in args if isinstance(arg, list | tuple) and any(_numel(each) > 1 for each in arg)]
    if not lists:
        return 1
    chunks = sum(ceil(_numel(each) / CHUNK) for each in lists[0])
    kernels = max(ceil(chunks / CHUNKS), ceil(len(lists[0]) / TENSORS[min(len(lists), len(TENSORS)) - 1]))
    return kernels + (name == "_foreach_norm")  # one more adds up what the others have found


def _numel(value: object) -> int:
    return value.numel() if isinstance(value, Tensor) else 0


def _reads_and_writes(
    func: Operation, name: str, args: Positional, kwargs: Keyword, result: object
) -> tuple[list[Tensor], list[Tensor]]:
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for at, argument in enumerate(func._schema.arguments):  # noqa: SLF001  # torch has no public name
        value = args[at] if at < len(args) else kwargs.get(argument.name)
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        writes += tensors if is_written else []
        reads += [] if is_written and name in WRITE_ONLY else tensors
    known = {id(tensor) for tensor in writes}
    writes += [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and id(leaf) not in known]
    return reads, writes


def _sequence() -> int:
    number: int = torch._C._autograd._get_sequence_nr()  # noqa: SLF001  # torch has no public name
    return number


def _part_of_code(code: CodeType) -> str | None:
    name = code.co_qualname.partition(".<locals>")[0]
    if name in OF_FUNCTIONS:
        return OF_FUNCTIONS[name]
    if code in OF_CODES:
        return OF_CODES[code]
    if "rotary" in name.lower():  # transformers' functions and modules
        return ROTARY
    return next((part for path, part in OF_FILES.items() if code.co_filename.endswith(path)), None)


def _part_of(name: str, part: str | None) -> str:
    """Return the part of an operation, from its name and from the part of the place where it runs."""
    if name in NAMED_PRODUCTS:
        return PRODUCTS
    if name in ("fp8_codes", "fp8_largest"):
        return ROUNDING
    if "scaled_dot_product" in name or "flash_attention" in name or "flex_attention" in name:
        return ATTENTION
    if part is None and name in ("zero_", "_foreach_zero_"):
        return ZEROING
    if part == REDUCTION and name == "copy_":
        return part
    if part is not None:
        return part
    return RESIDUALS if name in NAMED_COPIES else ELEMENTWISE
