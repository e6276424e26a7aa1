"""Triton kernels for the loss on GPUs, each fusing several of torch's operations into one pass.

For each operation torch reads and writes a whole tensor, and Python needs a few microseconds to launch it. A softmax
cross entropy takes a dozen operations.

`usable` returns whether the kernels run on a device and match torch's results; otherwise callers use torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional

from harness.console import warn
from harness.errors import headline
from harness.topology.env import inherited

BLOCK = 1024
"""Columns of a row that one program computes."""


@contextmanager
def trial() -> Iterator[None]:
    """Record the gradients of a trial, apart from the computation in whose middle it is made."""
    # That may be an evaluation or a backward pass, which record none, or the forward of a layer that is recomputed: its
    # hooks would take the tensors that a trial saves for the layer's own, and its backward pass would fail.
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with torch.inference_mode(mode=False), torch.enable_grad(), hooks:
        yield


@cache
@trial()
def usable(device: torch.device) -> bool:
    """Return whether the kernels run on `device` and match torch's results there; the first call tries them."""
    return runs(device, _try)


def runs(device: torch.device, trial: Callable[[torch.device], None]) -> bool:
    """Return whether Triton kernels can run on `device` and their `trial` succeeds; warn if it fails."""
    if (device.type != "cuda" and not interpreted()) or find_spec("triton") is None:
        return False
    try:
        trial(device)
    # Any error of a compiler or driver: torch's own operations need neither, so the run can go on.
    except Exception as error:
        warn(f"kernels in Triton are not used on {device}: {type(error).__name__}: {headline(error)}")
        return False
    return True


def _try(device: torch.device) -> None:
    """Raise an error if a kernel does not run on `device`, or its results differ from torch's."""
    require_close = partial(torch.testing.assert_close, rtol=4e-3, atol=1e-3)  # four units of float16's last place
    x = torch.randn((2, 2, 3, 8), generator=torch.Generator().manual_seed(0)).half().to(device)
    logits = x.clone().requires_grad_()
    largest, sums = exponentials(x)
    log_sums = largest + sums.log()
    labels = torch.full_like(largest, 5, dtype=torch.int64)
    ones = torch.ones_like(sums)
    require_close(log_sums, x.float().logsumexp(-1))
    loss = functional.cross_entropy(logits.flatten(0, 2).float(), labels.flatten(), reduction="sum")
    of_logits = torch.empty_like(x)
    probabilities_less_label(x, of_logits, log_sums, labels, ones, ones)
    require_close(of_logits, *torch.autograd.grad(loss, [logits]))


def interpreted() -> bool:
    """Return whether Triton interprets kernels on the CPU, which is only suitable for tests."""
    return inherited("TRITON_INTERPRET").get("TRITON_INTERPRET") == "1"


@cache
def _programs() -> ModuleType:
    return import_module("harness.device.kernels.programs")


def exponentials(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest of each row of `logits` [..., n], and the sum of exp(logit - largest): float32, [...]."""
    largest = torch.empty(logits.shape[:-1], dtype=torch.float32, device=logits.device)
    sums = torch.empty_like(largest)
    _programs().exponentials[(largest.numel(),)](logits, largest, sums, logits.shape[-1], block=4096)
    return largest, sums


def probabilities_less_label(
    logits: Tensor, out: Tensor, log_sums: Tensor, labels: Tensor, scales: Tensor, label_scales: Tensor
) -> None:
    """Write scale * exp(logit - log_sum), less `label_scale` in the label's column, to `out`, which may be `logits`.

    Args:
        logits, out: [..., n], contiguous.
        log_sums, labels, scales, label_scales: [...]; sums and scales in float32.
    """
    log_sums, labels, scales, label_scales = (each.contiguous() for each in (log_sums, labels, scales, label_scales))
    grid, width = grid_of(log_sums.numel(), logits.shape[-1])
    _programs().probabilities_less_label[grid](logits, out, log_sums, labels, scales, label_scales, width, block=BLOCK)


def grid_of(rows: int, width: int) -> tuple[tuple[int, int], int]:
    """Return how many programs compute so many rows, in two dimensions, and the width of a row."""
    return (rows, -(-width // BLOCK)), width
