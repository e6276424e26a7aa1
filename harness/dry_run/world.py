"""Simulate a world of many ranks in which only one is real, and tensors that have shapes but no values.

Process groups are torch's fake ones: a collective returns at once. Gathering returns a copy of this rank's own
contribution for each rank, so every comparison between ranks finds them equal.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensor, fake_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from harness.deepspeed.initialize import replacing
from harness.deepspeed.no_peers import trusting_peers
from harness.deepspeed.zero3_parameters import restore_linear
from harness.parallel.values import Keyword, Operation, Positional
from harness.topology.env import LaunchEnv, inherited, replace_environment

ALL_OF = (torch.ops.aten.all.default, torch.ops.aten.all.dim)
KNOWN_ELEMENTS = 256  # tensors up to this size keep their values: received shapes, weights of losses (torch's limit: 1)
_DEEPCOPY: Any = Tensor.__deepcopy__


@contextmanager
def fake_world(env: LaunchEnv) -> Iterator[None]:
    """Make this process rank `env.rank` of `env.world_size` while the context lasts; nothing is sent.

    Its device is the CPU, also on a machine with a GPU, which need not have one for each local rank. The environment is
    restored afterwards. Raises RuntimeError if this process is already in a process group.
    """
    if dist.is_initialized():
        raise RuntimeError("this process is in a process group already: a dry run needs one of its own")
    before = inherited()
    env.export(os.environ)
    dist.init_process_group("fake", store=FakeStore(), rank=env.rank, world_size=env.world_size)
    try:
        # DeepSpeed compares configs and shapes of ranks while it builds; with one real rank there is nothing to compare
        with trusting_peers(), _Echo(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Set timeout is now only supported|Accessing the data pointer")
            yield
    finally:
        dist.destroy_process_group()
        restore_linear()
        replace_environment(before)


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Make all new tensors without memory while the context lasts.

    `Module.to` and the like do nothing: modules are built in the right type already, and have no values to move.
    """
    with (
        replacing(
            (nn.Module, "_apply", lambda module, *_, **__: module),
            (Tensor, "__deepcopy__", _copy),
            (fake_tensor, "CONSTANT_NUMEL_LIMIT", KNOWN_ELEMENTS),
            (dist, "all_gather_object", _own_of_all),
            (FakeTensor, "data_ptr", _address),
        ),
        _Shapes(allow_non_fake_inputs=True),
        _GroupedProducts(),
        _Values(),
    ):
        yield


def _own_of_all(values: list[object], value: object, group: dist.ProcessGroup | None = None) -> None:
    """Replace `all_gather_object`, which sends the pickled bytes as a tensor, and such a tensor has no values here."""
    values[:] = [value] * dist.get_world_size(group)


def _address(tensor: Tensor) -> int:
    """Return an address for a tensor without memory: different ones for tensors that share none, as on a device."""
    storage: int = tensor.untyped_storage()._cdata  # noqa: SLF001  # torch has no public name for it
    return storage + int(tensor.storage_offset()) * tensor.element_size()


def _copy(tensor: Tensor, memo: object) -> Tensor:
    """Return a copy, a fake tensor only if `tensor` is one: torch wants a copied meta buffer to be a plain tensor."""
    if isinstance(tensor, FakeTensor):
        copied: Tensor = _DEEPCOPY(tensor, memo)
    else:
        with fake_tensor.unset_fake_temporarily():
            copied = _DEEPCOPY(tensor, memo)
    return copied


class _Shapes(fake_tensor.FakeTensorMode):
    """torch's mode for tensors without memory; a copied tensor stays in it."""

    def __deepcopy__(self, _memo: object) -> _Shapes:
        return self


class _Mode(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]


class _Echo(_Mode):
    """Fills the output of an all-gather with copies of this rank's own tensor; torch's fake group leaves it empty."""

    def __torch_dispatch__(
        self, func: Operation, _types: object, args: Positional = (), kwargs: Keyword | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.c10d.allgather_.default:
            for outputs, given in zip(args[0], args[1], strict=True):
                for output in outputs:
                    output.copy_(given)
        return result


class _GroupedProducts(_Mode):
    """Gives the products of experts a shape in any dtype; torch has one for them in bf16 only."""

    def __torch_dispatch__(
        self, func: Operation, _types: object, args: Positional = (), kwargs: Keyword | None = None
    ) -> object:
        grouped = torch.ops.aten._grouped_mm.default  # noqa: SLF001  # torch has no public name for it
        if func is not grouped or args[0].dtype == torch.bfloat16:
            return func(*args, **(kwargs or {}))
        rows, weights, *others = args
        product = func(rows.bfloat16(), weights.bfloat16(), *others, **(kwargs or {}))
        return cast("Tensor", product).to(rows.dtype)


class _Values(_Mode):
    """Gives each tensor of one element that has no value the value 0, or True if it comes from `all`.

    Numbers computed from them have values too. So every norm is finite, no gradient overflows, and code that branches
    on a scalar (DeepSpeed's overflow check) takes the path of a normal step.
    """

    def __torch_dispatch__(
        self, func: Operation, _types: object, args: Positional = (), kwargs: Keyword | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else (result,):
            if isinstance(tensor, FakeTensor) and tensor.constant is None and tensor.numel() == 1:
                with fake_tensor.unset_fake_temporarily():
                    tensor.constant = torch.full(tensor.shape, func in ALL_OF, dtype=tensor.dtype)
        return result
