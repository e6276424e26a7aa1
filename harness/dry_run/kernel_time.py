"""Predict the seconds of one operation of torch on a device, from the shapes of its tensors.

A roofline, as the planner's: matrix products by `layer_time.matmul`, attention by the device's rate for it, and
everything else by the bytes that it reads and writes. Operations that start no kernel, as views, have none. Whatever
prices a step operation by operation uses `kernel_of`: the timeline of a dry run, and the clock of the tests' simulated
device. Collectives are priced by `harness.planner.traffic.collective`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from harness.parallel.values import Keyword, Operation, Positional
from harness.planner.hardware import Hardware
from harness.planner.layer_time import BACKWARD_RATE, IN_CACHE, matmul

PRECISIONS = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
}
"""The planner's name of a dtype's products; all others are computed as fp32."""
NO_KERNELS = ("c10d", "prim", "profiler")
"""Namespaces of operations that start no kernel; `prim::device` asks where a tensor lies."""
NO_KERNEL = frozenset(
    """_unsafe_view _local_scalar_dense lift_fresh empty empty_like empty_strided new_empty new_empty_strided
    record_stream is_same_size sym_size sym_stride
    sym_numel sym_storage_offset is_pinned _has_compatible_shallow_copy_type""".split()  # noqa: SIM905
)
"""Operations that are not views and start no kernel either."""
WRITE_ONLY = frozenset(
    """copy_ zero_ fill_ _foreach_zero_ _foreach_copy_ normal_ uniform_ bernoulli_ random_ trunc_normal_""".split()  # noqa: SIM905
)
"""Operations in place that do not read what they write."""
LOOKUPS = frozenset("embedding index_select gather index take_along_dim".split())  # noqa: SIM905
"""Operations that read of their first argument only the rows that they return."""
SCATTERS = frozenset("index_put_ _index_put_impl_ index_add_ index_copy_ scatter_ scatter_add_".split())  # noqa: SIM905
"""Operations that read and write of their first argument only as much as they are given."""
COPIES = ("copy_", "_to_copy")
CODES_OF_BOTH = ("fp8_codes", 4)
"""The operation that reads its input twice, for rows and for columns, and the number of tensors that it then makes."""
ATTENTION_BACKWARD_FLOPS = 2.5  # relative to forward: it recomputes the scores (Dao 2023)


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """The cost of one operation on a device.

    Attributes:
        name: the operation's name without namespace and overload, as `mm`.
        flops: floating-point operations of matrix products, attention and convolutions; 0 for all others.
        bytes: bytes that it reads and writes in the device's memory.
        seconds: predicted time on the device.
    """

    name: str
    flops: float
    bytes: float
    seconds: float


def kernel_of(hardware: Hardware, func: Operation, args: Positional, kwargs: Keyword, result: object) -> Kernel | None:
    """Return the cost of an operation that a `TorchDispatchMode` has been given; None if it starts no kernel.

    Only shapes, strides, dtypes and devices are read, so tensors may be fake.

    Args:
        result: what the operation returned.
    """
    if not isinstance(func, OpOverload) or func.namespace in NO_KERNELS:
        return None
    name = func.overloadpacket.__name__
    if func.is_view or torch.Tag.inplace_view in func.tags or name in NO_KERNEL:
        return None
    if name == "copy_" and _same_memory(*args[:2]):
        return None
    moved = _moved_bytes(name, func, args, kwargs, result)
    if not moved:
        return None
    if name in COPIES and len(_devices((args, result))) > 1:  # half of it moves on each side of the link
        return Kernel(name=name, flops=0.0, bytes=moved, seconds=moved / 2 / hardware.host_bytes_per_second)
    flops, seconds = _products(hardware, name, func, args, kwargs, result)
    seconds = max(seconds, moved / hardware.memory_bytes_per_second + hardware.kernel_seconds)
    return Kernel(name=name, flops=flops, bytes=moved, seconds=seconds)


class Kernels(TorchDispatchMode):
    """Calls `started` after each operation that starts a kernel on a device of the type `device`.

    Operations of autograd's own threads count, those of other threads do not.
    """

    def __init__(self, hardware: Hardware, started: Callable[[Kernel], None], device: str = "cpu") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._hardware, self._started, self._device = hardware, started, device

    def __torch_dispatch__(
        self, func: Operation, _types: object, args: Positional = (), kwargs: Keyword | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        kernel = kernel_of(self._hardware, func, args, kwargs or {}, result)
        if kernel is not None and self._device in _devices((args, kwargs, result)):
            self._started(kernel)
        return result


def _products(
    hardware: Hardware, name: str, func: Any, args: Positional, kwargs: Keyword, result: object
) -> tuple[float, float]:
    """Return FLOPs and seconds of a matrix product, an attention or a convolution; zeros for anything else."""
    if name in ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm"):
        left, right = args[-2:] if name in ("addmm", "baddbmm") else args[:2]
        copies = prod(left.shape[:-2])
        columns = right.shape[-1]
        rows, inner = left.shape[-2:]
        flops = 2.0 * copies * rows * inner * columns
        return flops, matmul(hardware, _precision(left), rows, inner, columns, copies)
    if name == "_grouped_mm":  # each row is multiplied by the weight of one group
        left, right = args[:2]
        flops = 2.0 * left.numel() * right.shape[-1]
        return flops, flops / hardware.reached_flops(_precision(left)) + hardware.kernel_seconds
    if name.startswith(("_scaled_dot_product", "_flash_attention", "_efficient_attention")):
        return _attention(hardware, name, func, args, kwargs)
    if func.overloadpacket in flop_registry:
        flops = float(flop_registry[func.overloadpacket](*args, **kwargs, out_val=result))
        return flops, flops / hardware.reached_flops(_precision(args[0])) + hardware.kernel_seconds
    return 0.0, 0.0


def _attention(hardware: Hardware, name: str, func: Any, args: Positional, kwargs: Keyword) -> tuple[float, float]:
    """Return FLOPs and seconds of fused attention: two products, of which a causal mask leaves half."""
    given = {parameter.name: value for parameter, value in _arguments(func, args, kwargs)}
    query = given["query"]
    key = given["key"]
    value = given["value"]
    pairs = prod(query.shape[:-1]) * key.shape[-2]
    flops = 2.0 * pairs * (query.shape[-1] + value.shape[-1])
    if given.get("is_causal"):
        flops /= 2
    precision = _precision(query)
    seconds = flops / (hardware.flops[precision] * hardware.own_attention_efficiency(query.shape[-1]))
    if "backward" in name:
        flops = ATTENTION_BACKWARD_FLOPS * flops
        seconds = ATTENTION_BACKWARD_FLOPS * seconds / BACKWARD_RATE
    return flops, seconds + hardware.kernel_seconds


def _moved_bytes(name: str, func: Any, args: Positional, kwargs: Keyword, result: object) -> float:
    """Return the bytes that an operation reads and writes, each tensor once."""
    fresh = _bytes(result) if any(one.alias_info is None for one in _schema(func).returns) else 0.0
    if name in LOOKUPS:
        return 2 * fresh + _bytes((args[1:], kwargs))
    if name in SCATTERS:
        return 3 * _bytes(args[1:])
    moved = fresh
    if isinstance(result, list) and (name, len(result)) == CODES_OF_BOTH and _bytes(args[0]) > IN_CACHE:
        moved += _bytes(args[0])
    for argument, value in _arguments(func, args, kwargs):
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if name.startswith("_fused_") and argument.name == "grads":  # written only if the kernel scales them
            writes = kwargs.get("grad_scale") is not None
        reads = not (writes and (name in WRITE_ONLY or argument.is_out))
        moved += (writes + reads) * _bytes(value)
    return moved


def _schema(func: Any) -> Any:
    return func._schema  # noqa: SLF001  # torch has no public name for it


def _arguments(func: Any, args: Positional, kwargs: Keyword) -> Iterable[tuple[Any, Any]]:
    """Yield the parameters of an operation's schema, each with its argument."""
    parameters = _schema(func).arguments
    yield from zip(parameters, args, strict=False)
    yield from ((parameter, kwargs[parameter.name]) for parameter in parameters if parameter.name in kwargs)


def _bytes(value: object) -> float:
    """Return the bytes of all tensors in a value; elements that a stride of 0 repeats count once."""
    return float(
        sum(
            prod(size for size, stride in zip(leaf.shape, leaf.stride(), strict=True) if stride) * leaf.itemsize
            for leaf in tree_leaves(value)
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided and leaf.numel()
        )
    )


def _devices(value: object) -> set[str]:
    return {leaf.device.type for leaf in tree_leaves(value) if isinstance(leaf, Tensor)}


def _precision(tensor: Tensor) -> str:
    return PRECISIONS.get(tensor.dtype, "fp32")


def _same_memory(to: Tensor, source: Tensor) -> bool:
    """Return whether both are the same elements of one storage; torch copies nothing then."""
    return (
        to.untyped_storage()._cdata == source.untyped_storage()._cdata  # noqa: SLF001  # what torch compares, too
        and to.storage_offset() == source.storage_offset()
        and to.dtype == source.dtype
        and to.stride() == source.stride()
    )
