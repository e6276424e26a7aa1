"""Kernels of our own for GPUs, in Triton: each does in one pass what torch does in several.

torch reads and writes a whole tensor for each operation, and Python takes some microseconds to launch it. A rotation of
queries and keys is 14 operations, a gated activation two or three, and a softmax cross entropy a dozen.

`usable` says whether they run on a device and give torch's results there; callers ask it once, and use torch if not.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional

from harness.console import warn
from harness.topology.env import inherited

BLOCK = 1024
"""Columns of a row that one program computes."""
AS_TORCH = {"enable_fp_fusion": False}
"""Options of the compiler: a multiplication and an addition round twice, as two operations of torch do."""


@cache
@torch.inference_mode(mode=False)  # which also records gradients, if an evaluation or a backward pass asks first
def usable(device: torch.device) -> bool:
    """Return whether the kernels run on `device`, which the first call tries: they must give torch's results there."""
    if (device.type != "cuda" and not _interpreted()) or find_spec("triton") is None:
        return False
    require_close = partial(torch.testing.assert_close, rtol=4e-3, atol=1e-3)  # four units of float16's last place
    try:
        generator = torch.Generator().manual_seed(0)
        x, up, grad = (torch.randn((2, 2, 3, 8), generator=generator).half().to(device) for _ in range(3))
        angles = up[:, 0]
        inputs = [each.requires_grad_() for each in (x.clone(), up.clone())]

        first, second = inputs[0].chunk(2, -1)
        turned = inputs[0] * angles.unsqueeze(1) + torch.cat([-second, first], -1) * angles.unsqueeze(1)
        require_close(rotate([x, up], angles, angles)[0], turned)
        (of_turned,) = torch.autograd.grad(turned, inputs[:1], grad)
        require_close(rotate([grad, up], angles, angles, backward=True)[0], of_turned)

        gated = functional.silu(inputs[0]) * inputs[1]
        require_close(gate(x, up, "silu"), gated)
        require_close(gate_backward(grad, x, up, "silu"), torch.autograd.grad(gated, inputs, grad))

        largest, sums = exponentials(x)
        log_sums, labels, ones = largest + sums.log(), torch.full_like(largest, 5, dtype=torch.int64), torch.ones_like
        require_close(log_sums, x.float().logsumexp(-1))
        loss = functional.cross_entropy(inputs[0].flatten(0, 2).float(), labels.flatten(), reduction="sum")
        of_logits = torch.empty_like(x)
        probabilities_less_label(x, of_logits, log_sums, labels, ones(sums), ones(sums))
        require_close(of_logits, *torch.autograd.grad(loss, inputs[:1]))
    except Exception as error:  # whatever a compiler and a driver may say: torch's own operations need neither
        reason = str(error).strip().partition("\n")[0]
        warn(f"kernels in Triton are not used on {device}: {type(error).__name__}: {reason}")
        return False
    return True


def _interpreted() -> bool:
    """Return whether Triton interprets kernels on the CPU, which is only fit for tests."""
    return inherited("TRITON_INTERPRET").get("TRITON_INTERPRET") == "1"


@cache
def _programs() -> ModuleType:
    return import_module("harness.device.kernels.programs")


def _power_of_two(least: int) -> int:
    return 1 << max(least - 1, 0).bit_length()


def rotate(tensors: Sequence[Tensor], cos: Tensor, sin: Tensor, *, backward: bool = False) -> tuple[Tensor, ...]:
    """Return queries and keys, or one of the two, rotated by angles [batch or 1, tokens, n].

    Each is [batch, heads, tokens, n]. Dimension i is rotated with dimension i + n / 2. `backward`: by the opposite
    angles, as gradients are.
    """
    q, k = tensors[0], tensors[-1]
    outputs = tuple(map(torch.empty_like, tensors))
    batch, heads, tokens, width = q.shape
    columns = _power_of_two(width // 2)
    one = len(cos) == 1
    _programs().rotate[(batch * tokens,)](
        q,
        k,
        outputs[0],
        outputs[-1],
        cos,
        sin,
        tokens,
        *q.stride()[:3],
        *k.stride()[:3],
        *outputs[0].stride()[:3],
        *outputs[-1].stride()[:3],
        0 if one else cos.stride(0),
        cos.stride(1),
        0 if one else sin.stride(0),
        sin.stride(1),
        heads,
        k.shape[1] if len(tensors) > 1 else 0,
        width // 2,
        backward=backward,
        columns=columns,
        at_once=max(1, min(_power_of_two(heads), 2048 // columns)),
        **AS_TORCH,
    )
    return outputs


def gate(gates: Tensor, ups: Tensor, activation: str) -> Tensor:
    """Return activation(gates) * ups, contiguous; both [..., n] of one dtype."""
    out = torch.empty(gates.shape, dtype=gates.dtype, device=gates.device)
    rows, (of_gates, of_ups) = _rows(gates, ups)
    grid, width = _grid(rows, gates.shape[-1])
    _programs().gate[grid](gates, ups, out, of_gates, of_ups, width, activation=activation, block=BLOCK, **AS_TORCH)
    return out


def gate_backward(grads: Tensor, gates: Tensor, ups: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Return the gradients of `gates` and `ups`, contiguous, from that of what `gate` has returned."""
    outputs = tuple(torch.empty(gates.shape, dtype=gates.dtype, device=gates.device) for _ in range(2))
    rows, strides = _rows(grads, gates, ups)
    grid, width = _grid(rows, gates.shape[-1])
    _programs().gate_backward[grid](
        grads, gates, ups, *outputs, *strides, width, activation=activation, block=BLOCK, **AS_TORCH
    )
    return outputs[0], outputs[1]


def exponentials(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest of each row of `logits` [..., n], and the sum of exp(logit - largest): float32, [...]."""
    largest, sums = (torch.empty(logits.shape[:-1], dtype=torch.float32, device=logits.device) for _ in range(2))
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
    grid, width = _grid(log_sums.numel(), logits.shape[-1])
    _programs().probabilities_less_label[grid](logits, out, log_sums, labels, scales, label_scales, width, block=BLOCK)


def _grid(rows: int, width: int) -> tuple[tuple[int, int], int]:
    return (rows, -(-width // BLOCK)), width


def _rows(*tensors: Tensor) -> tuple[int, list[int]]:
    """Return the number of rows of tensors [..., n], and how far apart they lie in each."""
    return tensors[0].numel() // max(tensors[0].shape[-1], 1), [row_stride(tensor) or 0 for tensor in tensors]


def row_stride(tensor: Tensor) -> int | None:
    """Return how far apart the rows of a tensor [..., n] lie; None if they are not evenly spaced, or not dense."""
    if tensor.stride(-1) != 1:
        return None
    expected = stride = tensor.stride(-2) if tensor.dim() > 1 else 0
    for size, found in zip(reversed(tensor.shape[:-1]), reversed(tensor.stride()[:-1]), strict=True):
        if size != 1 and found != expected:
            return None
        expected = found * size
    return stride
