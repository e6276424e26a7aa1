"""Kernels of rotations and activations for GPUs, in Triton: each does in one pass what torch does in several.

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

from harness.device.kernels import BLOCK, grid_of, runs, trial

AS_TORCH = {"enable_fp_fusion": False}
"""Options of the compiler: a multiplication and an addition round twice, as two operations of torch do."""

MOST_PARTS = 512
"""Programs that sum the gradient of a norm's weight: a few for each processor of a GPU."""
WIDEST = 16384
"""Widest row that one program normalises: it keeps the row in registers."""

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


@dataclass(frozen=True)
class Activation:
    """An activation by its name in `programs.activated`; `beta` is that of swish, x * sigmoid(beta * x)."""

    name: str
    beta: float = 1.0


@dataclass(frozen=True)
class Gate:
    """How a gate and an input become one: activation(gate) * (input + offset).

    Attributes:
        limit: gates are clamped to at most this, and inputs to this and its negative; None without.
        clamps_after: whether the activation is clamped, and not the gate.
        wide: whether all is computed in float32 and rounded once; otherwise after each operation.
        neighbours: whether gates and inputs that stand in one tensor alternate; otherwise each is a half of a row.
        gate_last: whether the second of them is the gate.
    """

    activation: Activation
    limit: float | None = None
    clamps_after: bool = False
    offset: float = 0.0
    wide: bool = False
    neighbours: bool = False
    gate_last: bool = False

    def parts(self, both: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gates and the inputs [..., n] of a tensor [..., 2n], which they share."""
        first, second = (both[..., ::2], both[..., 1::2]) if self.neighbours else both.chunk(2, -1)
        return (second, first) if self.gate_last else (first, second)


@dataclass(frozen=True)
class RowNorm:
    """How a row is normalised: (x - mean) / sqrt(mean square + epsilon) * (weight + offset) + bias.

    Attributes:
        centred: whether the mean is subtracted, as by a layer norm; otherwise it is a root-mean-square norm.
        offset: 1 for weights that are stored minus one, else 0.
    """

    epsilon: float
    centred: bool = False
    offset: float = 0.0


@cache
@trial()
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

    how, half = Gate(Activation("silu")), x.shape[-1] // 2
    gated = functional.silu(inputs[0]) * inputs[1]
    require_close(gate(x, up, how), gated)
    require_close(gate_backward(grad, x, up, how), torch.autograd.grad(gated, inputs, grad))

    how = Gate(Activation("swish", 2.0), limit=1.0, offset=1.0, neighbours=True)
    gates, ups = inputs[0][..., ::2].clamp(max=1.0), inputs[0][..., 1::2].clamp(-1.0, 1.0)
    gated = gates * torch.sigmoid(2.0 * gates) * (ups + 1.0)
    require_close(gate_halves(x, how), gated)
    of_x = gate_halves_backward(grad[..., :half].contiguous(), x, how)
    require_close((of_x,), torch.autograd.grad(gated, inputs[:1], grad[..., :half]))

    row_norm = RowNorm(1e-5, centred=True, offset=1.0)
    vectors = [up[0, 0, 0].clone().requires_grad_(), up[0, 0, 1].clone().requires_grad_()]
    total = inputs[0] + inputs[1]
    weight, bias = vectors[0].float() + row_norm.offset, vectors[1].float()
    normal = functional.layer_norm(total.float(), (x.shape[-1],), weight, bias, row_norm.epsilon).type_as(x)
    of_norm, scales, of_sum = norm(x, vectors[0].detach(), vectors[1].detach(), row_norm, plus=up)
    require_close((of_norm, of_sum), (normal, total))
    back = norm_backward(grad, of_sum, vectors[0].detach(), scales, row_norm, has_bias=True, of_total=up)
    require_close(back, torch.autograd.grad((normal, total), [inputs[0], *vectors], (grad, up)))

    squared = Activation("relu2")
    require_close(activate(x, squared), functional.relu(x).square())
    require_close(activate_backward(grad, x, squared), 2 * functional.relu(x) * grad)


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


def gate(gates: Tensor, ups: Tensor, how: Gate) -> Tensor:
    """Return activation(gates) * ups, contiguous; both [..., n] of one dtype."""
    rows, (of_gates, of_ups) = _rows(gates, ups)
    return _gated(gates, ups, how, rows, of_gates, of_ups)


def gate_backward(grads: Tensor, gates: Tensor, ups: Tensor, how: Gate) -> tuple[Tensor, Tensor]:
    """Return the gradients of `gates` and `ups`, contiguous, from that of what `gate` has returned."""
    outputs = tuple(torch.empty(gates.shape, dtype=gates.dtype, device=gates.device) for _ in range(2))
    rows, (of_gates, of_ups) = _rows(gates, ups)
    _gate_gradients(grads, (gates, ups), (outputs[0], outputs[1]), how, rows, (of_gates, of_ups, gates.shape[-1]))
    return outputs[0], outputs[1]


def gate_halves(both: Tensor, how: Gate) -> Tensor:
    """Return activation(gates) * ups, contiguous, of gates and ups in one tensor [..., 2n]."""
    rows, (stride,) = _rows(both)
    return _gated(*how.parts(both), how, rows, stride, stride)


def gate_halves_backward(grads: Tensor, both: Tensor, how: Gate) -> Tensor:
    """Return the gradient of `both`, contiguous, from that of what `gate_halves` has returned."""
    of_both = torch.empty(both.shape, dtype=both.dtype, device=both.device)
    rows, (stride,) = _rows(both)
    _gate_gradients(grads, how.parts(both), how.parts(of_both), how, rows, (stride, stride, both.shape[-1]))
    return of_both


def _gated(gates: Tensor, ups: Tensor, how: Gate, rows: int, of_gates: int, of_ups: int) -> Tensor:
    out = torch.empty(gates.shape, dtype=gates.dtype, device=gates.device)
    grid, width = grid_of(rows, gates.shape[-1])
    _programs().gate[grid](gates, ups, out, of_gates, of_ups, width, **_constants(how, gates))
    return out


def _gate_gradients(
    grads: Tensor,
    inputs: tuple[Tensor, Tensor],
    outputs: tuple[Tensor, Tensor],
    how: Gate,
    rows: int,
    strides: tuple[int, int, int],
) -> None:
    """Write gradients of gates and ups into `outputs`; strides are those of rows of both inputs, and of outputs."""
    grid, width = grid_of(rows, grads.shape[-1])
    _programs().gate_backward[grid](
        grads, *inputs, *outputs, row_stride(grads), *strides, width, **_constants(how, inputs[0])
    )


def _constants(how: Gate, gates: Tensor) -> dict[str, object]:
    return {
        "step": gates.stride(-1),
        "activation": how.activation.name,
        "beta": how.activation.beta,
        "clamped": how.limit is not None,
        "limit": how.limit or 0.0,
        "clamps_after": how.clamps_after,
        "offset": how.offset,
        "wide": how.wide,
        "block": BLOCK,
        **AS_TORCH,
    }


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Return an activation of a contiguous tensor."""
    out = torch.empty_like(x)
    grid = (-(-x.numel() // BLOCK),)
    options = {"activation": activation.name, "beta": activation.beta, "block": BLOCK, **AS_TORCH}
    _programs().activate[grid](x, out, x.numel(), **options)
    return out


def activate_backward(grads: Tensor, x: Tensor, activation: Activation) -> Tensor:
    """Return the gradient of `x` from that of its activation, both contiguous."""
    out = torch.empty_like(x)
    grid = (-(-x.numel() // BLOCK),)
    options = {"activation": activation.name, "beta": activation.beta, "block": BLOCK, **AS_TORCH}
    _programs().activate_backward[grid](grads, x, out, x.numel(), **options)
    return out


def norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, how: RowNorm, *, plus: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the norm of x, or of x + plus, contiguous, 1 / the deviation of each row [...], and x or the sum.

    A sum is rounded before it is normalised, and contiguous. The norm is computed in float32 and rounded once. The rows
    of `x` and `plus` [..., n] must have a `row_stride`.
    """
    rows, (stride, plus_stride) = _rows(x, x if plus is None else plus)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if plus is None else torch.empty_like(out)
    scales = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    at_once, options = _of_rows(x.shape[-1])
    options |= {"epsilon": how.epsilon, "offset": how.offset, "centred": how.centred}
    tensors = (x, plus, weight, bias, total, out, scales)
    _programs().norm[(-(-rows // at_once),)](*tensors, stride, plus_stride, rows, x.shape[-1], **options)
    return out, scales, total


def norm_backward(
    grads: Tensor,
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    how: RowNorm,
    *,
    has_bias: bool = False,
    of_total: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of `x`, contiguous, of the weight, and of the bias, from that of what `norm` has returned.

    Args:
        x: what was normalised: a sum, if two tensors were given.
        of_total: gradient of that sum from all else that reads it.
    """
    rows, (grad_stride, total_stride, stride) = _rows(grads, grads if of_total is None else of_total, x)
    width = x.shape[-1]
    of_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    at_once, options = _of_rows(width)
    all_tiles = -(-rows // at_once)
    tiles = -(-all_tiles // MOST_PARTS)
    parts = -(-all_tiles // tiles)
    of_weights = torch.empty((parts, width), dtype=torch.float32, device=x.device)
    of_biases = torch.empty_like(of_weights) if has_bias else None
    tensors = (grads, of_total, x, weight, scales, of_x, of_weights, of_biases)
    sizes = (grad_stride, total_stride, stride, rows, width, tiles)
    options |= {"offset": how.offset, "centred": how.centred}
    _programs().norm_backward[(parts,)](*tensors, *sizes, **options)
    of_bias = None if of_biases is None else _summed(of_biases, weight.dtype)
    return of_x, _summed(of_weights, weight.dtype), of_bias


def _summed(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of the rows of a matrix."""
    count, width = parts.shape
    out = torch.empty(width, dtype=dtype, device=parts.device)
    _programs().sum_rows[(-(-width // 64),)](parts, out, count, width, block=64, at_once=64)
    return out


def _of_rows(width: int) -> tuple[int, dict[str, object]]:
    """Return how many rows of this width a program normalises at once, and its options."""
    block = _power_of_two(width)
    at_once = max(1, 2048 // block)
    return at_once, {"block": block, "at_once": at_once, "num_warps": min(16, max(4, block // 512)), **AS_TORCH}


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
