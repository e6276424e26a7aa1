"""Operations of a layer in fewer passes over memory: by kernels of the harness, or by those of liger-kernel."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

import torch
from torch import nn

from harness.extras.fusing.fused import fuse
from harness.extras.fusing.liger import FLAG, LigerKernels, find_kernels, liger_kernels
from harness.hf.skeleton import ModelSource, build_skeleton


def fusing(
    source: ModelSource, device: torch.device, *, own: bool, liger: bool | str
) -> tuple[Callable[[nn.Module], None], str]:
    """Return what is called on each layer of a model when it has its weights, and a line; see `FuseOperations`."""
    if liger != "auto":
        return (liger_kernels(source.config, device).put_into if liger else partial(fuse, device=device)), ""
    found = find_kernels(source.config, device)
    kernels, missing = (found, "") if isinstance(found, LigerKernels) else (LigerKernels({}), found)

    def change(layer: nn.Module) -> None:
        if own:
            fuse(layer, device)
        kernels.put_where_free(layer)

    skeleton = build_skeleton(source.config)
    if own:
        fuse(skeleton, device)
    ours = _changed(skeleton)
    kernels.put_where_free(skeleton)
    theirs = _named(_changed(skeleton) - ours, skeleton)
    line = f"{FLAG} auto: the harness's kernels in {_named(ours, skeleton)}; Liger's in {theirs}"
    return change, f"{line}: {missing}" if missing else line


def _changed(model: nn.Module) -> set[str]:
    """Return the names of the modules of a model that have a forward, or a gate, of their own."""
    return {name for name, module in model.named_modules() if {"forward", "_apply_gate"} & vars(module).keys()}


def _named(changed: Collection[str], model: nn.Module) -> str:
    """Return the classes of modules as text."""
    kinds = dict.fromkeys(type(model.get_submodule(name)).__name__ for name in sorted(changed))
    return ", ".join(kinds) or "no module"
