"""Operations of a layer in fewer passes over memory: by kernels of the harness, or by those of liger-kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from harness.extras.fusing.fused import fuse
from harness.extras.fusing.liger import liger_kernels
from harness.hf.skeleton import ModelSource


def fusing(source: ModelSource, device: torch.device, *, liger: bool) -> Callable[[nn.Module], None]:
    """Return what is called on each layer of a model when it has its weights; see `FuseOperations`."""
    return liger_kernels(source.config, device).put_into if liger else partial(fuse, device=device)
