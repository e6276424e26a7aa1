"""Kernels of rotations and gated activations for GPUs, in Triton: each does in one pass what torch does in several.

A rotation of queries and keys is 14 operations of torch, a gated activation two or three. `usable` says whether they
run on a device and give torch's results there; callers ask it once, and use torch if not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from types import ModuleType
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from harness.device.kernels import BLOCK, grid_of, runs

AS_TORCH = {"enable_fp_fusion": False}
"""Options of the compiler: a multiplication and an addition round twice, as two operations of torch do."""

Angles: TypeAlias = Literal["halves", "pairs", "first half", "each"]
"""Where the angles of pair c stand: at c and c + n / 2 of n, at 2c and 2c + 1, at c of n, or at c of n / 2."""


@dataclass(frozen=True)
class Turn:
    """How dimensions of a head are rotated; as in Llama by default.

    Attributes:
        angles: where the angles of a pair stand.
        pairs: whether neighbours are a pair; otherwise dimension i is rotated with dimension i + n / 2.
        into_pairs: the same of the result.
        wide: whether all is computed in float32 and rounded once; otherwise after each operation.
        last: whether the last dimensions are rotated if angles are fewer than dimensions; otherwise the first.
        tokens: the dimension of tokens: 2 in [batch, heads, tokens, n], 1 in [batch, tokens, heads, n].
        opposite: whether it turns the other way.
    """

    angles: Angles = "halves"
    pairs: bool = False
    into_pairs: bool = False
    wide: bool = False
    last: bool = False
    tokens: int = 2
    opposite: bool = False

    def width(self, angles: int) -> int:
        """Return how many dimensions are rotated by so many angles."""
        return 2 * angles if self.angles == "each" else angles


HALVES = Turn()


@cache
@torch.inference_mode(mode=False)  # which also records gradients, if an evaluation or a backward pass asks first
def usable(device: torch.device) -> bool:
    """Return whether the kernels run on `device`, which the first call tries: they must give torch's results there."""
    return runs(device, _try)


def _try(device: torch.device) -> None:
    """Raise an error if a kernel does not run on `device`, or gives other results than torch."""
    require_close = partial(torch.testing.assert_close, rtol=4e-3, atol=1e-3)  # four units of float16's last place
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


@cache
def _programs() -> ModuleType:
    return import_module("harness.extras.fusing.programs")


def _power_of_two(least: int) -> int:
    return 1 << max(least - 1, 0).bit_length()


def rotate(
    tensors: Sequence[Tensor], cos: Tensor, sin: Tensor, turn: Turn = HALVES, *, backward: bool = False
) -> tuple[Tensor, ...]:
    """Return queries and keys, or one of the two, rotated by angles [batch or 1, tokens, n].

    Each is [batch, heads, tokens, n]. Dimensions beyond those that `turn` rotates stay as they are. `backward`: by the
    opposite angles, as gradients are.
    """
    outputs = tuple(map(torch.empty_like, tensors))
    width = turn.width(cos.shape[-1])
    for x, out in zip(tensors, outputs, strict=True):
        if (kept := x.shape[-1] - width) > 0:
            of_rest = slice(kept) if turn.last else slice(width, None)
            out[..., of_rest].copy_(x[..., of_rest])
    q, k, out_q, out_k = (
        _rotated_part(each, turn, width) for each in (tensors[0], tensors[-1], outputs[0], outputs[-1])
    )
    batch, heads, tokens, _ = q.shape
    columns = _power_of_two(width // 2)
    one = len(cos) == 1
    _programs().rotate[(batch * tokens,)](
        q,
        k,
        out_q,
        out_k,
        cos,
        sin,
        tokens,
        *q.stride()[:3],
        *k.stride()[:3],
        *out_q.stride()[:3],
        *out_k.stride()[:3],
        0 if one else cos.stride(0),
        cos.stride(1),
        0 if one else sin.stride(0),
        sin.stride(1),
        heads,
        k.shape[1] if len(tensors) > 1 else 0,
        width // 2,
        backward=backward,
        opposite=turn.opposite,
        angles={"halves": 0, "pairs": 1}.get(turn.angles, 2),
        pairs=turn.into_pairs if backward else turn.pairs,
        into_pairs=turn.pairs if backward else turn.into_pairs,
        wide=turn.wide,
        columns=columns,
        at_once=max(1, min(_power_of_two(heads), 2048 // columns)),
        **AS_TORCH,
    )
    return outputs


def _rotated_part(x: Tensor, turn: Turn, width: int) -> Tensor:
    """Return the dimensions of heads that are rotated, [batch, heads, tokens, width]."""
    heads_first = x if turn.tokens == 2 else x.transpose(1, 2)
    if x.shape[-1] == width:
        return heads_first
    return heads_first[..., -width:] if turn.last else heads_first[..., :width]


def gate(gates: Tensor, ups: Tensor, activation: str) -> Tensor:
    """Return activation(gates) * ups, contiguous; both [..., n] of one dtype."""
    out = torch.empty(gates.shape, dtype=gates.dtype, device=gates.device)
    rows, (of_gates, of_ups) = _rows(gates, ups)
    grid, width = grid_of(rows, gates.shape[-1])
    _programs().gate[grid](gates, ups, out, of_gates, of_ups, width, activation=activation, block=BLOCK, **AS_TORCH)
    return out


def gate_backward(grads: Tensor, gates: Tensor, ups: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Return the gradients of `gates` and `ups`, contiguous, from that of what `gate` has returned."""
    outputs = tuple(torch.empty(gates.shape, dtype=gates.dtype, device=gates.device) for _ in range(2))
    rows, strides = _rows(grads, gates, ups)
    grid, width = grid_of(rows, gates.shape[-1])
    _programs().gate_backward[grid](
        grads, gates, ups, *outputs, *strides, width, activation=activation, block=BLOCK, **AS_TORCH
    )
    return outputs[0], outputs[1]


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
