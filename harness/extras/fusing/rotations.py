"""Rotary embeddings of a GPU in one kernel, found by trial.

Families rotate the dimensions of a head in pairs. They differ in which dimensions are a pair, where its angle stands,
whether all of a head is rotated, and where numbers are rounded. So at its first call with inputs of some dtypes and
widths, a family's function computes small ones. Its result is compared, in 16 bits to the last bit, with each way of
rotating that the kernel has. Where none is equal, the family's function goes on to run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from itertools import product
from types import FunctionType
from typing import Any, TypeAlias, TypeGuard, cast, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from harness.device.kernels import trial
from harness.extras.fusing import kernels
from harness.extras.fusing.kernels import Angles, Turn
from harness.parallel.comm import Context

NAMED = "rotary"
"""What the names of all functions contain that rotate queries and keys."""
BOTH = (False, True)
COMPLEX = "freqs_cis"
"""The parameter of those that multiply by complex numbers cos + i sin."""
TURNS: Mapping[str, Turn] = {
    str(turn): turn
    for turn in (
        Turn(angles=angles, pairs=pairs, into_pairs=into, wide=wide, last=last, tokens=tokens, opposite=opposite)
        for last, opposite, tokens, angles, into, pairs, wide in product(
            BOTH, BOTH, (2, 1), get_args(Angles), BOTH, BOTH, BOTH
        )
    )
}
"""All ways of rotating by their names, in the order in which they are tried."""
Rotate: TypeAlias = Callable[..., object]
Kind: TypeAlias = tuple[torch.dtype, int]
"""Dtype and width of a tensor's last dimension."""


def rotations(forward: FunctionType) -> dict[str, Rotate]:
    """Return the fused form of each rotation that a forward calls, by its name in the forward's module."""
    called = {name: forward.__globals__.get(name) for name in forward.__code__.co_names if NAMED in name}
    return {name: _fused(plain) for name, plain in called.items() if _takes_angles(plain)}


def _takes_angles(plain: object) -> bool:
    names = inspect.signature(plain).parameters.keys() if isinstance(plain, FunctionType) else set()
    return {"cos", "sin"} <= names or COMPLEX in names


@cache
def _fused(plain: FunctionType) -> Rotate:
    """Return a function that rotates as `plain` does, by the kernel where that gives the same numbers."""
    names = tuple(inspect.signature(plain).parameters)

    @wraps(plain)
    def rotate(*args: object, **kwargs: object) -> object:
        given = dict(zip(names, args, strict=False)) | kwargs  # in each layer: binding to a signature takes long
        cos, sin, axis = given.pop("cos", None), given.pop("sin", None), given.pop("unsqueeze_dim", None)
        turning = given.pop(COMPLEX, None)
        if isinstance(turning, Tensor) and turning.is_complex():
            cos, sin = turning.real.contiguous(), turning.imag.contiguous()
        heads = [each for each in given.values() if each is not None]
        if not _are_states(heads) or not _are_angles(cos, sin) or not isinstance(axis, int | None):
            return plain(*args, **kwargs)
        of_heads = tuple(name for name, each in given.items() if each is not None)
        kinds = tuple((each.dtype, each.shape[-1]) for each in (*heads, cos))
        is_complex = turning is not None
        turn = TURNS.get(_name_of_turn(plain, of_heads, is_complex, axis, kinds, cos.device))
        if turn is None or cos.shape[1] != heads[0].shape[turn.tokens] or len(cos) not in (1, len(heads[0])):
            return plain(*args, **kwargs)
        turned = _Rotated.apply(turn, cos, sin, *heads)  # type: ignore[no-untyped-call]
        return turned if len(heads) > 1 else turned[0]

    return rotate


def _are_states(heads: Sequence[object]) -> TypeGuard[Sequence[Tensor]]:
    """Return whether the kernel takes these: one or two tensors [batch, heads, tokens, n] that are dense."""
    if len(heads) not in (1, 2) or type(heads[0]) is not Tensor:
        return False
    dtype, batch = heads[0].dtype, len(heads[0])
    for each in heads:
        if type(each) is not Tensor or each.dim() != 4 or each.dtype != dtype or len(each) != batch:
            return False
        if each.stride(-1) != 1 or not each.numel():
            return False
    return True


def _are_angles(cos: object, sin: object) -> TypeGuard[Tensor]:
    """Return whether the kernel takes these as angles [batch, tokens, n]."""
    if type(cos) is not Tensor or type(sin) is not Tensor or cos.dim() != 3 or cos.shape != sin.shape:
        return False
    is_dense = cos.stride(-1) == sin.stride(-1) == 1
    return is_dense and cos.dtype == sin.dtype and not cos.requires_grad and not sin.requires_grad


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, turn: Turn, cos: Tensor, sin: Tensor, *heads: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.turn = turn
        return kernels.rotate(heads, cos, sin, turn)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dense = [each if each.stride(-1) == 1 else each.contiguous() for each in grads]
        cos, sin = ctx.saved_tensors
        return None, None, None, *kernels.rotate(dense, cos, sin, ctx.turn, backward=True)


