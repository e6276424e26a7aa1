"""Record what a GPU computes in a step: the operations of a dry run, with their tensors and their purpose.

The purpose of an operation is that of the function or the module in which it runs. Operations of a backward pass run
outside of both: their purpose is that of the forward operation with the same sequence number.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from harness.parallel.values import Keyword, Operation, Positional

PRODUCTS, ATTENTION, NORMS, ROTARY = "matrix products", "attention", "norms", "rotary"
ELEMENTWISE, RESIDUALS, LOSS = "elementwise", "residuals and copies", "loss"
SUMS, ZEROING, REDUCTION, NORM = "sums of gradients", "zeroing", "reduction", "norm of gradients"
CLIP, OPTIMIZER, WEIGHTS = "clip", "optimizer", "copy of weights"
PARTS = (
    *(PRODUCTS, ATTENTION, NORMS, ELEMENTWISE, ROTARY, LOSS, RESIDUALS),
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
    "FlatOptimizer._start_gather": WEIGHTS,
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
NAMED_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm")
NAMED_COPIES = (
    *("add", "add_", "clone", "copy_", "_to_copy", "cat", "stack", "embedding", "embedding_dense_backward"),
    *("index_select", "index", "gather", "scatter", "slice_backward", "select_backward", "constant_pad_nd"),
)
NO_KERNEL = (
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "_reshape_alias"),
    *("lift_fresh", "set_", "resize_", "record_stream", "_local_scalar_dense", "is_same_size", "is_pinned"),
)
"""Operations without a kernel that are not views by their schema."""
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
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """An operation of a step.

    Attributes:
        name: torch's name of it, without an overload; of a collective, the usual one.
        part: what it is for, one of `PARTS`.
        call: number of the innermost module call in whose forward or backward it runs; 0 outside of all.
        layer: the same of the layer of the pipeline.
        backward: whether autograd's backward pass runs it.
        causal: whether attention is causal, without a mask.
        ranks: of a collective, the ranks that take part.
        kernels: of a GPU.
    """

    name: str
    part: str
    reads: tuple[Operand, ...]
    writes: tuple[Operand, ...]
    call: int = 0
    layer: int = 0
    backward: bool = False
    causal: bool = False
    ranks: tuple[int, ...] = ()
    kernels: int = 1


@dataclass(frozen=True)
class _Place:
    """Where an operation of a forward pass runs."""

    part: str | None = None
    call: int = 0
    layer: int = 0


class Recorder(TorchDispatchMode):
    """Records the operations that run while it is entered; `watching_modules` tells it where.

    Args:
        layers: the modules that count as layers.
    """

    def __init__(self, layers: Iterable[nn.Module] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
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
        name = func.overloadpacket.__name__
        if func.namespace == "c10d":
            self._record_collective(name.removesuffix("_"), args)
        elif func.namespace == "aten" and name not in NO_KERNEL and not _is_view(func):
            self._record(func, name, args, kwargs or {}, result)
        return result

    def _record(self, func: Operation, name: str, args: Positional, kwargs: Keyword, result: object) -> None:
        reads, writes = _reads_and_writes(func, name, args, kwargs, result)
        if name == "copy_" and reads and writes and (reads[0] is writes[0] or _same(reads[0], writes[0])):
            return  # onto itself: CUDA skips it
        place, backward = self._place()
        self.recorded.append(
            Recorded(
                name=name,
                part=_part_of(name, place.part),
                reads=tuple(map(self._operand, reads)),
                writes=tuple(map(self._operand, writes)),
                call=place.call,
                layer=place.layer,
                backward=backward,
                causal=_argument(func, "is_causal", args, kwargs) is True,
                kernels=kernels_of(name, args),
            )
        )

    def _record_collective(self, name: str, args: Sequence[object]) -> None:
        group = next((arg for arg in args if isinstance(arg, torch.ScriptObject)), None)
        tensors = [leaf for leaf in tree_leaves(list(args)) if isinstance(leaf, Tensor)]
        if group is None or not tensors:
            return
        ranks = tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(group)))
        if len(ranks) > 1:
            part = self._place()[0].part or REDUCTION
            largest = self._operand(max(tensors, key=lambda tensor: tensor.nbytes))
            self.recorded.append(Recorded(name=name, part=part, reads=(), writes=(largest,), ranks=ranks))

    def _place(self) -> tuple[_Place, bool]:
        """Return where the operation that runs now belongs, and whether that is in a backward pass."""
        part = self._part_of_stack(sys._getframe(3))  # noqa: SLF001  # as in torch: who called
        if self._calls:  # also where a backward pass recomputes a layer
            module, call = self._calls[-1]
            if part is None and "norm" in type(module).__name__.lower():
                part = NORMS
            layer = next((number for each, number in self._calls if id(each) in self._layers), 0)
            place = _Place(part, call, layer)
            self._forward.setdefault(_sequence(), place)
            return place, torch._C._current_graph_task_id() != -1  # noqa: SLF001  # torch has no public name
        node: Any = torch._C._current_autograd_node()  # noqa: SLF001  # torch has no public name
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
            place=(tensor.storage_offset(), elements),
            size=elements * tensor.element_size(),
            limit=storage.nbytes(),
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
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


WRITTEN_ONLY = ("zero_", "fill_", "copy_", "_foreach_zero_", "_foreach_copy_", "normal_", "uniform_")


def _reads_and_writes(
    func: Operation, name: str, args: Positional, kwargs: Keyword, result: object
) -> tuple[list[Tensor], list[Tensor]]:
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for at, argument in enumerate(func._schema.arguments):  # noqa: SLF001  # torch has no public name
        value = args[at] if at < len(args) else kwargs.get(argument.name)
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written and name.startswith("_fused_") and argument.name == "grads":
            # torch's fused optimizers write gradients back only if they scale them
            is_written = kwargs.get("grad_scale") is not None
        writes += tensors if is_written else []
        reads += [] if is_written and name in WRITTEN_ONLY else tensors
    known = {id(tensor) for tensor in writes}
    writes += [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and id(leaf) not in known]
    return reads, writes


def _same(one: Tensor, other: Tensor) -> bool:
    shared = one.untyped_storage()._cdata == other.untyped_storage()._cdata  # noqa: SLF001  # torch has no public name
    return shared and one.storage_offset() == other.storage_offset() and one.shape == other.shape


def _argument(func: Operation, wanted: str, args: Positional, kwargs: Keyword) -> object:
    for at, argument in enumerate(func._schema.arguments):  # noqa: SLF001  # torch has no public name
        if argument.name == wanted:
            return args[at] if at < len(args) else kwargs.get(wanted, argument.default_value)
    return None


def _is_view(func: Operation) -> bool:
    aliases = [returned.alias_info for returned in func._schema.returns]  # noqa: SLF001  # torch has no public name
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def _sequence() -> int:
    number: int = torch.autograd._get_sequence_nr()  # noqa: SLF001  # torch has no public name
    return number


def _part_of_code(code: CodeType) -> str | None:
    name = code.co_qualname.partition(".<locals>")[0]
    if name in OF_FUNCTIONS:
        return OF_FUNCTIONS[name]
    if "rotary" in code.co_name or name in ("_Rotation.forward", "_Rotation.backward"):
        return ROTARY
    return next((part for path, part in OF_FILES.items() if code.co_filename.endswith(path)), None)


def _part_of(name: str, part: str | None) -> str:
    """Return the part of an operation, from its name and from the part of the place where it runs."""
    if name in NAMED_PRODUCTS:
        return PRODUCTS
    if "scaled_dot_product" in name or "flash_attention" in name or "flex_attention" in name:
        return ATTENTION
    if part is None and name in ("zero_", "_foreach_zero_"):
        return ZEROING
    if part == REDUCTION and name == "copy_":
        return part
    if part is not None:
        return part
    return RESIDUALS if name in NAMED_COPIES else ELEMENTWISE
