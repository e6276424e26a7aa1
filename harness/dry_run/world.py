"""A world of many ranks of which one is real, and tensors that have shapes but no values.

Process groups are torch's fake ones: a collective takes no time. What a rank gathers is its own contribution, as often
as there are ranks, so every comparison between ranks finds them equal.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensor, fake_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from harness.deepspeed.no_peers import replaced, trusting_peers
from harness.deepspeed.zero3_parameters import restore_linear
from harness.parallel.values import Keyword, Operation, Positional
from harness.topology.env import LaunchEnv, inherited, replace_environment

ALL_OF = (torch.ops.aten.all.default, torch.ops.aten.all.dim)
KNOWN_ELEMENTS = 256  # up to this size a tensor keeps its values: shapes of what travels, weights of losses


@contextmanager
def fake_world(env: LaunchEnv) -> Iterator[None]:
    """Be the rank `env.rank` of `env.world_size` while the context lasts; nothing is sent.

    The environment is as before afterwards. RuntimeError if this process is in a process group already.
    """
    if dist.is_initialized():
        raise RuntimeError("this process is in a process group already: a dry run needs one of its own")
    before = inherited()
    env.export(os.environ)
    dist.init_process_group("fake", store=FakeStore(), rank=env.rank, world_size=env.world_size)
    try:
        with trusting_peers(), _Echo(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Set timeout is now only supported|Accessing the data pointer")
            yield
    finally:
        dist.destroy_process_group()
        restore_linear()
        replace_environment(before)


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Make tensors without memory while the context lasts.

    Modules are left as they are built: they are of the right type already, and have no values to move.
    """
    with (
        replaced(nn.Module, "_apply", lambda module, *_, **__: module),
        replaced(Tensor, "__deepcopy__", _copy),
        replaced(fake_tensor, "CONSTANT_NUMEL_LIMIT", KNOWN_ELEMENTS),
        replaced(dist, "all_gather_object", _own_of_all),
        _Shapes(allow_non_fake_inputs=True),
        _Values(),
    ):
        yield


def _own_of_all(values: list[object], value: object, group: dist.ProcessGroup | None = None) -> None:
    """Gather this rank's value as often as there are ranks; torch would send its bytes as a tensor, which has none."""
    values[:] = [value] * dist.get_world_size(group)


_DEEPCOPY: Any = Tensor.__deepcopy__


def _copy(tensor: Tensor, memo: object) -> Tensor:
    """Return a copy; of a buffer on meta one that is no fake tensor either, which torch asks for."""
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
    """Gives a rank its own tensors for those of the others."""

    def __torch_dispatch__(
        self, func: Operation, _types: object, args: Positional = (), kwargs: Keyword | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.c10d.allgather_.default:
            for outputs, given in zip(args[0], args[1], strict=True):
                for output in outputs:
                    output.copy_(given)
        return result


class _Values(_Mode):
    """Gives values to single numbers that have none: zero, and true where all of something is asked for.

    What is computed from them has values again, so no gradient overflows and every norm is finite.
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