# Otherwise torch.compile would trace the trial in every layer. A name can be a constant of its graph, an object cannot.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _name_of_turn(*asked: Any) -> str:
    """Return the name of the turn that `_tried` finds for these arguments; "None" if it finds none."""
    return str(_tried(*asked))


@cache
@trial()
def _tried(
    plain: Rotate,
    names: tuple[str, ...],
    is_complex: bool,
    axis: int | None,
    kinds: tuple[Kind, ...],
    device: torch.device,
) -> Turn | None:
    """Return how `plain` rotates tensors of these names and kinds, the last one of which is that of angles."""
    *of_heads, (of_angles, width) = kinds
    roundings = (False, True) if all(dtype == of_angles for dtype, _ in of_heads) else (True,)  # else torch widens
    for turn in _ways(min(size for _, size in of_heads), width, roundings):
        generator = torch.Generator().manual_seed(0)
        cos, sin = (torch.randn((2, 5, width), generator=generator, device="cpu").to(of_angles) for _ in range(2))
        heads = []
        for count, (dtype, size) in enumerate(of_heads, 3):
            drawn = torch.randn((2, 5, count, size), generator=generator, device="cpu").to(dtype)
            heads.append((drawn if turn.tokens == 1 else drawn.transpose(1, 2)).requires_grad_())
        try:
            more = {} if axis is None else {"unsqueeze_dim": axis}
            angles = {COMPLEX: torch.complex(cos, sin)} if is_complex else {"cos": cos, "sin": sin}
            made = plain(**dict(zip(names, heads, strict=True)), **angles, **more)
            wanted = cast("tuple[Tensor, ...]", made if len(heads) > 1 else (made,))
            if all(map(torch.equal, wanted, [turned(each, cos, sin, turn) for each in heads])):
                of_heads_wanted = torch.autograd.grad(wanted, heads, wanted)
                inputs, grads = ([each.detach().to(device) for each in several] for several in (heads, wanted))
                of_cos, of_sin = cos.to(device), sin.to(device)
                found = kernels.rotate(inputs, of_cos, of_sin, turn)
                back = kernels.rotate(grads, of_cos, of_sin, turn, backward=True)
                is_same = all(map(_same, (*found, *back), (*wanted, *of_heads_wanted)))
                return turn if is_same else None
        except (TypeError, ValueError, RuntimeError, IndexError):  # of inputs in another order of dimensions
            continue
    return None


def _same(found: Tensor, wanted: Tensor) -> bool:
    """Return whether a kernel's numbers are a family's, up to two units in the last place of the largest."""
    near = 2 * torch.finfo(wanted.dtype).eps * float(wanted.detach().abs().max())
    return found.dtype == wanted.dtype and torch.allclose(found.cpu(), wanted, rtol=0, atol=near)


def _ways(head: int, width: int, roundings: tuple[bool, ...] = BOTH) -> list[Turn]:
    """Return the ways of rotating heads [..., head] by angles [..., width]."""
    possible = (turn for turn in TURNS.values() if turn.wide in roundings)
    return [turn for turn in possible if turn.width(width) <= head and turn.width(width) % 2 == 0]


def turned(x: Tensor, cos: Tensor, sin: Tensor, turn: Turn) -> Tensor:
    """Return `x`, rotated by torch's own operations as the kernel rotates it."""
    rotated = turn.width(cos.shape[-1])
    rest, x = x.tensor_split([x.shape[-1] - rotated], -1) if turn.last else reversed(x.tensor_split([rotated], -1))
    angles = [each.unsqueeze(3 - turn.tokens) for each in (cos, sin)]
    if turn.wide:
        first, second, *angles = (each.float() for each in (*_halves(x, turn.pairs), *angles))
    else:
        first, second = _halves(x, turn.pairs)
    (of_first, of_second), (into_first, into_second) = (_of_pairs(each, turn.angles) for each in angles)
    sign = -1 if turn.opposite else 1
    both = first * of_first - sign * second * into_first, second * of_second + sign * first * into_second
    out = torch.stack(both, -1).flatten(-2) if turn.into_pairs else torch.cat(both, -1)
    out = out.to(x.dtype)
    return torch.cat((rest, out) if turn.last else (out, rest), -1)


def _halves(x: Tensor, pairs: bool) -> tuple[Tensor, Tensor]:
    half = x.shape[-1] // 2
    return (x[..., ::2], x[..., 1::2]) if pairs else (x[..., :half], x[..., half:])


def _of_pairs(angles: Tensor, stand: Angles) -> tuple[Tensor, Tensor]:
    """Return the angles of the first and of the second dimension of each pair."""
    if stand == "each":
        return angles, angles
    if stand == "first half":
        first, _ = _halves(angles, pairs=False)
        return first, first
    return _halves(angles, stand == "pairs")
